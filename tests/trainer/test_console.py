"""What a training shows: on a terminal, as lines for machines, or nothing; and what that asks of the store."""

import asyncio
import io
import json
import logging
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import pytest
from rich.console import Console as Terminal

from agentlightning.errors import ConfigurationError
from agentlightning.store.base import LightningStore
from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.store.sqlite import SqliteLightningStore
from agentlightning.trainer import console as console_module
from agentlightning.trainer.bottom_rows import BottomRows
from agentlightning.trainer.console import POINTS_PER_REFRESH, SAMPLES_PER_REFRESH, Console, ProgressMode, resolved_mode
from agentlightning.trainer.progress import UNREAD_ROLLOUTS, Failure, Figures, Sample
from agentlightning.trainer.terminal_view import TerminalView, sparkline
from agentlightning.trainer.views import JsonView, View, look_command
from agentlightning.types import AttemptedRollout, MetricPoint, Notice, NoticeKind, RolloutConfig, Span

PATIENCE_SECONDS = 20.0


class Recorder(View):
    """A view that keeps what it is shown."""

    def __init__(self) -> None:
        self.shown: list[Figures] = []
        self.samples: list[Sample] = []
        self.failures: list[Failure] = []
        self.steps: list[int] = []
        self.is_closed = False
        self.end: Figures | None = None
        self._is_changed = asyncio.Event()

    def show(self, figures: Figures) -> None:
        self.shown.append(figures)
        self._is_changed.set()

    def tell_rollout(self, sample: Sample) -> None:
        self.samples.append(sample)

    def tell_failure(self, failure: Failure) -> None:
        self.failures.append(failure)

    def tell_metrics(self, point: MetricPoint) -> None:
        self.steps.append(point.step)

    def close(self) -> None:
        self.is_closed = True

    def finish(self, figures: Figures, address: str | None) -> None:
        self.end = figures

    async def until(self, holds: Callable[[Figures], bool]) -> None:
        """Return when something was shown that is wanted."""

        async def wait() -> None:
            while not self.shown or not holds(self.shown[-1]):
                self._is_changed.clear()
                await self._is_changed.wait()

        await asyncio.wait_for(wait(), PATIENCE_SECONDS)


class CountingStore(InMemoryLightningStore):
    """Counts what it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    async def query_spans(self, *args: Any, **kwargs: Any) -> Any:
        self.calls["query_spans"] += 1
        return await super().query_spans(*args, **kwargs)

    async def query_rollouts(self, *args: Any, **kwargs: Any) -> Any:
        self.calls["query_rollouts"] += 1
        return await super().query_rollouts(*args, **kwargs)

    def subscribe(
        self, kinds: Iterable[NoticeKind] | None = None, *, after: int | None = None
    ) -> AsyncIterator[Notice]:
        self.calls["subscribe"] += 1
        return super().subscribe(kinds, after=after)


async def finish(store: LightningStore, *, reward: float = 1.0, tokens: int = 10) -> AttemptedRollout:
    """A whole rollout with one span."""
    rollout = await store.start_rollout({"question": "?"})
    attempt_id = rollout.attempt.attempt_id
    attributes = {"reward": reward, "gen_ai.usage.prompt_tokens": tokens, "gen_ai.usage.completion_tokens": 2}
    await store.add_span(
        Span.from_attributes(
            name="agentlightning.reward",
            attributes=attributes,
            rollout_id=rollout.rollout_id,
            attempt_id=attempt_id,
            sequence_id=1,
        )
    )
    await store.update_attempt(rollout.rollout_id, attempt_id, status="succeeded")
    return rollout


async def fail(store: LightningStore, message: str, config: RolloutConfig | None = None) -> AttemptedRollout:
    rollout = await store.start_rollout({"question": "?"}, config=config)
    note = {"error": {"type": "ValueError", "message": message}}
    await store.update_attempt(rollout.rollout_id, rollout.attempt.attempt_id, status="failed", metadata=note)
    return rollout


def shown_by(view: View, store: LightningStore, *, address: str | None = None) -> Console:
    return Console("off", store, name="nightly", address=address, view=view)


@pytest.fixture
def screen() -> Terminal:
    return Terminal(file=io.StringIO(), force_terminal=True, width=100, height=30, color_system=None)


def text_of(screen: Terminal) -> str:
    assert isinstance(screen.file, io.StringIO)
    return screen.file.getvalue()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end all is read, however busy the machine is."""
    monkeypatch.setattr(console_module, "LAST_READ_SECONDS", PATIENCE_SECONDS)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console_module, "REFRESH_SECONDS", 0.01)
    monkeypatch.setattr(console_module, "LISTEN_SECONDS", 0.005)


