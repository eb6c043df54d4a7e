"""Views of a training: which one is chosen, and what it writes."""

import io
import json
from typing import Any, get_args

import pytest
from rich.console import Console as Terminal

from agentlightning.errors import ConfigurationError
from agentlightning.trainer.views import (
    AttemptFailure,
    Figures,
    JsonView,
    LineView,
    ProgressMode,
    Sample,
    TerminalView,
    agl_command,
    dashboard_command,
    main_figures,
    resolved_mode,
)
from agentlightning.types import MetricPoint
from agentlightning.verdict import Verdict
from agentlightning.verdict.verdict import Outcome

FIGURES: dict[str, Any] = {
    "seconds": 83.0,
    "rollouts": {"queuing": 150, "running": 4, "succeeded": 44, "failed": 2},
    "finished": 46,
    "total": 200,
    "reward_mean": 0.5,
    "reward_last": 0.75,
    "tokens": 25_500,
    "tokens_per_second": 512.3,
    "errors": 2,
    "eta_seconds": 3723.0,
    "is_estimate": False,
}


def figures(**changes: Any) -> Figures:
    details = {"curve": (0.0, 0.5, 1.0), "failures": (AttemptFailure("ro-1", "at-1", "ValueError: no answer"),)}
    return Figures(**{**FIGURES, **details, **changes})


def counted(seconds: float, finished: int, errors: int = 0) -> Figures:
    return figures(seconds=seconds, finished=finished, total=finished, errors=errors)


@pytest.mark.parametrize("outcome", get_args(Outcome))
def test_every_verdict_on_steps_is_shown_also_that_nothing_can_be_told(outcome: Outcome) -> None:
    output, verdict = io.StringIO(), Verdict(outcome, "Too short to say.", None, ())

    LineView(output, "fit").conclude(verdict, has_steps=True)

    assert output.getvalue() == "fit  Too short to say.\n"


def test_a_run_without_steps_is_not_told_that_nothing_can_be_told() -> None:
    output = io.StringIO()

    LineView(output, "fit").conclude(Verdict("unknown", "The reward is 1.", None, ()), has_steps=False)

    assert output.getvalue() == ""


# ---------------------------------------------------------------------- which one


@pytest.mark.parametrize("mode", ["rich", "plain", "json", "off"])
def test_the_callers_mode_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch, mode: ProgressMode) -> None:
    monkeypatch.setenv("AGL_PROGRESS", "json" if mode == "off" else "off")

    assert resolved_mode(mode) == mode


def test_the_environment_decides_where_the_caller_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGL_PROGRESS", " JSON ")

    assert resolved_mode("auto") == "json"


@pytest.mark.parametrize(
    ("is_terminal", "term", "mode"),
    [(True, "xterm", "rich"), (True, "dumb", "plain"), (False, "xterm", "plain")],
    ids=["terminal", "cannot draw", "pipe"],
)
def test_auto_is_a_live_view_on_a_terminal_and_lines_elsewhere(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool, term: str, mode: str
) -> None:
    monkeypatch.delenv("AGL_PROGRESS", raising=False)
    monkeypatch.setenv("TERM", term)
    output = io.StringIO()
    monkeypatch.setattr(output, "isatty", lambda: is_terminal)
    monkeypatch.setattr("sys.stdout", output)

    assert resolved_mode("auto") == mode


def test_an_unknown_mode_is_refused_with_the_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGL_PROGRESS", "loud")

    with pytest.raises(
        ConfigurationError, match="AGL_PROGRESS must be one of auto, rich, plain, json, off; it is 'loud'"
    ):
        resolved_mode("auto")


# ---------------------------------------------------------------------- events for machines


def test_json_events_are_one_object_a_line() -> None:
    output = io.StringIO()
    view = JsonView(output, "nightly")

    view.add(Sample("ro-1", "succeeded", 0.25, 12))
    view.add(AttemptFailure("ro-2", "at-1", "ValueError: no answer"))
    view.add(MetricPoint(run_id="run-1", step=3, time=0.0, values={"reward": 1.0}))
    view.finish(figures(), "my runs.db")

    events = [json.loads(line) for line in output.getvalue().splitlines()]
    assert {event.pop("name") for event in events} == {"nightly"}
    assert all(event.pop("time") > 0 for event in events)
    assert events == [
        {"event": "rollout", "rollout_id": "ro-1", "status": "succeeded", "reward": 0.25, "tokens": 12},
        {"event": "error", "rollout_id": "ro-2", "attempt_id": "at-1", "message": "ValueError: no answer"},
        {"event": "metrics", "step": 3, "values": {"reward": 1.0}},
        {"event": "summary", **FIGURES, "store": "my runs.db", "command": dashboard_command("my runs.db")},
    ]


# ---------------------------------------------------------------------- lines for people


