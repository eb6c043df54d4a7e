"""Lines of a training: which figures of a step they name, what they count, and when they come without steps."""

import io

import pytest

from agentlightning.trainer.line_view import LineView, main_figures
from agentlightning.trainer.progress import Figures
from agentlightning.types import MetricPoint


def figures(seconds: float, finished: int, *, errors: int = 0) -> Figures:
    return Figures(
        elapsed_seconds=seconds,
        rollouts={"succeeded": finished},
        finished=finished,
        total=finished,
        reward_mean=0.5,
        reward_last=0.5,
        rewards=finished,
        curve=(),
        tokens=0,
        tokens_per_second=0.0,
        errors=errors,
        failures=(),
        eta_seconds=None,
        is_estimate=False,
    )


def a_step(number: int, seconds: float) -> MetricPoint:
    return MetricPoint(run_id="run-1", step=number, time=seconds, values={"reward/mean": number / 10})


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
        view.tell_metrics(a_step(number, seconds))
        view.show(figures(seconds, finished=number * 8, errors=number // 2))

    assert output.getvalue().splitlines()[1] == "fit  0:14  step 2  reward/mean 0.2  8 rollouts in 4.5 s  1 error"


def test_without_steps_a_line_comes_every_ten_seconds_in_which_something_happens() -> None:
    output = io.StringIO()
    view = LineView(output, "fit")

    for seconds, finished in ((5.0, 1), (11.0, 2), (15.0, 3), (22.0, 3), (40.0, 3)):
        view.show(figures(seconds, finished))

    assert output.getvalue().splitlines() == [
        "fit  0:11  2/2 rollouts  mean reward 0.5",
        "fit  0:22  3/3 rollouts  mean reward 0.5",
    ]


def test_a_name_cannot_break_a_line() -> None:
    output = io.StringIO()

    LineView(output, "two\nlines\x1b[2J").begin("run-1", None)

    assert output.getvalue() == "two lines [2J  0:00  run run-1  store in memory\n"