# ---------------------------------------------------------------------- which view


@pytest.mark.parametrize("mode", ["rich", "plain", "json", "off"])
def test_the_callers_mode_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch, mode: ProgressMode) -> None:
    monkeypatch.setenv("AGL_PROGRESS", "json" if mode == "off" else "off")

    assert resolved_mode(mode) == mode


def test_the_environment_decides_where_the_caller_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGL_PROGRESS", " JSON ")

    assert resolved_mode("auto") == "json"


@pytest.mark.parametrize(("is_terminal", "mode"), [(True, "rich"), (False, "plain")], ids=["terminal", "pipe"])
def test_auto_is_a_live_view_on_a_terminal_and_lines_elsewhere(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool, mode: str
) -> None:
    monkeypatch.delenv("AGL_PROGRESS", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    output = io.StringIO()
    monkeypatch.setattr(output, "isatty", lambda: is_terminal)
    monkeypatch.setattr("sys.stdout", output)

    assert resolved_mode("auto") == mode


def test_auto_writes_lines_on_a_terminal_that_cannot_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AGL_PROGRESS", raising=False)
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)

    assert resolved_mode("auto") == "plain"


def test_an_unknown_mode_is_refused_with_the_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGL_PROGRESS", "loud")

    with pytest.raises(
        ConfigurationError, match="AGL_PROGRESS must be one of auto, rich, plain, json, off; it is 'loud'"
    ):
        resolved_mode("auto")


# ---------------------------------------------------------------------- what is asked of the store


async def test_off_asks_the_store_nothing() -> None:
    store = CountingStore()

    async with Console("off", store, name="nightly", address=None) as console:
        await finish(store)
        summary = await console.summary()

    assert summary == {}
    assert store.calls == {}


async def test_many_rollouts_cost_a_bounded_number_of_calls() -> None:
    store, view = CountingStore(), Recorder()

    async with shown_by(view, store) as console:
        for _ in range(3 * UNREAD_ROLLOUTS):
            await finish(store)
        turns = len(view.shown)
        summary = await console.summary()

    assert summary["rollouts"] == {"succeeded": 3 * UNREAD_ROLLOUTS}
    assert store.calls["subscribe"] == 1
    assert store.calls["query_rollouts"] == 4  # once, at the start
    assert store.calls["query_spans"] <= UNREAD_ROLLOUTS + SAMPLES_PER_REFRESH * (turns + 1)


async def test_nothing_is_asked_while_nothing_happens(quick: None) -> None:
    store, view = CountingStore(), Recorder()

    async with shown_by(view, store):
        await view.until(lambda figures: len(view.shown) > 5)

    assert store.calls == {"subscribe": 1, "query_rollouts": 4}


# ---------------------------------------------------------------------- what is shown


async def test_rollouts_are_shown_while_the_training_runs(quick: None) -> None:
    store, view = InMemoryLightningStore(), Recorder()

    async with shown_by(view, store):
        await store.enqueue_rollout("waiting")
        await finish(store, reward=0.5, tokens=40)
        await view.until(lambda figures: figures.rewards == 1)

    assert view.shown[-1].rollouts == {"queuing": 1, "succeeded": 1}
    assert (view.shown[-1].reward_mean, view.shown[-1].tokens) == (0.5, 42)


async def test_the_summary_is_complete_however_short_the_training() -> None:
    store, view = InMemoryLightningStore(), Recorder()

    async with shown_by(view, store) as console:
        for reward in (0.0, 1.0, 0.8):
            await finish(store, reward=reward)
        await fail(store, "no answer\nat all")
        summary = await console.summary()

    assert summary == {
        "rollouts": {"succeeded": 3, "failed": 1},
        "reward_mean": pytest.approx(0.6),
        "reward_last": 0.8,
        "tokens": 36,
        "errors": 1,
        "is_estimate": False,
    }
    assert [failure.message for failure in view.failures] == ["ValueError: no answer"]


async def test_metrics_of_the_run_are_shown_and_of_no_other() -> None:
    store, view = InMemoryLightningStore(), Recorder()
    run, other = await store.start_run(), await store.start_run()

    async with Console("off", store, name="nightly", address=None, run_id=run.run_id, view=view) as console:
        for step in range(3):
            await store.add_metrics(run.run_id, step, {"reward": 1.0})
            await store.add_metrics(other.run_id, step + 10, {"reward": 1.0})
        await console.summary()

    assert view.steps == [0, 1, 2]


