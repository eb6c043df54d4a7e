"""`agl demo`: watch an agent learn from reward alone, on this machine, with nothing to download.

At its end it shows phases, gain and conversations, sampled at the temperature of the training. The store has all of it,
so that a training which was stopped and went on is shown whole.
"""

import argparse
import asyncio
import importlib.util
import random
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from agentlightning.adapter import TraceToMessages
from agentlightning.algorithm.batches import Batches, FinishedRollout, Sent, rewards_of_tasks, score_of
from agentlightning.algorithm.comparison import Estimate, gain_summary
from agentlightning.algorithm.sentinel import Sentinel
from agentlightning.cli import INTERRUPTED, TERMINATED
from agentlightning.cli.command import (
    argument,
    cli_command,
    finite_number,
    named_path,
    positive_number,
    print_json,
)
from agentlightning.cli.export_model import is_checkpoints
from agentlightning.errors import ConfigurationError
from agentlightning.litagent import rollout
from agentlightning.store import LightningStore, SqliteLightningStore
from agentlightning.trainer.views import agl_command, dashboard_command
from agentlightning.types import Rollout
from agentlightning.utils.installation import install_command

EXAMPLE: Final = "calc_x"
QUESTIONS: Final = 3
TRAINING_QUESTIONS: Final = 20_000
HELD_OUT_TASKS: Final = 128
TASKS_PER_STEP: Final = {1: 16, 2: 12, 3: 10}
"""By the questions of a task."""
TEMPERATURE: Final = 1.0
"""Of training and of every measurement."""
TARGET: Final = 0.97
EPOCHS: Final = 2
"""To learn from a rollout again costs far less than another rollout."""
ANSWERS, RANDOM = "answers", "random"
MOST_STEPS: Final = {ANSWERS: 120, RANDOM: 30}
"""By the reward; random ones never reach the target."""
CHECKPOINTS: Final = "checkpoints"
SEED_DIGITS: Final = 9
MEGABYTE: Final = 1e6
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


class PhaseSentinel(Sentinel):
    """Adds the share of questions that reach each phase to the metrics of every step."""

    def figures(self, finished: Sequence[FinishedRollout]) -> dict[str, float]:
        shares = example_part("phases").shares([one for rollout in finished for one in _outcomes(rollout)])
        return {**super().figures(finished), **{PREFIX + name: value for name, value in shares.items()}}


def _outcomes(finished: FinishedRollout) -> list[Any]:
    """What became of each question of a rollout; the last call of a trace repeats all that came before it."""
    conversations = TraceToMessages().adapt(finished.spans)
    messages = conversations[-1]["messages"] if conversations else []
    return list(example_part("phases").outcomes(messages, finished.rollout.input))


def _target(text: str) -> float:
    number = finite_number(text)
    if not 0 < number <= 1:
        raise argparse.ArgumentTypeError(f"{text} is no mean of rewards of 0 and 1; give more than 0, and at most 1")
    return number


def _seed(text: str) -> int:
    if not text.isdecimal() or len(text) > SEED_DIGITS:
        raise argparse.ArgumentTypeError(f"{text!r} is no seed; give a whole number of at most {SEED_DIGITS} digits")
    return int(text)