@pytest.mark.parametrize(
    ("names", "named"),
    [
        (["seconds", "rollouts/all", "skipped/no_reward", "learner/loss", "reward/mean", "reward/max"], "reward/mean"),
        (["apo/candidates", "apo/best_score"], "apo/best_score"),
        (["apo/candidate/v3"], "apo/candidate/v3"),
        (["epochs", "loss"], "loss"),
    ],
    ids=["grpo", "search", "candidate", "fine-tuning"],
)
def test_a_line_names_what_matters_first(names: list[str], named: str) -> None:
    chosen = list(main_figures(dict.fromkeys(names, 1.0)))

    assert chosen[0] == named
    assert len(chosen) <= 4


def test_a_step_counts_the_rollouts_and_seconds_since_the_last_one() -> None:
    output = io.StringIO()
    view = LineView(output, "fit")

    for number, seconds in ((1, 10.0), (2, 14.5)):
        view.add(MetricPoint(run_id="run-1", step=number, time=seconds, values={"reward/mean": number / 10}))
        view.show(counted(seconds, finished=number * 8, errors=number // 2))

    assert output.getvalue().splitlines()[1] == "fit  0:14  step 2  reward/mean 0.2  8 rollouts in 4.5 s  1 error"


def test_without_steps_a_line_comes_every_ten_seconds_in_which_something_happens() -> None:
    output = io.StringIO()
    view = LineView(output, "fit")

    for seconds, finished in ((5.0, 1), (11.0, 2), (15.0, 3), (22.0, 3), (40.0, 3)):
        view.show(counted(seconds, finished))

    assert output.getvalue().splitlines() == [
        "fit  0:11  2/2 rollouts  mean reward 0.5",
        "fit  0:22  3/3 rollouts  mean reward 0.5",
    ]


def test_a_name_cannot_break_a_line() -> None:
    output = io.StringIO()

    LineView(output, "two\nlines\x1b[2J").begin("run-1", None)

    assert output.getvalue() == "two lines [2J  0:00  run run-1  store in memory\n"


# ---------------------------------------------------------------------- on a terminal


@pytest.fixture
def screen() -> Terminal:
    return Terminal(file=io.StringIO(), force_terminal=True, width=100, height=30, color_system=None)


def text_of(screen: Terminal) -> str:
    assert isinstance(screen.file, io.StringIO)
    return screen.file.getvalue()


def test_the_live_rows_say_how_it_goes(screen: Terminal) -> None:
    TerminalView(screen, "nightly").show(figures())

    text = text_of(screen)
    assert "── nightly   1:23   ETA 1:02:03" in text
    assert "46/200   150 queuing   4 running   44 succeeded   2 failed" in text
    assert "▁▅█ mean 0.5   last 0.75   512 tokens/s (25.5k)" in text
    assert "ro-1  ValueError: no answer" in text


def test_a_line_never_leaves_its_row(screen: Terminal) -> None:
    long = AttemptFailure("ro-1", "at-1", "ValueError: " + "x" * 500)

    TerminalView(screen, "nightly").show(figures(failures=(long,)))

    assert "\n" not in text_of(screen)
    assert "x" * 60 in text_of(screen)
    assert "x" * 100 not in text_of(screen)


def test_markup_in_names_and_errors_is_text(screen: Terminal) -> None:
    view = TerminalView(screen, "[red]nightly[/]")
    shown = figures(failures=(AttemptFailure("ro-1", "at-1", "KeyError: [/bold]"),))

    view.show(shown)
    view.finish(shown, None)

    assert text_of(screen).count("KeyError: [/bold]") == 2
    assert text_of(screen).count("[red]nightly[/]") == 2


def test_the_rows_are_given_back_and_printed_at_the_end(screen: Terminal) -> None:
    view = TerminalView(screen, "nightly")
    view.show(figures())

    view.finish(figures(), "/data/my runs.db")
    view.close()

    given_back, _, last = text_of(screen).rpartition("\x1b[r")
    assert "\x1b[1;25r" in given_back
    assert "\x1b[r" not in given_back  # closing twice writes once
    assert "150 queuing   4 running   44 succeeded   2 failed" in last
    assert "store: /data/my runs.db\n" in last
    assert last.endswith(f"look at it again: {agl_command()} dashboard '/data/my runs.db'\n")


@pytest.mark.parametrize("size", [{"height": 5}, {"force_terminal": False}], ids=["small screen", "no terminal"])
def test_where_nothing_can_be_drawn_the_rows_come_at_the_end_only(size: dict[str, Any]) -> None:
    options: dict[str, Any] = {"file": io.StringIO(), "force_terminal": True, "width": 100, "height": 30}
    terminal = Terminal(**{**options, "color_system": None, **size})
    view = TerminalView(terminal, "nightly")

    view.show(figures())
    assert text_of(terminal) == ""
    view.finish(figures(), None)

    assert "(25.5k)" in text_of(terminal)


def test_characters_the_output_does_not_know_are_replaced() -> None:
    raw = io.BytesIO()
    output = io.TextIOWrapper(raw, encoding="ascii")
    view = TerminalView(Terminal(file=output, force_terminal=True, width=100, height=30, color_system=None), "nightly")

    view.show(figures())
    view.finish(figures(), None)

    output.flush()
    assert b"mean 0.5" in raw.getvalue()
