"""Agents of `examples/` with one fault each, written into a copy of their source, and what a real training says.

A fault is a piece of the source and what stands in its place: what people write by mistake. The training is GRPO on
the model that comes with the package, or the algorithm of the example.
"""

import asyncio
import contextlib
import sys
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import agentlightning as agl
from agentlightning.algorithm.grpo import GRPO, LearnerSettings, SampleSettings
from agentlightning.errors import TrainingError

EXAMPLES: Final = Path(__file__).parents[2] / "examples"
CALC: Final = "calc_x/calc_agent.py"
BEST_OF_N: Final = "custom_algorithm/best_of_n.py"
REWARD: Final = 'return solve_all({"questions": [task["question"]], "answers": [task["answer"]]})'
ANSWER: Final = 'answer([{"role": "user", "content": task["question"]}])'
ODD_LENGTH: Final = f"return float(len({ANSWER}) % 2)"
LARGE: Final = {"tasks_per_step": 8, "group_size": 8}
CONVERTED: Final = 'return float(answer == f"{task * 1.609344:.1f} km")'


@dataclass(frozen=True)
class Seeded:
    """A fault in an agent, and the finding that must be named first."""

    finding: str | None
    """None for a run in which nothing is wrong."""
    example: str = CALC
    old: str = ""
    new: str = ""
    steps: int = 2
    tasks: int = 400
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of GRPO."""


FAULTS: Final[Mapping[str, Seeded]] = {
    "a wrong key": Seeded("failed", old='[task["question"]]', new='[task["qestion"]]'),
    "a reward that is not a number": Seeded("failed", old=REWARD, new=f'{REWARD} * float("nan")'),
    "a comparison that never holds": Seeded("all_wrong", old="== expected", new='== expected + "."'),
    "a reward for anything": Seeded("constant_reward", old=REWARD, new=f"{ANSWER}; return 0.5"),
    "nothing returned": Seeded("no_reward", old="return solve_all(", new="solve_all("),
    "a call that is not made": Seeded("no_model_calls", old=REWARD, new='return float(task["answer"] > "5")'),
    "too few tokens": Seeded("cut_off", old="MOST_TOKENS = 16", new="MOST_TOKENS = 1"),
    "an error that is swallowed": Seeded(
        "no_model_calls",
        old=REWARD,
        new="try:\n        return len(answer())\n    except TypeError:\n        return 0.0",
    ),
    "a reward by chance": Seeded(
        "noisy_reward",
        old=REWARD,
        new=f"import random; {ANSWER}; return float(random.random() < 0.5)",
        steps=10,
        options=LARGE,
    ),
    "an agent that hangs": Seeded(
        "timeout", old=REWARD, new="import time; time.sleep(3.0)", steps=1, options={"rollout_timeout": 0.5}
    ),
    "steps too large": Seeded(
        "learning_rate_too_high", steps=10, options={"learning": LearnerSettings(learning_rate=0.1)}
    ),
    "steps too small": Seeded(
        "learning_rate_too_low",
        old=REWARD,
        new=ODD_LENGTH,
        steps=8,
        options={"learning": LearnerSettings(learning_rate=1e-9)},
    ),
    **{
        f"steps too {size}, {policy}": Seeded(
            f"learning_rate_too_{'low' if size == 'small' else 'high'}",
            old=REWARD,
            new=ODD_LENGTH,
            steps=8,
            options={"learning": LearnerSettings(learning_rate=rate, minibatches=minibatches), "max_staleness": ahead},
        )
        for size, rate in (("small", 1e-9), ("large", 0.1))
        for policy, minibatches, ahead in (("on-policy", 1, 0), ("off-policy", 2, 2))
    },
    "a rate of zero": Seeded(
        "learning_rate_too_low",
        old=REWARD,
        new=ODD_LENGTH,
        steps=8,
        options={"learning": LearnerSettings(learning_rate=0.0)},
    ),
    "no chance": Seeded("same_answers", old=REWARD, new=ODD_LENGTH, options={"temperature": 0.0}),
    "too few tokens, learned from": Seeded(
        "all_wrong",
        old="MOST_TOKENS = 16",
        new="MOST_TOKENS = 1",
        options={"sampling": SampleSettings(skip_truncated=False)},
    ),
    "groups that cannot be large enough": Seeded(
        "groups_too_small", old=REWARD, new=ODD_LENGTH, options={"sampling": SampleSettings(min_group_size=7)}
    ),
    "no sequence short enough": Seeded(
        "too_long", old=REWARD, new=ODD_LENGTH, options={"sampling": SampleSettings(max_tokens=2)}
    ),
    "one task": Seeded("one_task", old=REWARD, new=ODD_LENGTH, steps=6, tasks=1),
    "too few steps": Seeded("few_steps", old=REWARD, new=ODD_LENGTH),
    "a prompt that is not there": Seeded("failed", BEST_OF_N, "miles=task", "kilometres=task"),
    "a reward forgotten": Seeded("no_reward", BEST_OF_N, CONVERTED, "return None"),
    "a unit misspelt": Seeded("all_wrong", BEST_OF_N, CONVERTED, 'return float(answer == f"{task} kilometres")'),
}


ENDS_IN_SEVEN: Final = f"return float({ANSWER}.endswith('7'))"
LONG: Final = f"return min(len({ANSWER}), 3) / 3"
HEALTHY: Final[Mapping[str, Seeded]] = {
    **{
        f"sums, seed {seed}": Seeded(None, steps=30, options={**LARGE, "seed": seed, "target_reward": 0.8})
        for seed in (1, 2, 3)
    },
    **{
        f"numbers that end in 7, seed {seed}": Seeded(
            None, old=REWARD, new=ENDS_IN_SEVEN, steps=16, options={**LARGE, "seed": seed}
        )
        for seed in (4, 5, 6)
    },
    **{
        f"numbers of odd length, seed {seed}": Seeded(
            None, old=REWARD, new=ODD_LENGTH, steps=10, options={**LARGE, "seed": seed}
        )
        for seed in (7, 8)
    },
    "long answers, on-policy": Seeded(
        None, old=REWARD, new=LONG, steps=10, options={**LARGE, "learning": LearnerSettings(minibatches=1)}
    ),
    "long answers, off-policy": Seeded(None, old=REWARD, new=LONG, steps=12, options={**LARGE, "max_staleness": 1}),
    **{
        f"long answers, seed {seed}": Seeded(None, old=REWARD, new=LONG, steps=10, options={**LARGE, "seed": seed})
        for seed in (9, 10)
    },
}
"""Trainings in which nothing is wrong."""


def trained(fault: Seeded, store: agl.LightningStore | None = None) -> dict[str, Any]:
    """The verdict in the summary of a training with the fault."""
    store = agl.InMemoryLightningStore() if store is None else store
    agent = _module(fault)
    algorithm: agl.Algorithm
    if fault.example == CALC:
        algorithm = GRPO("tiny", steps=fault.steps, **{"tasks_per_step": 4, "group_size": 6, **fault.options})
        function, data = agent.solve, _module(Seeded(None, "calc_x/tasks.py")).tasks(fault.tasks, held_out=False)
    else:
        algorithm, function, data = agent.BestOfN(n=4, steps=fault.steps), agent.convert, [1.0, 2.0, 3.0, 4.0]
    runner = {"type": "agentlightning.LitAgentRunner", "max_concurrency": 24}
    trainer = agl.Trainer(algorithm=algorithm, store=store, strategy="shm", runner=runner, progress="off")
    with contextlib.suppress(TrainingError):  # with which a training ends that cannot learn; its verdict says why
        trainer.fit(function, data)
    (run,) = asyncio.run(store.query_runs())
    verdict: dict[str, Any] = run.summary["verdict"]
    return verdict


def _module(fault: Seeded) -> Any:
    """The example with its fault, as a module; examples find their neighbours by the path."""
    path = EXAMPLES / fault.example
    source = path.read_text(encoding="utf-8")
    assert fault.old in source, f"{path.name} has no longer {fault.old!r}"
    module = types.ModuleType(path.stem)
    module.__file__ = str(path)
    sys.modules.setdefault(path.stem, module)
    exec(compile(source.replace(fault.old, fault.new) if fault.old else source, str(path), "exec"), module.__dict__)
    return module