@cli_command(
    "demo",
    description="Train a calculator agent with GRPO: an ordinary program for the openai package, a tiny model that "
    "comes with this one, and a reward of 1 or 0.",
    examples="""\
examples:
  agl demo                             a minute or two on two cores
  agl demo --questions 1               the easier task: one question in a conversation
  agl demo --reward random             the control: rewards that say nothing, and nothing is learned
  agl demo --folder calc --seed 3      keep the store and the trained model in the folder calc
  agl serve calc/model                 serve what it learned
""",
    arguments=(
        argument(
            "--folder",
            type=named_path,
            help="folder of the store and the trained model; a new temporary one by default",
        ),
        argument(
            "--seed",
            type=_seed,
            default=0,
            help="seed of the tasks and of the sampling; which rollouts meet in a batch depends on timing, so that "
            "runs of the same seed take different numbers of steps",
        ),
        argument(
            "--questions",
            type=int,
            choices=tuple(TASKS_PER_STEP),
            default=QUESTIONS,
            help="questions in one conversation",
        ),
        argument(
            "--reward",
            choices=tuple(MOST_STEPS),
            default=ANSWERS,
            help="the share of right answers, or the control: 0 or 1 by chance, from which nothing can be learned",
        ),
        argument(
            "--steps",
            type=positive_number,
            help=f"at most; {MOST_STEPS[ANSWERS]}, or {MOST_STEPS[RANDOM]} with random rewards",
        ),
        argument("--target", type=_target, default=TARGET, help="mean reward to stop at"),
        argument("--runners", type=positive_number, default=1, help="processes that run the agent"),
        argument("--concurrency", type=positive_number, default=24, help="rollouts at once in each"),
        argument("--resume", action="store_true", help="go on with what is in --folder"),
        argument("--json", action="store_true", help="events for machines instead of the live view"),
    ),
)
def main(arguments: argparse.Namespace) -> int:
    missing = [name for name in ("torch", "safetensors", "openai") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigurationError(
            f"The demo needs {', '.join(missing)}; install them with: {install_command('train', 'openai')}"
        )
    if arguments.resume and arguments.folder is None:
        raise ConfigurationError("--resume needs the --folder of the run to go on with.")
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="agl-demo-"))
    if arguments.resume and not is_checkpoints(folder / CHECKPOINTS):
        raise ConfigurationError(
            f"There is nothing to resume in '{folder}': it holds no checkpoints; leave --resume out to begin."
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"The folder '{folder}' cannot be made: {error.strerror}; give another with --folder."
        ) from error
    began = time.monotonic()
    try:
        algorithm = _trained(arguments, folder)
    except KeyboardInterrupt:
        stopped = f"Stopped; {_way_on(arguments, folder)}"
        Console(stderr=True).print(stopped, markup=False, highlight=False, soft_wrap=True)
        return INTERRUPTED
    finally:
        if arguments.folder is None and folder.is_dir() and not any(folder.iterdir()):  # it failed before it began
            folder.rmdir()
    if arguments.folder is None:  # nobody will resume from there, and the trained model is written
        shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
    report = asyncio.run(_read(folder))
    seconds = time.monotonic() - began
    if arguments.json:
        settings = {name: getattr(arguments, name) for name in ("questions", "reward", "seed")}
        settings |= {"temperature": TEMPERATURE, "seconds": round(seconds, 1), "folder": str(folder)}
        print_json({"event": "report", **settings, **report.as_event()})
    else:
        _show(report, algorithm, folder, seconds)
        left = _left(folder, is_temporary=arguments.folder is None)
        Console().print(left, markup=False, highlight=False, soft_wrap=True)
    return 0


def _way_on(arguments: argparse.Namespace, folder: Path) -> str:
    """How to continue a training that was stopped; a temporary folder without a checkpoint is of no use and goes."""
    again = f"{agl_command()} demo"
    for name, default in (("questions", QUESTIONS), ("reward", ANSWERS)):
        if getattr(arguments, name) != default:
            again += f" --{name} {getattr(arguments, name)}"
    if is_checkpoints(folder / CHECKPOINTS):
        return f"go on with: {again} --folder {folder} --resume"
    if arguments.folder is None:
        shutil.rmtree(folder, ignore_errors=True)
        return f"there is no checkpoint yet, so begin again with: {again}"
    return f"there is no checkpoint yet, so begin again with: {again} --folder {folder}"


def _trained(arguments: argparse.Namespace, folder: Path) -> Any:
    from agentlightning.algorithm.grpo import GRPO, LearnerSettings
    from agentlightning.trainer import Trainer

    class DemoTraining(GRPO):
        def resume_hint(self) -> str:
            return ""  # the command has a sentence of its own

    algorithm = DemoTraining(
        "tiny",
        tasks_per_step=TASKS_PER_STEP[arguments.questions],
        steps=arguments.steps or MOST_STEPS[arguments.reward],
        target_reward=arguments.target,
        temperature=TEMPERATURE,
        validation_temperature=TEMPERATURE,
        seed=arguments.seed,
        learning=LearnerSettings(seed=arguments.seed, epochs=EPOCHS),
        output=folder / "model",
        checkpoints=folder / CHECKPOINTS,
        resume=arguments.resume,
        sentinel=PhaseSentinel(),
    )
    trainer = Trainer(
        algorithm=algorithm,
        store=f"sqlite:///{folder / 'runs.db'}",
        n_runners=arguments.runners,
        strategy={"type": "cs", "server_port": 0},
        runner={"type": "agentlightning.LitAgentRunner", "max_concurrency": arguments.concurrency},
        progress="json" if arguments.json else "auto",
    )
    trainer.fit(
        with_random_reward if arguments.reward == RANDOM else example_part("calc_agent").solve_all,
        train_dataset=training_tasks(arguments.questions, arguments.seed),
        val_dataset=held_out_tasks(arguments.questions),
    )
    if algorithm.result is None:  # SIGTERM lets a training return
        raise SystemExit(TERMINATED)
    return algorithm


