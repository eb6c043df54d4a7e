"""The console: what it shows of a training, and what that costs the store."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import pytest

from agentlightning.store.base import LightningStore
from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.store.sqlite import SqliteLightningStore
from agentlightning.trainer import console as console_module
from agentlightning.trainer.console import SAMPLES_PER_REFRESH, SETTLE_SECONDS, UNREAD_ROLLOUTS, Console
from agentlightning.trainer.views import AttemptFailure, Figures, Sample, View
from agentlightning.types import AttemptedRollout, AttemptStatus, MetricPoint, Notice, NoticeKind, RolloutConfig, Span

PATIENCE_SECONDS = 20.0


class Recorder(View):
    """A view that keeps what it is shown."""

    def __init__(self) -> None:
        self.shown: list[Figures] = []
        self.failures: list[AttemptFailure] = []
        self.steps: list[int] = []
        self.is_closed = False
        self.end: Figures | None = None
        self._is_changed = asyncio.Event()

    def show(self, figures: Figures) -> None:
        self.shown.append(figures)
        self._is_changed.set()

    def add(self, record: Sample | AttemptFailure | MetricPoint) -> None:
        if isinstance(record, AttemptFailure):
            self.failures.append(record)
        elif isinstance(record, MetricPoint):
            self.steps.append(record.step)

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
    """Counts its queries."""

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


async def finish(store: LightningStore, *, reward: float = 1.0, tokens: Any = 10) -> AttemptedRollout:
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


async def fail(
    store: LightningStore,
    message: str | None,
    config: RolloutConfig | None = None,
    status: AttemptStatus = "failed",
) -> AttemptedRollout:
    rollout = await store.start_rollout({"question": "?"}, config=config)
    note = None if message is None else {"error": {"type": "ValueError", "message": message}}
    await store.update_attempt(rollout.rollout_id, rollout.attempt.attempt_id, status=status, metadata=note)
    return rollout


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end all is read, however busy the machine is."""
    monkeypatch.setattr(console_module, "LAST_READ_SECONDS", PATIENCE_SECONDS)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console_module, "REFRESH_SECONDS", 0.01)
    monkeypatch.setattr(console_module, "REST_SECONDS", 0.005)


# ---------------------------------------------------------------------- what it costs


async def test_without_a_view_the_store_is_left_alone() -> None:
    store = CountingStore()

    async with Console(None, store) as console:
        await finish(store)
        summary = await console.summary()

    assert (summary, store.calls) == ({}, {})


async def test_many_rollouts_cost_a_bounded_number_of_calls() -> None:
    store, view = CountingStore(), Recorder()

    async with Console(view, store) as console:
        for _ in range(2 * UNREAD_ROLLOUTS):
            await finish(store)
        turns = len(view.shown)
        summary = await console.summary()

    assert summary["rollouts"] == {"succeeded": 2 * UNREAD_ROLLOUTS}
    assert store.calls["subscribe"] == 1
    assert store.calls["query_rollouts"] == 4  # once, at the start
    assert store.calls["query_spans"] <= UNREAD_ROLLOUTS + SAMPLES_PER_REFRESH * (turns + 1)


# ---------------------------------------------------------------------- what is shown


async def test_rollouts_are_shown_while_the_training_runs(quick: None) -> None:
    store, view = InMemoryLightningStore(), Recorder()

    async with Console(view, store):
        await store.enqueue_rollout("waiting")
        await finish(store, reward=0.5, tokens=40)
        await view.until(lambda figures: figures.reward_mean is not None)

    assert view.shown[-1].rollouts == {"queuing": 1, "succeeded": 1}
    assert (view.shown[-1].reward_mean, view.shown[-1].tokens) == (0.5, 42)


async def test_the_summary_is_complete_however_short_the_training(tmp_path: Any) -> None:
    store, view = SqliteLightningStore(tmp_path / "runs.db"), Recorder()

    async with Console(view, store) as console:
        for reward, tokens in ((0.0, 10), (1.0, 10), (0.8, "many")):
            await finish(store, reward=reward, tokens=tokens)
        await fail(store, "no \x1b[31manswer\nat all")
        summary = await console.summary()
    await store.close()

    assert summary == {
        "rollouts": {"succeeded": 3, "failed": 1},
        "reward_mean": pytest.approx(0.6),
        "reward_last": 0.8,
        "tokens": 26,
        "errors": 1,
        "is_estimate": False,
    }
    assert [failure.message for failure in view.failures] == ["ValueError: no  [31manswer"]


async def test_a_training_begins_when_what_was_before_it_is_counted() -> None:
    class SlowStore(InMemoryLightningStore):
        async def query_rollouts(self, *args: Any, **kwargs: Any) -> Any:
            await asyncio.sleep(2 * SETTLE_SECONDS)
            return await super().query_rollouts(*args, **kwargs)

    store = SlowStore()
    async with Console(Recorder(), store) as console:
        await finish(store, reward=1.0)
        summary = await console.summary()

    assert (summary["rollouts"], summary["reward_mean"]) == ({"succeeded": 1}, 1.0)


