"""Agents of `examples/` with one fault each, written into a copy of their source, and what a real training says.

A fault is a piece of the source and what stands in its place: what people write by mistake. The training is GRPO on
the model that comes with the package, or the algorithm of the example. `other_algorithms` has runs of the other ones.
"""

import asyncio
import contextlib
import functools
import itertools
import os
import signal
import sys
import threading
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import agentlightning as agl
from agentlightning.algorithm.grpo import GRPO, LearnerSettings, SampleSettings
from agentlightning.algorithm.sentinel import Sentinel
from agentlightning.errors import AgentLightningError
from tests.verdict.real_run import RealRun

EXAMPLES: Final = Path(__file__).parents[2] / "examples"
CALC: Final = "calc_x/calc_agent.py"
BEST_OF_N: Final = "custom_algorithm/best_of_n.py"
REWARD: Final = 'return solve_all({"questions": [task["question"]], "answers": [task["answer"]]})'
ANSWER: Final = 'answer([{"role": "user", "content": task["question"]}])'
ODD_LENGTH: Final = f"return float(len({ANSWER}) % 2)"
ODD_SUM: Final = f"return float((len({ANSWER}) + int(task['answer'])) % 2)"
"""A model that gives one answer to everything is right half of the time."""
LARGE: Final = {"tasks_per_step": 8, "group_size": 8}
ENDS_IN_SEVEN: Final = f"return float({ANSWER}.endswith('7'))"
LONG: Final = f"return min(len({ANSWER}), 3) / 3"
SAY: Final = (
    "say = lambda model: client.chat.completions.create(model=model, max_tokens=MOST_TOKENS, "
    "messages=[{'role': 'user', 'content': task['question']}]).choices[0].message.content or ''; "
)
"""A function in the agent's source that asks one of several models."""
PAIR: Final = {"a": "tiny", "b": "tiny"}
TURNS: Final = "import agentlightning as agl; agl.emit_reward({first}); agl.emit_reward({second})"
CONVERTED: Final = 'return float(answer == f"{task * 1.609344:.1f} km")'


