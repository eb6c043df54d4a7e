"""One GRPO training over the whole stack: store, runners in processes of their own, proxy, engine, learner."""

import argparse
import dataclasses
import importlib.util
import inspect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import task

MODEL = "policy"
"""What agents call the model."""
PARTS = ("rollouts", "learning", "publishing")


@dataclass(frozen=True)
class Plan:
    """What a training is made of, whoever makes it."""

    folder: str
    engine: str = "embedded"
    """embedded, vllm, or the address of a vLLM server."""
    steps: int = 20
    tasks_per_step: int = 16
    group_size: int = 8
    learning_rate: float = 1e-5
    minibatches: int = 2
    max_batch_tokens: int | None = None
    """None leaves it to the learner."""
    precision: str = "bf16"
    seed: int = 0
    device: str = "auto"
    validation_tasks: int = 0
    learns_truncated: bool = False
    """Learn from answers that were cut off too: a random model ends none."""
    runners: int = 2
    learning: tuple[tuple[str, Any], ...] = ()
    """Further choices of `LearnerSettings`."""


@dataclass(frozen=True)
class Trained:
    """What a training left behind."""

    algorithm: Any
    points: Sequence[Any]
    """A `MetricPoint` for each step."""

    def seconds(self, part: str) -> list[float]:
        """Of one part of a step, by step."""
        return [point.values.get(f"seconds/{part}", 0.0) for point in self.points]

    def seconds_between(self) -> list[float]:
        """From the end of one step to that of the next, so one fewer than steps; the first step warms up."""
        times = [point.time for point in self.points]
        return [later - earlier for earlier, later in itertools.pairwise(times)]


def add_options(parser: argparse.ArgumentParser, *, precision: str = "bf16") -> None:
    parser.add_argument("--engine", default="embedded", help="embedded, vllm, or the address of a vLLM server")
    parser.add_argument("--tasks-per-step", type=int, default=16)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--rate", type=float, default=1e-5, help="learning rate (default: %(default)s)")
    parser.add_argument("--precision", default=precision, choices=["full", "bf16"], help="of the learner's arithmetic")
    parser.add_argument("--max-batch-tokens", type=int, help="(default: the learner's own)")
    parser.add_argument("--runners", type=int, default=2, help="processes that run agents (default: %(default)s)")


def plan_of(options: argparse.Namespace, **others: Any) -> Plan:
    """The plan that `add_options` describes, with what a script adds."""
    return Plan(
        folder=options.folder,
        engine=options.engine,
        tasks_per_step=options.tasks_per_step,
        group_size=options.group_size,
        learning_rate=options.rate,
        precision=options.precision,
        max_batch_tokens=options.max_batch_tokens,
        runners=options.runners,
        device=options.device,
        **others,
    )


def engine_label(engine: str) -> str:
    """The name in the tables; a server that runs already is a vLLM."""
    return "vllm" if engine.startswith("http") else engine


def why_not(engine: str) -> str | None:
    """Why this engine cannot be used here, in words; None if it can."""
    from agentlightning.algorithm.grpo import GRPO

    if engine == "embedded":
        return None
    if "engine" not in inspect.signature(GRPO.__init__).parameters:
        return "this release of Agent Lightning has no choice of engines"
    if engine == "vllm" and importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed here"
    return None


def train(plan: Plan, agent: Callable[[task.Task], float]) -> Trained:
    """Train the model in the folder and return what was measured."""
    import agentlightning as agl

    algorithm = grpo_of(plan)
    concurrency = max(1, -(-plan.tasks_per_step * plan.group_size // plan.runners))
    trainer = agl.Trainer(
        algorithm=algorithm,
        store=agl.InMemoryLightningStore(),
        n_runners=plan.runners,
        strategy={"type": "cs", "server_port": 0},
        runner={"type": "agentlightning.LitAgentRunner", "max_concurrency": concurrency},
        progress="off",
    )

    def solve(task: dict[str, str]) -> float:
        return agent(task)

    held_out = task.tasks(plan.validation_tasks, seed=10_000) if plan.validation_tasks else None
    trainer.fit(solve, train_dataset=task.tasks(5000, seed=plan.seed + 1), val_dataset=held_out)
    store = agl.BlockingStore(trainer.store)
    run = store.query_runs()[-1]
    points = [point for point in store.query_metrics(run.run_id) if "seconds/rollouts" in point.values]
    return Trained(algorithm, points)


def grpo_of(plan: Plan) -> Any:
    from agentlightning.algorithm.grpo import GRPO, LearnerSettings, SampleSettings

    known = {field.name for field in dataclasses.fields(LearnerSettings)}
    learning = LearnerSettings(
        learning_rate=plan.learning_rate,
        precision=plan.precision,
        minibatches=plan.minibatches,
        **({} if plan.max_batch_tokens is None else {"max_batch_tokens": plan.max_batch_tokens}),
        seed=plan.seed,
        # An earlier release lacks the newer choices, and does what they turn off in no case.
        **{name: value for name, value in plan.learning if name in known},
    )
    return GRPO(
        {MODEL: plan.folder},
        steps=plan.steps,
        tasks_per_step=plan.tasks_per_step,
        group_size=plan.group_size,
        learning=learning,
        sampling=SampleSettings(skip_truncated=not plan.learns_truncated),
        validation_temperature=1.0,
        device=plan.device,
        max_sequences=plan.tasks_per_step * plan.group_size,
        seed=plan.seed,
        # The embedded engine is the default, and the only one of earlier releases.
        **({} if plan.engine == "embedded" else {"engine": plan.engine}),
    )


def peak_memory_mb() -> int | None:
    """Of this process on the GPU: the learner's; None without a GPU."""
    import torch

    return round(torch.cuda.max_memory_allocated() / 1e6) if torch.cuda.is_available() else None