async def test_metrics_of_the_run_are_shown_and_of_no_other() -> None:
    store, view = InMemoryLightningStore(), Recorder()
    run, other = await store.start_run(), await store.start_run()

    async with Console(view, store, run_id=run.run_id) as console:
        for step in range(3):
            await store.add_metrics(run.run_id, step, {"reward": 1.0})
            await store.add_metrics(other.run_id, step + 10, {"reward": 1.0})
        await console.summary()

    assert view.steps == [0, 1, 2]


@pytest.mark.parametrize(
    ("message", "status", "shown"),
    [("first try", "failed", "ValueError: first try"), (None, "timeout", "the attempt ended as 'timeout'")],
    ids=["noted", "status"],
)
async def test_a_failed_attempt_is_shown_though_it_is_tried_again(
    message: str | None, status: AttemptStatus, shown: str
) -> None:
    store, view = InMemoryLightningStore(), Recorder()
    patient = RolloutConfig(max_attempts=2, retry_condition=["failed", "timeout"])

    async with Console(view, store) as console:
        rollout = await fail(store, message, patient, status)
        await console.summary()

    assert view.failures == [AttemptFailure(rollout.rollout_id, rollout.attempt.attempt_id, shown)]


async def test_what_was_finished_before_does_not_count_and_what_waits_does() -> None:
    store, view = InMemoryLightningStore(), Recorder()
    await finish(store)
    await store.enqueue_rollout("left over")

    async with Console(view, store) as console:
        await finish(store)
        summary = await console.summary()

    assert summary["rollouts"] == {"queuing": 1, "succeeded": 1}


async def test_after_a_gap_the_store_is_queried_for_counts() -> None:
    store, view = CountingStore(), Recorder()
    store._board._log = type(store._board._log)(maxlen=20)

    async with Console(view, store) as console:
        for _ in range(50):
            await finish(store)
        summary = await console.summary()

    assert summary["rollouts"] == {"succeeded": 50}
    assert store.calls["query_rollouts"] == 8


async def test_after_a_gap_the_rollouts_of_other_runs_are_not_counted() -> None:
    store = InMemoryLightningStore()
    store._board._log = type(store._board._log)(maxlen=20)

    async with Console(Recorder(), store, run_id="ours") as console:
        for number in range(50):
            rollout = await store.start_rollout(number, metadata={"run_id": "ours" if number % 2 else "theirs"})
            await store.update_attempt(rollout.rollout_id, rollout.attempt.attempt_id, status="succeeded")
        summary = await console.summary()

    assert summary["rollouts"] == {"succeeded": 25}


async def test_a_training_that_fails_is_shown_to_its_end_and_leaves_no_task() -> None:
    store, view = InMemoryLightningStore(), Recorder()

    async def train() -> None:
        async with Console(view, store):
            await finish(store)
            raise RuntimeError("the algorithm")

    with pytest.raises(RuntimeError):
        await train()

    assert view.end is not None
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


class BrokenView(Recorder):
    def begin(self, run_id: str | None, address: str | None) -> None:
        raise BrokenPipeError("nobody reads")


@pytest.mark.parametrize(
    ("store", "view", "reason"),
    [
        (OldStore(), Recorder, "the store cannot be subscribed to"),
        (BrokenStore(), Recorder, "ConnectionError('the store is gone')"),
        (InMemoryLightningStore(), BrokenView, "BrokenPipeError('nobody reads')"),
    ],
    ids=["no notices", "outage", "no reader"],
)
async def test_what_goes_wrong_ends_the_view_and_not_the_training(
    store: LightningStore, view: type[Recorder], reason: str, quick: None, caplog: pytest.LogCaptureFixture
) -> None:
    shown = view()

    async with Console(shown, store) as console:
        await finish(store)
        await console.summary()
        assert await console.summary() == {}

    assert [record.getMessage() for record in caplog.records] == [
        f"The training goes on, but its progress is not shown: {reason}."
    ]
    assert (shown.is_closed, shown.end) == (True, None)


class SilentStore(InMemoryLightningStore):
    async def query_spans(self, *args: Any, **kwargs: Any) -> Any:
        await asyncio.Event().wait()


async def test_a_store_that_does_not_answer_does_not_delay_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console_module, "LAST_READ_SECONDS", 0.01)
    store, view = SilentStore(), Recorder()

    async with Console(view, store) as console:
        await finish(store)
        summary = await asyncio.wait_for(console.summary(), PATIENCE_SECONDS)

    assert (summary["rollouts"], summary["is_estimate"]) == ({"succeeded": 1}, True)
