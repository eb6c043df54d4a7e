"""Runners and stores that are killed or stopped: every rollout succeeds once, and nothing lost counts as tried.

Every rollout may be tried once, so that one whose loss counted would fail.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agentlightning.store import LightningStore, LightningStoreClient
from agentlightning.store.lifecycle import is_lost
from agentlightning.types import Attempt, RolloutConfig
from tests.e2e.leased_processes import LEASE_SECONDS, SLOTS
from tests.e2e.server_process import free_port
from tests.postgres import FOLDER_VARIABLE, Cluster, shared_cluster
from tests.runner.working import until

pytestmark = pytest.mark.slow

LATE_SECONDS = 2.0
"""How much later than its lease ends work may begin again, on a machine that does other things too."""
ONCE = RolloutConfig(max_attempts=1, retry_condition=["unresponsive", "failed", "timeout"])


class Processes:
    """The store and the runners of a test, which share a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._port = folder, free_port()
        self.store_address = str(folder / "store.db")
        self._processes: list[subprocess.Popen[bytes]] = []
        self.url = f"http://127.0.0.1:{self._port}"

    def start_store(self) -> "subprocess.Popen[bytes]":
        return self._start("store", self.store_address, str(self._port))

    def start_runner(self, name: str, *, is_holding: bool = False) -> "subprocess.Popen[bytes]":
        return self._start("runner", self.url, str(self._journal), name, *(["holding"] * is_holding))

    def _start(self, *arguments: str) -> "subprocess.Popen[bytes]":
        process = subprocess.Popen([sys.executable, "-m", "tests.e2e.leased_processes", *arguments])
        self._processes.append(process)
        return process

    @property
    def _journal(self) -> Path:
        return self._folder / "journal"

    def journal(self, name: str, event: str) -> list[str]:
        """Ids of the rollouts with which this happened at the runner of that name."""
        lines = self._journal.read_text().splitlines() if self._journal.exists() else []
        words = [line.split() for line in lines]
        return [rollout_id for who, what, rollout_id in words if (who, what) == (name, event)]

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    started = Processes(tmp_path)
    yield started
    started.end()


@asynccontextmanager
async def client_of(processes: Processes) -> AsyncIterator[LightningStore]:
    async with LightningStoreClient(processes.url, outage_seconds=60.0) as store:
        yield store


async def enqueue(store: LightningStore, count: int, *, may_hold: bool = False) -> list[str]:
    task = {"may_hold": may_hold}
    return [(await store.enqueue_rollout(task, config=ONCE)).rollout_id for _ in range(count)]


async def checked_attempts(store: LightningStore, rollout_ids: list[str]) -> list[list[Attempt]]:
    """The attempts of each rollout, of which the last has succeeded and all others were lost."""
    assert len(await store.wait_for_rollouts(rollout_ids, timeout=60.0)) == len(rollout_ids)
    attempts = [list(await store.query_attempts(rollout_id)) for rollout_id in rollout_ids]
    statuses = [(await store.get_rollout_by_id(rollout_id)).status for rollout_id in rollout_ids]  # type: ignore[union-attr]
    assert statuses == ["succeeded"] * len(rollout_ids)
    for *lost, last in attempts:
        assert last.status == "succeeded"
        assert all(is_lost(attempt) for attempt in lost)
    assert (await store.statistics())["queue_length"] == 0
    return attempts


async def test_work_of_a_killed_runner_is_run_again_when_its_lease_ends(processes: Processes) -> None:
    processes.start_store()
    async with client_of(processes) as store:
        ids = await enqueue(store, SLOTS + 1, may_hold=True)
        killed = processes.start_runner("A", is_holding=True)
        await until(lambda: len(processes.journal("A", "begin")) == SLOTS)
        processes.start_runner("B")
        await until(lambda: len(processes.journal("B", "end")) == 1)

        killed.kill()
        killed_time = time.time()
        attempts = await checked_attempts(store, ids)

    assert sorted(map(len, attempts)) == [1] + [2] * SLOTS
    assert max(last.start_time for *_, last in attempts) < killed_time + LEASE_SECONDS + LATE_SECONDS
    assert sorted(processes.journal("B", "end")) == sorted(ids)


async def test_a_runner_that_was_stopped_ends_agents_whose_attempts_are_no_longer_its_own(processes: Processes) -> None:
    processes.start_store()
    async with client_of(processes) as store:
        ids = await enqueue(store, SLOTS, may_hold=True)
        stopped = processes.start_runner("A", is_holding=True)
        await until(lambda: len(processes.journal("A", "begin")) == SLOTS)

        os.kill(stopped.pid, signal.SIGSTOP)
        other = processes.start_runner("B")
        attempts = await checked_attempts(store, ids)
        spans = [len(await store.query_spans(rollout_id)) for rollout_id in ids]
        other.kill()
        os.kill(stopped.pid, signal.SIGCONT)
        await until(lambda: len(processes.journal("A", "cancel")) == SLOTS)
        later = await enqueue(store, SLOTS)
        await checked_attempts(store, later)

        assert [[attempt.status for attempt in tries] for tries in await checked_attempts(store, ids)] == [
            [attempt.status for attempt in tries] for tries in attempts
        ]
        assert [len(await store.query_spans(rollout_id)) for rollout_id in ids] == spans

    assert [len(tries) for tries in attempts] == [2] * SLOTS
    assert sorted(processes.journal("A", "end")) == sorted(later)  # it goes on with what is its own


def kill_and_start(processes: Processes, server: "subprocess.Popen[bytes]") -> None:
    server.kill()
    server.wait()
    time.sleep(1.5 * LEASE_SECONDS)
    processes.start_store()


def stop_and_continue(processes: Processes, server: "subprocess.Popen[bytes]") -> None:
    os.kill(server.pid, signal.SIGSTOP)
    time.sleep(2 * LEASE_SECONDS)
    os.kill(server.pid, signal.SIGCONT)


@pytest.mark.parametrize("interrupt", [kill_and_start, stop_and_continue])
async def test_a_store_that_is_away_for_longer_than_a_lease_costs_no_rollout_a_try(
    processes: Processes, interrupt: Callable[[Processes, Any], None]
) -> None:
    server = processes.start_store()
    async with client_of(processes) as store:
        ids = await enqueue(store, 40)
        for name in ("A", "B"):
            processes.start_runner(name)
        await until(lambda: len(processes.journal("A", "end") + processes.journal("B", "end")) >= 10)

        await asyncio.to_thread(interrupt, processes, server)
        attempts = await checked_attempts(store, ids)

    if interrupt is stop_and_continue:  # connections are made again in their own time, which may exceed a lease
        assert [len(tries) for tries in attempts] == [1] * len(ids)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Of this test alone, which kills it."""
    shared_cluster()  # skips where there is none
    own = Cluster(Path(os.environ[FOLDER_VARIABLE]) / f"leases-{os.getpid()}")
    own.create()
    own.start()
    yield own
    own.kill()


async def test_a_database_that_is_killed_for_longer_than_a_lease_costs_no_rollout_a_try(
    processes: Processes, cluster: Cluster
) -> None:
    def kill_and_start_database() -> None:
        cluster.kill()
        time.sleep(1.5 * LEASE_SECONDS)
        cluster.start()

    processes.store_address = cluster.create_database("leases")
    processes.start_store()
    async with client_of(processes) as store:
        ids = await enqueue(store, 40)
        for name in ("A", "B"):
            processes.start_runner(name)
        await until(lambda: len(processes.journal("A", "end") + processes.journal("B", "end")) >= 10)

        await asyncio.to_thread(kill_and_start_database)
        await checked_attempts(store, ids)