async def test_of_more_metrics_than_are_read_the_last_ones_are_shown() -> None:
    store, view = InMemoryLightningStore(), Recorder()
    run = await store.start_run()

    async with Console("off", store, name="nightly", address=None, run_id=run.run_id, view=view) as console:
        for step in range(200):
            await store.add_metrics(run.run_id, step, {"reward": 1.0})
        await console.summary()

    assert view.steps[-POINTS_PER_REFRESH:] == list(range(200 - POINTS_PER_REFRESH, 200))
    assert len(view.steps) < 200


async def test_a_failed_attempt_is_told_though_it_is_tried_again(quick: None) -> None:
    store, view = InMemoryLightningStore(), Recorder()
    patient = RolloutConfig(max_attempts=2, retry_condition=["failed"])

    async with shown_by(view, store) as console:
        rollout = await fail(store, "first try", patient)
        await console.summary()

    assert view.failures == [Failure(rollout.rollout_id, rollout.attempt.attempt_id, "ValueError: first try")]


async def test_what_was_finished_before_does_not_count_and_what_waits_does() -> None:
    store, view = InMemoryLightningStore(), Recorder()
    await finish(store)
    await store.enqueue_rollout("left over")

    async with shown_by(view, store) as console:
        await finish(store)
        summary = await console.summary()

    assert summary["rollouts"] == {"queuing": 1, "succeeded": 1}


async def test_after_a_gap_the_store_is_asked_how_things_stand() -> None:
    store, view = CountingStore(), Recorder()
    store._board._log = type(store._board._log)(maxlen=20)

    async with shown_by(view, store) as console:
        await asyncio.sleep(0)
        for _ in range(50):
            await finish(store)
        summary = await console.summary()

    assert summary["rollouts"] == {"succeeded": 50}
    assert store.calls["query_rollouts"] == 8


async def test_a_training_that_fails_is_shown_to_its_end() -> None:
    store, view = InMemoryLightningStore(), Recorder()

    with pytest.raises(RuntimeError):
        async with shown_by(view, store):
            raise RuntimeError("the algorithm")

    assert view.end is not None


async def test_no_task_and_no_listener_is_left_behind() -> None:
    store = InMemoryLightningStore()

    async with shown_by(Recorder(), store):
        await finish(store)

    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert not store._board.has_waiters


# ---------------------------------------------------------------------- when it cannot be followed


class OldStore(InMemoryLightningStore):
    def subscribe(
        self, kinds: Iterable[NoticeKind] | None = None, *, after: int | None = None
    ) -> AsyncIterator[Notice]:
        raise NotImplementedError


class BrokenStore(InMemoryLightningStore):
    async def query_spans(self, *args: Any, **kwargs: Any) -> Any:
        raise ConnectionError("the store is gone")


class SilentStore(InMemoryLightningStore):
    async def query_spans(self, *args: Any, **kwargs: Any) -> Any:
        await asyncio.Event().wait()


async def test_a_store_that_cannot_be_subscribed_to_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    view = Recorder()

    async with shown_by(view, OldStore()) as console:
        assert await console.summary() == {}

    assert [record.getMessage() for record in caplog.records] == [
        "The training goes on, but its progress is not shown: the store cannot be subscribed to."
    ]
    assert (view.is_closed, view.end) == (True, None)


async def test_an_outage_ends_the_view_and_not_the_training(quick: None, caplog: pytest.LogCaptureFixture) -> None:
    store, view = BrokenStore(), Recorder()

    async with shown_by(view, store) as console:
        await finish(store)
        await console.summary()

    assert len(caplog.records) == 1
    assert "the store is gone" in caplog.text
    assert (view.is_closed, view.end) == (True, None)


async def test_a_store_that_does_not_answer_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console_module, "LAST_READ_SECONDS", 0.01)
    store, view = SilentStore(), Recorder()

    async with shown_by(view, store) as console:
        await finish(store)
        summary = await asyncio.wait_for(console.summary(), PATIENCE_SECONDS)

    assert (summary["rollouts"], summary["is_estimate"]) == ({"succeeded": 1}, True)


async def test_an_output_nobody_reads_ends_the_view_and_not_the_training(caplog: pytest.LogCaptureFixture) -> None:
    output = io.StringIO()
    output.close()

    async with shown_by(JsonView(output, "nightly"), InMemoryLightningStore()) as console:
        await asyncio.sleep(0)
        await console.summary()

    assert len(caplog.records) == 1


