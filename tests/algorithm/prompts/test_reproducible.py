"""The same seed is the same search or evolution, whatever finishes first; another seed is another."""

import asyncio
import hashlib
import json
import random
from typing import Any

import pytest

from agentlightning.algorithm.apo import apo as apo_module
from agentlightning.algorithm.apo.apo import APO
from agentlightning.store import InMemoryLightningStore
from tests.algorithm.prompts.world import SEED, Optimiser, agents, apo_in, evolved


def rendered_with_rewards(template: Any, *, context: Any, format: str) -> dict[str, Any]:
    """What is shown, with which rewards, in which order, and how it is asked for."""
    rewards = [experiment["final_reward"] for experiment in context.get("experiments", ())]
    shown = {**context, "experiments": rewards, "template": template.stem}
    return {"messages": [{"role": "user", "content": json.dumps(shown)}]}


class Impressionable(Optimiser):
    """Answers by everything that it is shown, and takes its time."""

    def __init__(self, haste: random.Random) -> None:
        super().__init__()
        self._haste = haste

    async def _create(self, **asked: Any) -> Any:
        for _ in range(self._haste.randint(0, 9)):
            await asyncio.sleep(0)
        return await super()._create(**asked)

    def answer(self, context: dict[str, Any]) -> str | None:
        digest = hashlib.sha256(json.dumps(context, sort_keys=True).encode()).hexdigest()[:6]
        return f"{context['prompt_template']} {digest}" if "critique" in context else digest


def judged(prompts: dict[str, str], task: Any) -> float:
    """A reward that nobody can foresee, and that is always the same."""
    return int(hashlib.sha256(f"{prompts} {task}".encode()).hexdigest()[:4], 16) / 16**4


def told(apo: APO[Any]) -> Any:
    """All that a search came to."""
    assert apo.result is not None
    rows = [(one.version, one.parent, one.critique, one.template, one.scores, one.fate) for one in apo.candidates]
    return rows, apo.result.best, apo.result.challenges, apo.result.spent


async def searched(seed: int, haste: int) -> Any:
    """A run in which models answer, and agents finish, in an order of their own."""
    pace, store = random.Random(haste), InMemoryLightningStore()
    random.seed(haste)
    apo = apo_in(store, Impressionable(pace), beam_rounds=3, seed=seed)
    async with agents(store, judged, count=pace.randint(1, 9)):
        await apo.run(list(range(40)), list(range(60)))
    return told(apo)


async def test_search_follows_from_the_seed_in_whatever_order_things_finish(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apo_module.poml, "poml", rendered_with_rewards)

    first, *same = [await searched(5, haste) for haste in range(3)]
    other = await searched(6, 0)

    assert len(first[0]) > 8
    assert same == [first] * 2
    assert {row[3] for row in other[0]} & {row[3] for row in first[0]} == {SEED.template}


async def evolved_with(seed: int) -> Any:
    """All that an evolution came to, with a model that answers by everything that it is shown."""

    def reflect(question: str) -> str:
        shown = "".join(line for line in question.splitlines() if "rollout 'ro-" not in line)
        return f"```\n{SEED.template} {hashlib.sha256(shown.encode()).hexdigest()[:6]}\n```"

    gepa = await evolved(reflect, judge=judged, seed=seed, proposals=2, iterations=6)
    assert gepa.result is not None
    rows = [(one.version, one.parent, one.template, one.scores, one.fate) for one in gepa.candidates]
    return rows, gepa.result.best, gepa.result.challenges, gepa.result.spent


async def test_evolution_follows_from_the_seed() -> None:
    first, again, other = [await evolved_with(seed) for seed in (1, 1, 2)]
    assert len(first[0]) > 2
    assert first == again
    assert first[0] != other[0]
