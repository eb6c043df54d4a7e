"""Fills a store with two prompt optimisations and two trainings of the tiny model, all real and short.

Run it with the file to write.
"""

import asyncio
import sys
from typing import Any

import agentlightning as agl
from agentlightning.algorithm.apo import apo as apo_module
from agentlightning.store import SqliteLightningStore
from tests.algorithm.grpo.training import Asking, every_second, fit, grpo
from tests.algorithm.prompts.world import Optimiser, Writer, agents, apo_in, gepa_in, rendered
from tests.dashboard.conftest import FAILURE


def judge(agent: Asking, task: Any, rollout: Any, said: str) -> float:
    """Half of every group does well; of one group somebody fails."""
    if (rollout.metadata or {}).get("step") == 1 and len(agent.order) % 12 == 0:
        raise ConnectionError(FAILURE)
    return every_second(agent, task, rollout, said)


def main(file: str) -> None:
    asyncio.run(_optimise(SqliteLightningStore(file)))
    for group_size, steps in ((4, 3), (2, 1)):
        store = SqliteLightningStore(file)
        algorithm = grpo(group_size=group_size, tasks_per_step=3, steps=steps)
        fit(algorithm, Asking(judge), store=store, name=f"groups of {group_size}")
        asyncio.run(_publish(store, f"Answer in {group_size} words.\nBe kind."))


async def _optimise(store: SqliteLightningStore) -> None:
    """With APO and with GEPA, in a small world; prompts for the optimiser's models are JSON."""
    apo_module.poml.poml = rendered
    async with agents(store):
        await apo_in(store, Optimiser(), seed=1, beam_rounds=2).run(range(12), range(24))
        await gepa_in(store, Writer(), seed=1).run(range(12), range(40))
    await store.close()


async def _publish(store: SqliteLightningStore, text: str) -> None:
    await store.add_resources({"prompt": agl.PromptTemplate(template=text, engine="f-string")})
    await store.close()


if __name__ == "__main__":
    main(sys.argv[1])
