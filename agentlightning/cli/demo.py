"""`agl demo`: watch an agent learn from reward alone, on this machine, with nothing to download."""

import argparse
import importlib.util
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from agentlightning.adapter import TraceToMessages
from agentlightning.algorithm.batches import FinishedRollout
from agentlightning.algorithm.intervals import Estimate
from agentlightning.cli import INTERRUPTED
from agentlightning.cli.command import Command, CommandParser, finite_number, named_path, positive_number
from agentlightning.cli.export_model import is_checkpoints
from agentlightning.errors import ConfigurationError
from agentlightning.utils.installation import install_command

__all__ = ["COMMAND", "main"]

EXAMPLE: Final = "calc_x"
TRAINING_TASKS: Final = 20_000
HELD_OUT_TASKS: Final = 256
TARGET: Final = 0.97
MOST_STEPS: Final = 120
SHOWN: Final = 2
CHECKPOINTS: Final = "checkpoints"
SEED_DIGITS: Final = 9
MEGABYTE: Final = 1e6

EXAMPLES = """\
examples:
  agl demo                             about a minute on two cores
  agl demo --folder calc --seed 3      keep the store and the trained model in the folder calc
  agl serve calc/model                 serve what it learned
"""


def _add_arguments(parser: CommandParser) -> None:
    parser.add_argument(
        "--folder", type=named_path, help="for the store and the trained model; a new temporary one by default"
    )
    parser.add_argument(
        "--seed",
        type=_seed,
        default=0,
        help="of the tasks and of the sampling; which rollouts meet in a batch depends on timing, so that runs of the "
        "same seed take different numbers of steps",
    )
    parser.add_argument("--steps", type=positive_number, default=MOST_STEPS, help="at most")
    parser.add_argument("--target", type=_target, default=TARGET, help="mean reward to stop at")
    parser.add_argument("--runners", type=positive_number, default=1, help="processes that run the agent")
    parser.add_argument("--concurrency", type=positive_number, default=24, help="rollouts at once in each")
    parser.add_argument("--resume", action="store_true", help="go on with what is in --folder")
    parser.add_argument("--json", action="store_true", help="events for machines instead of the live view")


def _target(text: str) -> float:
    number = finite_number(text)
    if not 0 < number <= 1:
        raise argparse.ArgumentTypeError(f"{text} is no mean of rewards of 0 and 1; give more than 0, and at most 1")
    return number


def _seed(text: str) -> int:
    if not text.isdecimal() or len(text) > SEED_DIGITS:
        raise argparse.ArgumentTypeError(f"{text!r} is no seed; give a whole number of at most {SEED_DIGITS} digits")
    return int(text)


def _run(arguments: argparse.Namespace) -> int:
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
        raise ConfigurationError(f"The folder '{folder}' cannot be made: {error.strerror}.") from error
    began = time.monotonic()
    try:
        algorithm = _trained(arguments, folder)
    finally:
        if arguments.folder is None and not any(folder.iterdir()):  # it failed before it began
            folder.rmdir()
    if algorithm.result is None:  # Ctrl-C ends a training, and not with an error
        stopped = f"Stopped; {_way_on(folder, is_temporary=arguments.folder is None)}"
        Console(stderr=True).print(stopped, markup=False, highlight=False, soft_wrap=True)
        return INTERRUPTED
    if arguments.folder is None:  # nobody will resume from there, and the trained model is written
        shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
    if not arguments.json:
        console = Console()
        _show(console, algorithm, folder, time.monotonic() - began)
        left = _left(folder, is_temporary=arguments.folder is None)
        console.print(left, markup=False, highlight=False, soft_wrap=True)
    return 0


def _way_on(folder: Path, *, is_temporary: bool) -> str:
    """How to continue a training that was stopped; a temporary folder without a checkpoint is of no use and goes."""
    if is_checkpoints(folder / CHECKPOINTS):
        return f"go on with: agl demo --folder {folder} --resume"
    if is_temporary:
        shutil.rmtree(folder, ignore_errors=True)
    again = "agl demo" if is_temporary else f"agl demo --folder {folder}"
    return f"there is no checkpoint yet, so begin again with: {again}"