# ---------------------------------------------------------------------- lines for machines


async def test_json_events_are_one_object_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    store = InMemoryLightningStore()

    async with Console("json", store, name="nightly", address="runs.db") as console:
        done = await finish(store, reward=0.25)
        failed = await fail(store, "no answer")
        await console.summary()

    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    by_event = {event["event"]: event for event in events}
    assert [event["event"] for event in events] == ["error", "rollout", "rollout", "summary"]
    assert {event["name"] for event in events} == {"nightly"}
    assert by_event["error"]["message"] == "ValueError: no answer"
    assert by_event["error"]["rollout_id"] == failed.rollout_id
    assert events[1] == events[1] | {"rollout_id": done.rollout_id, "status": "succeeded", "reward": 0.25, "tokens": 12}
    assert by_event["summary"]["rollouts"] == {"succeeded": 1, "failed": 1}
    assert by_event["summary"]["command"] == "agl dashboard runs.db"


def test_progress_events_come_at_most_once_a_second() -> None:
    output = io.StringIO()
    view = JsonView(output, "nightly")

    for seconds in (0.0, 0.5, 0.9, 1.0, 1.5, 2.1):
        view.show(some_figures(elapsed_seconds=seconds))

    assert [json.loads(line)["seconds"] for line in output.getvalue().splitlines()] == [0.0, 1.0, 2.1]


# ---------------------------------------------------------------------- on a terminal


def some_figures(**changes: Any) -> Figures:
    fields: dict[str, Any] = {
        "elapsed_seconds": 83.0,
        "rollouts": {"queuing": 150, "running": 4, "succeeded": 44, "failed": 2},
        "finished": 46,
        "total": 200,
        "reward_mean": 0.5,
        "reward_last": 0.75,
        "rewards": 44,
        "curve": (0.0, 0.5, 1.0),
        "tokens": 25_500,
        "tokens_per_second": 512.3,
        "errors": 2,
        "failures": (Failure("ro-1", "at-1", "ValueError: no answer"),),
        "eta_seconds": 3723.0,
        "is_estimate": False,
    }
    return Figures(**{**fields, **changes})


def test_the_live_rows_say_how_it_goes(screen: Terminal) -> None:
    TerminalView(screen, "nightly").show(some_figures())

    text = text_of(screen)
    assert "── nightly   1:23   ETA 1:02:03" in text
    assert "46/200   150 queuing   4 running   44 succeeded   2 failed" in text
    assert "▁▅█ mean 0.5   last 0.75   512 tokens/s (25.5k)" in text
    assert "ro-1  ValueError: no answer" in text


def test_estimates_are_marked(screen: Terminal) -> None:
    TerminalView(screen, "nightly").show(some_figures(is_estimate=True))

    assert "mean ~0.5   last 0.75   ~512 tokens/s (~25.5k)" in text_of(screen)


def test_a_line_never_leaves_its_row(screen: Terminal) -> None:
    long = Failure("ro-1", "at-1", "ValueError: " + "x" * 500)

    TerminalView(screen, "nightly").show(some_figures(failures=(long,)))

    assert "\n" not in text_of(screen)
    assert "x" * 60 in text_of(screen)
    assert "x" * 100 not in text_of(screen)


def test_markup_in_names_and_errors_is_text(screen: Terminal) -> None:
    view = TerminalView(screen, "[red]nightly[/]")
    figures = some_figures(failures=(Failure("ro-1", "at-1", "KeyError: [/bold]"),))

    view.show(figures)
    view.finish(figures, None)

    assert text_of(screen).count("KeyError: [/bold]") == 2
    assert text_of(screen).count("[red]nightly[/]") == 2


def test_the_rows_are_given_back_before_the_table_comes(screen: Terminal) -> None:
    view = TerminalView(screen, "nightly")
    view.show(some_figures())

    view.finish(some_figures(), "/data/my runs.db")

    given_back, _, table = text_of(screen).rpartition("\x1b[r")
    assert "\x1b[1;25r" in given_back
    assert "150 queuing, 4 running, 44 succeeded, 2 failed" in table
    assert "store: /data/my runs.db\n" in table
    assert "look at it again: agl dashboard '/data/my runs.db'\n" in table


def test_without_a_terminal_only_the_table_comes() -> None:
    plain = Terminal(file=io.StringIO(), force_terminal=False, width=100)
    view = TerminalView(plain, "nightly")

    view.show(some_figures())
    assert text_of(plain) == ""
    view.finish(some_figures(), None)

    assert "\x1b" not in text_of(plain)
    assert "25,500" in text_of(plain)


