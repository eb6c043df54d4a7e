"""Two policies in one asynchronous run, of the same model and asked the same, learn opposite habits."""

import asyncio
import itertools
from collections import defaultdict
from collections.abc import Iterator
from statistics import fmean
from typing import Any

import pytest

pytest.importorskip("torch", reason="GRPO needs torch")

import agentlightning as agl
from agentlightning.algorithm.grpo import GRPO, SampleSettings
from agentlightning.engine.tiny.tokenizer import CALL, text_of
from tests.algorithm.grpo.training import ask, settings, trainer

pytestmark = pytest.mark.usefixtures("nothing_is_left")

STEPS = 10
MAX_STALENESS = 1
QUESTIONS = [f"{first}+{second}?" for first in range(20, 32) for second in range(50, 54)]


class Pair(agl.LitAgent[str]):
    """Both are asked the same; the planner is to call the tool, the solver to answer at once."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, dict[int, list[bool]]] = {"planner": defaultdict(list), "solver": defaultdict(list)}
        """Whether an answer began with a call, by policy and step."""
        self.seeds: dict[str, Iterator[int]] = defaultdict(itertools.count)

    async def rollout_async(self, task: str, resources: Any, rollout: Any) -> float:
        has_called = dict[str, bool]()
        for name, by_step in self.calls.items():
            said = await ask(resources[name], rollout, task, seed=next(self.seeds[task]))
            has_called[name] = said.startswith(text_of([CALL]))
            by_step[rollout.metadata["step"]].append(has_called[name])
        return (has_called["planner"] + (not has_called["solver"])) / 2

    def rate(self, name: str, step: int) -> float:
        return fmean(self.calls[name][step])


@pytest.mark.slow
@pytest.mark.usefixtures("seeds_are_heeded")
def test_planner_and_solver_learn_opposite_habits_while_their_next_rollouts_run() -> None:
    agent = Pair()
    algorithm = GRPO(
        {"planner": "tiny", "solver": "tiny"},
        group_size=8,
        tasks_per_step=4,
        steps=STEPS,
        max_staleness=MAX_STALENESS,
        sampling=SampleSettings(skip_truncated=False, max_staleness=MAX_STALENESS),
        learning=settings(learning_rate=1e-3),
    )

    made = trainer(algorithm, concurrency=16)
    made.fit(agent, QUESTIONS)

    rates = {name: [round(agent.rate(name, step), 2) for step in range(STEPS)] for name in agent.calls}
    print("share of calls by step", rates, "rewards", algorithm.progress.rewards)
    assert max(asyncio.run(staleness(made.store))) == MAX_STALENESS
    assert rates["planner"][-1] > 0.85
    assert rates["solver"][-1] < 0.15
    assert algorithm.progress.rewards[-1] > algorithm.progress.rewards[0] + 0.25


async def staleness(store: agl.LightningStore) -> list[float]:
    """By how many updates the oldest sequence of each step was behind, for both policies."""
    (run,) = await store.query_runs()
    names = ("planner/staleness/max", "solver/staleness/max")
    return [value for point in await store.query_metrics(run.run_id, names=names) for value in point.values.values()]