def _trained(arguments: argparse.Namespace, folder: Path) -> Any:
    from agentlightning.algorithm.grpo import GRPO
    from agentlightning.trainer import Trainer

    tasks = _part("tasks")
    algorithm = GRPO(
        "tiny",
        steps=arguments.steps,
        target_reward=arguments.target,
        seed=arguments.seed,
        output=folder / "model",
        checkpoints=folder / CHECKPOINTS,
        resume=arguments.resume,
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
        _part("calc_agent").solve,
        train_dataset=tasks.tasks(TRAINING_TASKS, held_out=False, seed=arguments.seed),
        val_dataset=tasks.tasks(HELD_OUT_TASKS, held_out=True),
    )
    return algorithm


def _part(name: str) -> ModuleType:
    """A module of the example; it lies beside the package, or in it where that was installed."""
    package = Path(__file__).parent.parent
    for folder in (package / "_examples" / EXAMPLE, package.parent / "examples" / EXAMPLE):
        if (folder / f"{name}.py").is_file():
            if str(folder) not in sys.path:
                sys.path.insert(0, str(folder))
            return importlib.import_module(name)
    raise ConfigurationError(f"The example '{EXAMPLE}' is not here; run the demo from a checkout or from a wheel.")


# ---------------------------------------------------------------------- showing


def _show(console: Console, algorithm: Any, folder: Path, seconds: float) -> None:
    table = Table(title=f"Reward on {HELD_OUT_TASKS} held-out tasks")
    for column in ("", "mean", "95 % interval", "failed"):
        table.add_column(column)
    for name, found in (("before", algorithm.baseline), ("after", algorithm.result)):
        if isinstance(found, Estimate):
            table.add_row(name, f"{found.mean:.3f}", f"{found.low:.3f} to {found.high:.3f}", str(found.failed))
    console.print(table)
    progress = algorithm.progress
    validation = HELD_OUT_TASKS * len(algorithm.examples)
    rollouts = f"{progress.rollouts + validation:,}, with {validation:,} for validation"
    console.print(f"Steps: {progress.step}. Rollouts: {rollouts}. Seconds in all: {seconds:.0f}.\n")
    _show_conversations(console, algorithm.examples)
    console.print(f"The store:         {escape(str(folder / 'runs.db'))}", soft_wrap=True)
    console.print(f"  the dashboard:   agl dashboard {escape(str(folder / 'runs.db'))}", soft_wrap=True)
    console.print(f"The trained model: {escape(str(folder / 'model'))}", soft_wrap=True)
    console.print(f"  serve it:        agl serve {escape(str(folder / 'model'))}", soft_wrap=True)
    console.print("  score it:        agl eval --help", soft_wrap=True)


def _left(folder: Path, *, is_temporary: bool) -> str:
    """How much is on the disk and how to remove it; in a folder that the user named may be other things, which stay."""
    written = [*folder.glob("runs.db*"), folder / "model", folder / CHECKPOINTS]
    parts = [path for path in written if path.exists()]
    files = [file for part in parts for file in (part, *part.rglob("*")) if file.is_file()]
    size = sum(file.stat().st_size for file in files)
    removed = shlex.join(map(str, [folder] if is_temporary else sorted(parts)))
    return f"Left: {size / MEGABYTE:.0f} MB in {folder}; remove it with: rm -r {removed}"


def _show_conversations(console: Console, validations: Sequence[Sequence[FinishedRollout]]) -> None:
    """The same tasks, before and after."""
    if len(validations) < 2:
        return
    for before, after in list(zip(validations[0], validations[-1], strict=False))[:SHOWN]:
        console.print(f"[bold]{escape(str(before.rollout.input['question']))}[/bold]")
        for name, one in (("before", before), ("after", after)):
            console.print(f"  {name} (reward {one.reward}): {escape(_conversation(one))}", soft_wrap=True)
    console.print()


def _conversation(one: FinishedRollout) -> str:
    """What was said in answer to the task, in one line; the last call of a trace repeats all that came before."""
    conversations = TraceToMessages().adapt(one.spans)
    if not conversations:
        return "nothing"
    said: list[str] = []
    for message in conversations[-1]["messages"][1:]:
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        said += [f"{call['name']}({call['arguments']})" for call in calls]
        if message.get("content"):
            said.append(("→ " if message["role"] == "tool" else "says ") + str(message["content"]))
    return " ".join(said) or "nothing"


COMMAND = Command(
    name="demo",
    description="Train a calculator agent with GRPO: an ordinary program for the openai package, a tiny model that "
    "comes with this one, and a reward of 1 or 0.",
    examples=EXAMPLES,
    add_arguments=_add_arguments,
    run=_run,
)
main = COMMAND.main