@rollout
def with_random_reward(task: dict[str, list[str]], rollout: Rollout) -> float:
    """The agent of the example, with a reward that has nothing to do with its answers."""
    example_part("calc_agent").solve_all(task)
    return float(random.Random(rollout.rollout_id).randrange(2))


def training_tasks(questions: int, seed: int) -> Any:
    """Tasks of so many questions, none of which is held out."""
    count = TRAINING_QUESTIONS // questions
    return example_part("tasks").conversations(count, questions=questions, held_out=False, seed=seed)


def held_out_tasks(questions: int) -> Any:
    """The tasks with which every training is measured."""
    return example_part("tasks").conversations(HELD_OUT_TASKS, questions=questions, held_out=True)


def example_part(name: str) -> ModuleType:
    """A module of the example; it lies beside the package, or in it where that was installed."""
    package = Path(__file__).parent.parent
    for folder in (package / "_examples" / EXAMPLE, package.parent / "examples" / EXAMPLE):
        if (folder / f"{name}.py").is_file():
            if str(folder) not in sys.path:
                sys.path.insert(0, str(folder))
            return importlib.import_module(name)
    raise ConfigurationError(f"The example '{EXAMPLE}' is not here; run the demo from a checkout or from a wheel.")


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
            # Three show something wrong before; one that is wrong after comes on top.
            if len(chosen) < 3 and not found <= kinds:
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


async def _report_of(store: LightningStore) -> Report:
    """The newest training in a store, with all the runs it was made in."""
    run_ids = await _runs(store)
    rollouts = await store.query_rollouts(mode_in=["val"])
    of_run = {run: [one.rollout_id for one in rollouts if (one.metadata or {}).get("run_id") == run] for run in run_ids}
    before = await _validation(store, of_run[run_ids[0]][:HELD_OUT_TASKS])
    after = await _validation(store, of_run[run_ids[-1]][-HELD_OUT_TASKS:])
    return Report(before, after, await _steps(store, run_ids))


async def _runs(store: LightningStore) -> list[str]:
    """Ids of the newest run that began anew, which is one that validated before its first step, and of those since."""
    found: list[str] = []
    for run in await store.query_runs():
        points = await store.query_metrics(run.run_id, names=["validation/reward"], limit=1)
        began_anew = any(point.step == 0 and point.time >= run.start_time for point in points)
        found = [run.run_id] if began_anew else [*found, run.run_id]
    return found


async def _validation(store: LightningStore, rollout_ids: Sequence[str]) -> Validation:
    finished = await Batches(store).gather(Sent({one: one for one in rollout_ids}))
    outcomes = [_outcomes(one) for one in finished]
    shares = example_part("phases").shares([one for task in outcomes for one in task])
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


async def _read(folder: Path) -> Report:
    store = SqliteLightningStore(folder / "runs.db")
    try:
        return await _report_of(store)
    finally:
        await store.close()


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


def _show(report: Report, algorithm: Any, folder: Path, seconds: float) -> None:
    console = Console()
    show_report(console, report)
    progress = algorithm.progress
    console.print(f"Steps: {progress.step}. Training rollouts: {progress.rollouts:,}. Seconds in all: {seconds:.0f}.\n")
    console.print(f"The store:         {escape(str(folder / 'runs.db'))}", soft_wrap=True)
    console.print(f"  the dashboard:   {escape(dashboard_command(str(folder / 'runs.db')))}", soft_wrap=True)
    console.print(f"The trained model: {escape(str(folder / 'model'))}", soft_wrap=True)
    console.print(f"  serve it:        {escape(agl_command())} serve {escape(str(folder / 'model'))}", soft_wrap=True)
    console.print(f"  score it:        {escape(agl_command())} eval --help", soft_wrap=True)


def _left(folder: Path, *, is_temporary: bool) -> str:
    """How much is on the disk and how to remove it; in a folder that the user named may be other things, which stay."""
    parts = [path for path in (folder / "runs.db", folder / "model", folder / CHECKPOINTS) if path.exists()]
    files = [file for part in parts for file in (part, *part.rglob("*")) if file.is_file()]
    size = sum(file.stat().st_size for file in files)
    removed = shlex.join(map(str, [folder] if is_temporary else sorted(parts)))
    return f"Left: {size / MEGABYTE:.0f} MB in {folder}; remove it with: rm -r {removed}"