@dataclass(frozen=True)
class Seeded(RealRun):
    """A training of an agent of `examples/`, with a fault or without."""

    finding: str | None
    example: str = CALC
    old: str = ""
    new: str = ""
    steps: int = 2
    tasks: int = 400
    validation: int = 0
    """Tasks that are held out to validate on."""
    stop_after: int | None = None
    """Rollouts after which somebody stops the training."""
    kill_after: int | None = None
    """Rollouts after which the engine is killed."""
    model: Any = "tiny"
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of GRPO."""

    def judged(self) -> dict[str, Any]:
        return trained(self)


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
        options={**LARGE, "temperature": 0.5},
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
        outcomes=("no gain",),
    ),
    **{
        f"steps too {size}, {policy}": Seeded(
            f"learning_rate_too_{'low' if size == 'small' else 'high'}",
            old=REWARD,
            new=ODD_SUM,
            steps=8,
            options={"learning": LearnerSettings(learning_rate=rate, minibatches=minibatches), "max_staleness": ahead},
            outcomes=("no gain",) if size == "small" else ("no gain", "lost"),
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
        outcomes=("no gain",),
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
    "one task": Seeded(
        "one_task", old=REWARD, new=ODD_LENGTH, steps=6, tasks=1, outcomes=("gained", "no gain", "lost")
    ),
    "a prompt that is not there": Seeded("failed", BEST_OF_N, "miles=task", "kilometres=task"),
    "a reward forgotten": Seeded("no_reward", BEST_OF_N, CONVERTED, "return None"),
    "a unit misspelt": Seeded("all_wrong", BEST_OF_N, CONVERTED, 'return float(answer == f"{task} kilometres")'),
    "a reward by chance, answers that do not repeat": Seeded(
        None,
        old=REWARD,
        new=f"import random; {ANSWER}; return float(random.random() < 0.5)",
        steps=10,
        options={"tasks_per_step": 32, "group_size": 2},
        outcomes=("no gain",),
        words=("No gain can be told from chance",),
    ),
    "an engine that is killed at once": Seeded(
        None,
        steps=30,
        kill_after=10,
        outcomes=("unknown", "no gain"),
        words=("The run failed: EngineError: The engine's process",),
    ),
    "a third of the tasks raises": Seeded(
        "failed",
        old=REWARD,
        new=f"int(task['answer']) % 3 or {{}}['key']; {LONG}",
        steps=8,
        options=LARGE,
        outcomes=("gained", "no gain"),
        words=("KeyError: 'key'",),
    ),
    "right whatever it says": Seeded("all_right", old=REWARD, new=f"{ANSWER}; return 1.0"),
    "tasks always or never solved": Seeded(
        "too_easy_or_too_hard", old=REWARD, new=f"{ANSWER}; return float(task['answer'] > '5')"
    ),
    "a penalty for everything": Seeded("all_wrong", old=REWARD, new=f"{ANSWER}; return -1.0"),
    "calls that are refused": Seeded(
        "failed", old="max_tokens=MOST_TOKENS", new="max_tokens=MOST_TOKENS, logit_bias={'1': 1}", words=("logit_bias",)
    ),
    "calls that are refused, and the error swallowed": Seeded(
        "model_calls_failed",
        old=REWARD,
        new=f"import openai\n    try:\n        {LONG}\n    except openai.OpenAIError:\n        return 0.0\n\n\n"
        "MOST_TOKENS = -1",
    ),
    "an agent_match of nobody": Seeded(
        "no_model_calls", old=REWARD, new=ODD_LENGTH, options={"agent_match": "solver"}, words=("no call to train",)
    ),
    "rollouts too far ahead": Seeded(
        "too_stale",
        old=REWARD,
        new=ODD_LENGTH,
        steps=12,
        options={"max_staleness": 4, "sampling": SampleSettings(max_staleness=0)},
        outcomes=("gained", "no gain"),
    ),
    "a policy that is not called": Seeded(
        "no_model_calls",
        old=REWARD,
        new=f"{SAY}return float(len(say('a')) % 2)",
        model=PAIR,
        words=("Policy 'b': In 48 of 48 rollouts",),
        unsaid=("Policy 'a'",),
    ),
    "turns that all get nothing": Seeded(
        "all_wrong",
        old=REWARD,
        new=f"{ANSWER}; {TURNS.format(first='0.0', second='0.0')}",
        options={"sampling": SampleSettings(credit="turn")},
    ),
    "an engine that is killed": Seeded(
        None,
        old=REWARD,
        new=LONG,
        steps=30,
        kill_after=300,
        options=LARGE,
        outcomes=("unknown", "gained", "no gain"),
        words=("The run failed: EngineError: The engine's process",),
    ),
    "validation tasks that raise": Seeded(
        "failed",
        old=REWARD,
        new=f"task['answer'] == task['question'] or task.get('split') or {{}}['split']; {LONG}",
        validation=12,
        words=("KeyError: 'split'",),
    ),
    "too few validation tasks": Seeded(
        None,
        old=REWARD,
        new=ODD_LENGTH,
        steps=10,
        validation=3,
        options=LARGE,
        outcomes=("no gain",),
        words=("No gain can be told from chance", "Validate on more than 3 tasks"),
    ),
    "one answer to everything": Seeded(
        "collapsed",
        old=REWARD,
        new=f"said = {ANSWER}; return float(said == '7') if int(task['answer']) % 2 else 0.1 * float(said == '7')",
        steps=40,
        options={**LARGE, "learning": LearnerSettings(learning_rate=1e-3)},
        outcomes=("gained", "no gain"),
    ),
    "wrong, and stopped": Seeded(
        "all_wrong", old="== expected", new='== expected + "."', steps=30, stop_after=100, unsaid=("The run failed",)
    ),
    "a loophole": Seeded(
        "reward_hacking",
        old=REWARD,
        new=f"import agentlightning as agl; said = {ANSWER}; agl.emit_reward({{'length': min(len(said), 6) / 6, "
        "'short': float(len(said) < 4)}, primary_key='length')",
        steps=16,
        options={
            **LARGE,
            "sentinel": Sentinel(reward="short"),
            "learning": LearnerSettings(learning_rate=2e-4),
        },
        outcomes=("gained",),
        words=("in the trained reward only",),
    ),
}


HEALTHY: Final[Mapping[str, Seeded]] = {
    **{
        f"sums, seed {seed}": Seeded(None, steps=30, options={**LARGE, "seed": seed, "target_reward": 0.8})
        for seed in (1, 2, 3)
    },
    **{
        f"numbers that end in 7, seed {seed}": Seeded(
            None, old=REWARD, new=ENDS_IN_SEVEN, steps=24, options={**LARGE, "seed": seed}
        )
        for seed in (4, 5, 6)
    },
    **{
        f"numbers of odd length, seed {seed}": Seeded(
            None, old=REWARD, new=ODD_LENGTH, steps=20, options={**LARGE, "seed": seed}
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
    "long answers, validated": Seeded(None, old=REWARD, new=LONG, steps=10, validation=32, options=LARGE),
    "long answers, stopped": Seeded(None, old=REWARD, new=LONG, steps=60, stop_after=1000, options=LARGE),
    "long answers, validated and stopped": Seeded(
        None,
        old=REWARD,
        new=LONG,
        steps=60,
        validation=32,
        stop_after=64 + 520,
        options=LARGE,
        words=("baseline",),
    ),
    "long answers, stopped at once": Seeded(
        "few_steps",
        old=REWARD,
        new=LONG,
        steps=60,
        validation=32,
        stop_after=64 + 100,
        options=LARGE,
        outcomes=("unknown",),
    ),
    **{
        f"long answers, {policy}, {end}": Seeded(
            None,
            old=REWARD,
            new=LONG,
            steps=20 if end == "validated" else 60,
            validation=32,
            stop_after=None if end == "validated" else 64 + 1280,
            options={**LARGE, "learning": LearnerSettings(minibatches=minibatches), "max_staleness": ahead},
        )
        for policy, minibatches, ahead in (("on-policy", 1, 0), ("off-policy", 2, 1))
        for end in ("validated", "stopped")
    },
    "negative rewards, validated": Seeded(
        None,
        old=REWARD,
        new=f"return min(len({ANSWER}), 3) / 3 - 1",
        steps=20,
        validation=32,
        options=LARGE,
    ),
    "rewards to 100, stopped": Seeded(
        None,
        old=REWARD,
        new=f"return 100 * min(len({ANSWER}), 3) / 3",
        steps=60,
        validation=32,
        stop_after=64 + 1280,
        options=LARGE,
    ),
    "solved before its end": Seeded(
        None, old=REWARD, new=LONG, steps=60, options={**LARGE, "learning": LearnerSettings(learning_rate=1e-3)}
    ),
    "two policies": Seeded(
        None,
        old=REWARD,
        new=f"{SAY}return (min(len(say('a')), 3) + min(len(say('b')), 3)) / 6",
        steps=12,
        model=PAIR,
        options=LARGE,
    ),
    "rewards of turns": Seeded(
        None,
        old=REWARD,
        new=TURNS.format(first=f"min(len({ANSWER}), 3) / 3", second=f"min(len({ANSWER}), 3) / 3"),
        steps=12,
        options={**LARGE, "sampling": SampleSettings(credit="turn")},
        words=("A reward is the return",),
    ),
    "a smoke test of two steps": Seeded(
        "few_steps",
        old=REWARD,
        new=LONG,
        options=LARGE,
        outcomes=("unknown",),
        words=("Too short to say",),
    ),
    "a gain too small to be told": Seeded(
        None,
        old=REWARD,
        new=LONG,
        steps=7,
        options={"learning": LearnerSettings(learning_rate=2e-5)},
        outcomes=("no gain",),
        words=("No gain can be told from chance",),
    ),
    "the best of several tries": Seeded(None, BEST_OF_N, steps=8, outcomes=("gained", "no gain")),
}
"""Trainings in which nothing is wrong."""


def trained(fault: Seeded, store: agl.LightningStore | None = None) -> dict[str, Any]:
    """The verdict in the summary of a training with the fault."""
    store = agl.InMemoryLightningStore() if store is None else store
    agent = _module(fault)
    algorithm: Any
    held_out = None
    if fault.example == CALC:
        algorithm = GRPO(fault.model, steps=fault.steps, **{"tasks_per_step": 4, "group_size": 6, **fault.options})
        tasks = _module(Seeded(None, "calc_x/tasks.py")).tasks
        function, data = agent.solve, tasks(fault.tasks, held_out=False)
        held_out = tasks(fault.validation, held_out=True) if fault.validation else None
    else:
        algorithm, function, data = agent.BestOfN(n=4, steps=fault.steps), agent.convert, [1.0, 2.0, 3.0, 4.0]
    runner = {"type": "agentlightning.LitAgentRunner", "max_concurrency": 24}
    trainer = agl.Trainer(algorithm=algorithm, store=store, strategy="shm", runner=runner, progress="off")
    if fault.stop_after is not None:
        function = interrupted(function, fault.stop_after, trainer.stop)
    elif fault.kill_after is not None:
        function = interrupted(
            function, fault.kill_after, lambda: os.kill(algorithm.policies[0].engine.process_id, signal.SIGKILL)
        )
    with contextlib.suppress(AgentLightningError):  # with which a training ends that cannot learn; its verdict says why
        trainer.fit(function, data, held_out)
    (run,) = asyncio.run(store.query_runs())
    verdict: dict[str, Any] = run.summary["verdict"]
    return verdict


def interrupted(function: Callable[..., Any], after: int, interrupt: Callable[[], None]) -> Callable[..., Any]:
    """The agent, which in its rollout after so many interrupts the training, from a thread of its own."""
    rollouts = itertools.count()

    @functools.wraps(function)
    def agent(*args: Any) -> Any:
        if next(rollouts) == after:
            threading.Thread(target=interrupt).start()
        return function(*args)

    return agent


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
