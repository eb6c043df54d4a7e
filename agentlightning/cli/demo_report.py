"""What `agl demo` shows at its end: phases, gain and conversations, from the store that it leaves.

Everything is sampled at the temperature of the training. The store has all of it, so that a training which was stopped
and went on is shown whole.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from types import ModuleType
from typing import Any, Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from agentlightning.adapter import TraceToMessages
from agentlightning.algorithm.batches import Batches, FinishedRollout, Sent, rewards_of_tasks, score_of
from agentlightning.algorithm.comparison import gain_summary
from agentlightning.algorithm.intervals import Estimate
from agentlightning.algorithm.sentinel import Sentinel
from agentlightning.store import LightningStore

PREFIX: Final = "phases/"
LABELS: Final = {
    "calls_tool": "calls the tool",
    "right_expression": "right expression",
    "uses_result": "then uses the result",
    "solved": "solved",
}
SIDES: Final = ("before", "after")
MOST_ROWS: Final = 8
"""Steps in the table of phases."""
MOST_CONVERSATIONS: Final = 3
"""That show something wrong before; one that is wrong after comes on top."""


@dataclass(frozen=True)
class Example:
    """The modules of the example that is trained."""

    agent: ModuleType
    tasks: ModuleType
    phases: ModuleType

    def outcomes(self, finished: FinishedRollout) -> list[Any]:
        """What became of each question of a rollout; the last call of a trace repeats all that came before it."""
        conversations = TraceToMessages().adapt(finished.spans)
        messages = conversations[-1]["messages"] if conversations else []
        return list(self.phases.outcomes(messages, finished.rollout.input))


class PhaseSentinel(Sentinel):
    """Adds the share of questions that reach each phase to the metrics of every step."""

    def __init__(self, example: Example) -> None:
        super().__init__()
        self._example = example

    def figures(self, finished: Sequence[FinishedRollout]) -> dict[str, float]:
        outcomes = [one for rollout in finished for one in self._example.outcomes(rollout)]
        shares = self._example.phases.shares(outcomes)
        return {**super().figures(finished), **{PREFIX + name: value for name, value in shares.items()}}


# ---------------------------------------------------------------------- reading


@dataclass(frozen=True)
class Validation:
    """One pass over the held-out tasks."""

    reward: Estimate
    phases: dict[str, float]
    rewards: list[float | None]
    outcomes: list[list[Any]]
    """Of the questions of each task."""


@dataclass(frozen=True)
class Report:
    """How a training went."""

    before: Validation
    after: Validation
    steps: list[dict[str, float]]
    """Step, mean reward, and phases."""

    @property
    def gain(self) -> dict[str, Any]:
        """Of the held-out tasks, one by one; empty if there is none to compare."""
        found = gain_summary(self.before.rewards, self.after.rewards)
        return dict(found.get("gain", {}))

    def as_event(self) -> dict[str, Any]:
        """All of it, for JSON."""
        sides = zip(SIDES, (self.before, self.after), strict=True)
        return {
            **{name: {"reward": asdict(side.reward), "phases": side.phases} for name, side in sides},
            "gain": self.gain,
            "steps": self.steps,
            "conversations": self.conversations(),
        }

    def conversations(self) -> list[dict[str, Any]]:
        """The same tasks before and after: one for each way to be wrong at first, and one that is wrong at last."""
        pairs = list(zip(self.before.outcomes, self.after.outcomes, strict=True))
        chosen: list[int] = []
        kinds = {"solved"}
        for number, (before, _) in enumerate(pairs):
            found = {one.kind for one in before}
            if len(chosen) < MOST_CONVERSATIONS and not found <= kinds:
                chosen.append(number)
                kinds |= found
        chosen += [number for number, (_, after) in enumerate(pairs) if not all(one.solved for one in after)][:1]
        return [
            {
                side: [{**asdict(one), "kind": one.kind} for one in outcomes]
                for side, outcomes in zip(SIDES, pairs[number], strict=True)
            }
            for number in dict.fromkeys(chosen)
        ]


async def read_report(store: LightningStore, example: Example, held_out: int) -> Report:
    """The newest training in a store, with all the runs it was made in.

    Args:
        held_out: How many tasks a validation has.
    """
    run_ids = await _runs(store)
    rollouts = await store.query_rollouts(mode_in=["val"])
    of_run = {run: [one.rollout_id for one in rollouts if (one.metadata or {}).get("run_id") == run] for run in run_ids}
    before = await _validation(store, example, of_run[run_ids[0]][:held_out])
    after = await _validation(store, example, of_run[run_ids[-1]][-held_out:])
    return Report(before, after, await _steps(store, run_ids))


async def _runs(store: LightningStore) -> list[str]:
    """Ids of the newest run that began anew, which is one that validated before its first step, and of those since."""
    found: list[str] = []
    for run in await store.query_runs():
        points = await store.query_metrics(run.run_id, names=["validation/reward"], limit=1)
        began_anew = any(point.step == 0 and point.time >= run.start_time for point in points)
        found = [run.run_id] if began_anew else [*found, run.run_id]
    return found


async def _validation(store: LightningStore, example: Example, rollout_ids: Sequence[str]) -> Validation:
    finished = await Batches(store).gather(Sent({one: one for one in rollout_ids}))
    outcomes = [example.outcomes(one) for one in finished]
    shares = example.phases.shares([one for task in outcomes for one in task])
    return Validation(score_of(finished).reward, shares, rewards_of_tasks(finished), outcomes)


async def _steps(store: LightningStore, run_ids: Sequence[str]) -> list[dict[str, float]]:
    """The curve; a step that was made twice, because a run was killed before it saved it, counts once."""
    names = ["reward/mean", *(PREFIX + phase for phase in LABELS)]
    points = [point for run in run_ids for point in await store.query_metrics(run, names=names)]
    by_step = {point.step: point.values for point in points}
    return [
        {"step": step, **{name.removeprefix(PREFIX): value for name, value in by_step[step].items()}}
        for step in sorted(by_step)
    ]


# ---------------------------------------------------------------------- showing


def show_report(console: Console, report: Report) -> None:
    """Tables of the phases and of the steps, and conversations."""
    _show_steps(console, report.steps)
    for conversation in report.conversations():
        _show_conversation(console, conversation)
    sides = (report.before, report.after)
    table = Table(title=f"{sum(map(len, report.before.outcomes))} held-out questions, sampled as in training")
    for column in ("", *SIDES):
        table.add_column(column)
    for phase, label in LABELS.items():
        table.add_row(label, *(f"{side.phases[phase]:.3f}" for side in sides))
    table.add_section()
    rewards = [side.reward for side in sides]
    table.add_row("mean reward", *(escape(f"{one.mean:.3f} [{one.low:.3f}, {one.high:.3f}]") for one in rewards))
    if any(one.failed for one in rewards):
        table.add_row("rollouts that failed", *(str(one.failed) for one in rewards))
    console.print(table)
    gain = report.gain
    if gain:
        interval = escape(f"[{gain['low']:+.3f}, {gain['high']:+.3f}]")
        console.print(f"Gain, task by task: {gain['mean']:+.3f} {interval}, {gain['n']} tasks: {gain['verdict']}.")


def _show_steps(console: Console, steps: Sequence[dict[str, float]]) -> None:
    table = Table(title="The training, by phases")
    for column in ("step", *LABELS.values(), "mean reward"):
        table.add_column(column, justify="right")
    every = max(1, -(-len(steps) // MOST_ROWS))
    for one in [*steps[:-1:every], *steps[-1:]]:
        figures = [one.get(name) for name in (*LABELS, "reward/mean")]
        table.add_row(f"{one['step']:.0f}", *("" if figure is None else f"{figure:.2f}" for figure in figures))
    console.print(table)


def _show_conversation(console: Console, conversation: dict[str, list[dict[str, object]]]) -> None:
    for before, after in zip(*(conversation[side] for side in SIDES), strict=True):
        console.print(f"[bold]{escape(before['question'])}[/bold]", highlight=False)
        for side, one in zip(SIDES, (before, after), strict=True):
            console.print(f"  {side:6}  {escape(one['text'])}  ({one['kind']})", highlight=False, soft_wrap=True)
    console.print()
