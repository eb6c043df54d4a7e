"""A store whose leases last a few seconds, and runners that work for it, as processes that can be killed and stopped.

`python -m tests.e2e.leased_processes store ADDRESS PORT` · `... runner URL JOURNAL NAME [holding]`
"""

import asyncio
import os
import sys
from typing import Any

from agentlightning.litagent import LitAgent
from agentlightning.runner import LitAgentRunner
from agentlightning.store import LightningStore, LightningStoreClient, LightningStoreServer, SqliteLightningStore
from agentlightning.tracer import OtelTracer
from agentlightning.types import NamedResources, Rollout

LEASE_SECONDS = 3.0
HEARTBEAT_SECONDS = 0.25
AGENT_SECONDS = 0.05
SLOTS = 2


class JournalAgent(LitAgent[Any]):
    """Writes to a file what becomes of it; one that holds does not end a task that says so, until it is cancelled."""

    def __init__(self, journal: str, name: str, is_holding: bool) -> None:
        super().__init__()
        self._journal, self._name, self._is_holding = journal, name, is_holding

    async def rollout_async(self, task: Any, resources: NamedResources, rollout: Rollout) -> float:
        self._write("begin", rollout)
        try:
            await asyncio.sleep(3600 if self._is_holding and task["may_hold"] else AGENT_SECONDS)
        except asyncio.CancelledError:
            self._write("cancel", rollout)
            raise
        self._write("end", rollout)
        return 1.0

    def _write(self, event: str, rollout: Rollout) -> None:
        with open(self._journal, "a", encoding="utf-8") as file:
            file.write(f"{self._name} {event} {rollout.rollout_id}\n")


async def serve(address: str, port: str) -> None:
    store = store_at(address)
    server = LightningStoreServer(store, "127.0.0.1", int(port))
    await server.start()
    while os.getppid() != 1:
        await asyncio.sleep(0.1)


def store_at(address: str) -> LightningStore:
    """The store of a database, or of a file."""
    if not address.startswith("postgresql://"):
        return SqliteLightningStore(address, lost_worker_seconds=LEASE_SECONDS)
    from agentlightning.store.postgres import PostgresLightningStore

    return PostgresLightningStore(address, lost_worker_seconds=LEASE_SECONDS)


async def work(url: str, journal: str, name: str, holding: str = "") -> None:
    runner: LitAgentRunner[Any] = LitAgentRunner(
        OtelTracer(),
        poll_interval=0.5,
        heartbeat_interval=HEARTBEAT_SECONDS,
        interval_jitter=0.0,
        max_concurrency=SLOTS,
        worker_name=name,
    )
    agent = JournalAgent(journal, name, bool(holding))
    with runner.run_context(agent=agent, store=LightningStoreClient(url)):
        await runner.iter()


if __name__ == "__main__":
    kind, *arguments = sys.argv[1:]
    asyncio.run((serve if kind == "store" else work)(*arguments))
