"""Many threads with event loops of their own on one store."""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentlightning.store import LightningStore
from tests.contract.conftest import BACKENDS, REMOTE
from tests.contract.remote import remote

THREADS = 8
ROLLOUTS = 48
SPANS = 3


def build(backend: str, folder: Path) -> LightningStore:
    behind, transport = REMOTE.get(backend, (backend, None))
    store = BACKENDS[behind](folder / "s.db")
    return store if transport is None else remote(store, transport)


def run_in_threads(work: Callable[[int], Any]) -> None:
    """Run work in all threads at once; what one of them raises is raised here."""
    errors: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            asyncio.run(work(number))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(n,)) for n in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("backend", ["memory", "sqlite", "threaded", "client-memory", "client-memory-http"])
def test_each_rollout_and_number_is_handed_out_once(backend: str, tmp_path: Path, make_span: Any) -> None:
    store = build(backend, tmp_path)
    claims: Counter[str] = Counter()
    numbers: list[int] = []

    async def work(number: int) -> None:
        numbers.extend([await store.get_next_span_sequence_id("shared", "x") for _ in range(5)])
        for n in range(ROLLOUTS // THREADS):
            await store.enqueue_rollout({"by": number, "n": n})
        while (claimed := await store.dequeue_rollout(f"w-{number}")) is not None:
            claims[claimed.rollout_id] += 1
            for n in range(SPANS):
                await store.add_span(make_span(claimed, sequence_id=n, span_id=f"{number}-{n}"))
            await store.update_attempt(claimed.rollout_id, claimed.attempt.attempt_id, status="succeeded")

    async def check() -> None:
        rollouts = await store.query_rollouts()
        assert len(rollouts) == ROLLOUTS
        assert {r.status for r in rollouts} == {"succeeded"}
        assert claims == Counter({r.rollout_id: 1 for r in rollouts})
        assert (await store.statistics())["total_spans"] == ROLLOUTS * SPANS
        assert (await store.statistics())["total_attempts"] == ROLLOUTS
        await store.close()

    run_in_threads(work)
    asyncio.run(check())
    assert sorted(numbers) == list(range(1, THREADS * 5 + 1))


@pytest.mark.parametrize("backend", ["memory", "sqlite", "client-memory", "client-memory-http"])
def test_waiting_threads_share_the_work(backend: str, tmp_path: Path) -> None:
    store = build(backend, tmp_path)
    ready = threading.Barrier(THREADS)
    claims: list[str] = []

    async def work(number: int) -> None:
        if number == 0:
            ready.wait()
            for n in range(THREADS - 1):
                await store.enqueue_rollout(n)
            return
        waiting = asyncio.create_task(store.dequeue_rollout(wait=60))
        await asyncio.sleep(0)
        await asyncio.get_running_loop().run_in_executor(None, ready.wait)
        claimed = await waiting
        assert claimed is not None
        claims.append(claimed.rollout_id)

    run_in_threads(work)
    asyncio.run(store.close())

    assert len(set(claims)) == THREADS - 1
