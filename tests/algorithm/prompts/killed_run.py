"""A run of GEPA in a process of its own: `killed_run.py NAME AT`. It kills itself at the rollout AT, unless that is 0.

The state is in NAME.state, the store in NAME.db, and the outcome in NAME.json.
"""

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

from agentlightning.store import SqliteLightningStore
from tests.algorithm.prompts.world import Writer, evolved, share_of_words


async def main(name: str, kill_at: int) -> None:
    count = 0

    def judge(prompts: dict[str, str], task: Any) -> float:
        nonlocal count
        count += 1
        if count == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return share_of_words(prompts, task)

    store = SqliteLightningStore(Path(f"{name}.db"))
    for rollout in await store.query_rollouts(status_in=["preparing", "running"]):  # as a trainer does in time
        await store.update_attempt(rollout.rollout_id, "latest", status="unresponsive")
    state, output = Path(f"{name}.state"), Path(f"{name}.json")
    try:
        await evolved(Writer(), judge=judge, store=store, state_file=state, output=output, rollout_batch_timeout=60.0)
    finally:
        await store.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
