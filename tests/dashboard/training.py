"""Fills a store with two real trainings of the tiny model, a few steps each; run it with the file to write."""

import asyncio
import sys
from typing import Any

import agentlightning as agl
from agentlightning.store import SqliteLightningStore
from tests.algorithm.grpo.training import Asking, every_second, fit, grpo
from tests.dashboard.conftest import FAILURE


def judge(agent: Asking, task: Any, rollout: Any, said: str) -> float:
    """Half of every group does well; of one group somebody fails."""
    if (rollout.metadata or {}).get("step") == 1 and len(agent.order) % 12 == 0:
        raise ConnectionError(FAILURE)
    return every_second(agent, task, rollout, said)


def main(file: str) -> None:
    for group_size, steps in ((4, 3), (2, 1)):
        store = SqliteLightningStore(file)
        algorithm = grpo(group_size=group_size, tasks_per_step=3, steps=steps)
        fit(algorithm, Asking(judge), store=store, name=f"groups of {group_size}")
        asyncio.run(_publish(store, f"Answer in {group_size} words.\nBe kind."))


async def _publish(store: SqliteLightningStore, text: str) -> None:
    await store.add_resources({"prompt": agl.PromptTemplate(template=text, engine="f-string")})
    await store.close()


if __name__ == "__main__":
    main(sys.argv[1])
