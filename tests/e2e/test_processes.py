"""Several processes on one SQLite file: every rollout is worked on once, whoever enqueued it."""

import asyncio
import sys
from pathlib import Path

from agentlightning.store import SqliteLightningStore
from tests import warm_python

PROCESSES = 4
ROLLOUTS_EACH = 15
PATIENCE_SECONDS = 90

WORKER = """
import asyncio, sys
from agentlightning.store import SqliteLightningStore

async def main(path, name, count, total):
    async with SqliteLightningStore(path) as store:
        for n in range(count):
            await store.enqueue_rollout({"by": name, "n": n})
        while (await store.statistics())["total_rollouts"] < total or (await store.query_rollouts(status=["queuing"])):
            claimed = await store.dequeue_rollout(name, wait=0.2)
            if claimed is not None:
                await store.get_next_span_sequence_id("shared", "x")
                await store.update_attempt(claimed.rollout_id, claimed.attempt.attempt_id, status="succeeded")

asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
"""


def test_processes_share_one_file(tmp_path: Path) -> None:
    path, total = tmp_path / "s.db", PROCESSES * ROLLOUTS_EACH
    workers = [
        warm_python.Popen([sys.executable, "-c", WORKER, str(path), f"w-{n}", str(ROLLOUTS_EACH), str(total)])
        for n in range(PROCESSES)
    ]
    try:
        codes = [worker.wait(PATIENCE_SECONDS) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()

    async def check() -> None:
        async with SqliteLightningStore(path) as store:
            rollouts = await store.query_rollouts()
            assert len(rollouts) == total
            assert {r.status for r in rollouts} == {"succeeded"}
            assert (await store.statistics())["total_attempts"] == total
            assert await store.get_next_span_sequence_id("shared", "x") == total + 1
            attempts = [(await store.query_attempts(rollout.rollout_id))[-1] for rollout in rollouts]
            assert {a.worker_id for a in attempts} <= {worker.worker_id for worker in await store.query_workers()}

    assert codes == [0] * PROCESSES
    asyncio.run(check())