def test_characters_the_output_does_not_know_are_replaced() -> None:
    raw = io.BytesIO()
    output = io.TextIOWrapper(raw, encoding="ascii")
    view = TerminalView(Terminal(file=output, force_terminal=True, width=100, height=30, color_system=None), "nightly")

    view.show(some_figures())
    view.finish(some_figures(), None)

    output.flush()
    assert b"mean 0.5" in raw.getvalue()


async def test_a_training_on_a_terminal_is_shown_and_summed_up(screen: Terminal, quick: None) -> None:
    store = InMemoryLightningStore()

    async with shown_by(TerminalView(screen, "nightly"), store, address="runs.db") as console:
        await finish(store, reward=0.25)
        while "1/1   1 succeeded" not in text_of(screen):
            await asyncio.sleep(0)
        await console.summary()

    assert "│ 1 succeeded" in text_of(screen)
    assert text_of(screen).endswith("look at it again: agl dashboard runs.db\n")


async def test_ctrl_c_gives_the_rows_back(screen: Terminal, quick: None) -> None:
    async def train() -> None:
        async with shown_by(TerminalView(screen, "nightly"), InMemoryLightningStore()):
            await asyncio.sleep(PATIENCE_SECONDS)

    training = asyncio.create_task(train())
    while "── nightly" not in text_of(screen):
        await asyncio.sleep(0)
    training.cancel()
    await asyncio.wait([training])

    assert "\x1b[r" in text_of(screen).rpartition("── nightly")[2]


@pytest.mark.parametrize(
    ("points", "line"),
    [((), ""), ((2.0, 2.0), "▅▅"), ((0.0, 0.0), "▁▁"), ((0.0, 1.0), "▁█"), ((1.0, 0.0, 0.5), "█▁▅")],
    ids=["empty", "level", "zero", "rise", "dip"],
)
def test_a_curve_lies_between_its_lowest_and_highest_point(points: tuple[float, ...], line: str) -> None:
    assert sparkline(points) == line


def test_the_command_quotes_what_a_shell_would_split() -> None:
    assert look_command("my runs.db") == "agl dashboard 'my runs.db'"


# ---------------------------------------------------------------------- the rows


def test_rows_are_set_apart_once_and_then_only_redrawn() -> None:
    output = io.StringIO()
    rows = BottomRows(output)

    rows.draw(["one", "two"], 24)
    rows.draw(["three", "four"], 24)
    rows.close()

    assert output.getvalue().count("\x1b[1;22r") == 1
    assert "\x1b[23;1H\x1b[2Kthree\x1b[24;1H\x1b[2Kfour" in output.getvalue()


def test_rows_grow_and_follow_the_screen() -> None:
    output = io.StringIO()
    rows = BottomRows(output)

    rows.draw(["one"], 24)
    rows.draw(["one", "two"], 24)
    rows.draw(["one", "two"], 40)
    rows.close()

    assert [f"\x1b[1;{last}r" in output.getvalue() for last in (23, 22, 38)] == [True, True, True]


def test_a_small_screen_is_left_alone() -> None:
    output = io.StringIO()

    BottomRows(output).draw(["one"], 5)

    assert output.getvalue() == ""


def test_closing_twice_writes_once() -> None:
    output = io.StringIO()
    rows = BottomRows(output)
    rows.draw(["one"], 24)

    rows.close()
    rows.close()

    assert output.getvalue().count("\x1b[r") == 1


# ---------------------------------------------------------------------- other stores


async def test_a_sqlite_store_is_followed_too(tmp_path: Any) -> None:
    store, view = SqliteLightningStore(tmp_path / "runs.db"), Recorder()

    async with shown_by(view, store) as console:
        for _ in range(5):
            await finish(store)
        summary = await console.summary()
    await store.close()

    assert (summary["rollouts"], summary["tokens"]) == ({"succeeded": 5}, 60)


async def test_log_lines_are_not_touched(screen: Terminal, quick: None) -> None:
    """The rows need no part in logging: handlers and streams stay as they are."""
    before = (sys.stdout, sys.stderr, list(logging.getLogger().handlers))

    async with shown_by(TerminalView(screen, "nightly"), InMemoryLightningStore()):
        await asyncio.sleep(0.02)

        assert (sys.stdout, sys.stderr, list(logging.getLogger().handlers)) == before
