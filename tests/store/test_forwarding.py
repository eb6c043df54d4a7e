"""Wrappers: mutual exclusion for stores that lack it, and a store without await."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from agentlightning.errors import StoreUnavailable
from agentlightning.store import BlockingStore, InMemoryLightningStore, LightningStore, LightningStoreThreaded
from agentlightning.types import Attempt


class Slow(LightningStore):
    """Notices when two callers are inside at once."""

    def __init__(self) -> None:
        self.inside = 0
        self.most = 0

    async def update_attempt(self, rollout_id: str, attempt_id: str, *args: Any, **kwargs: Any) -> Attempt:
        self.inside += 1
        self.most = max(self.most, self.inside)
        for _ in range(5):
            await asyncio.sleep(0)
        self.inside -= 1
        return Attempt(rollout_id=rollout_id, attempt_id=attempt_id, sequence_id=1, start_time=0.0)


def test_threads_with_loops_of_their_own_never_meet_inside() -> None:
    inner = Slow()
    store = LightningStoreThreaded(inner)

    async def work() -> None:
        await asyncio.gather(*(store.update_attempt("r", "a", status="running") for _ in range(5)))

    threads = [threading.Thread(target=asyncio.run, args=(work(),)) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert inner.most == 1


def test_a_store_that_is_safe_already_needs_no_lock() -> None:
    assert LightningStoreThreaded(InMemoryLightningStore())._needs_no_lock
    assert LightningStoreThreaded(Slow()).capabilities["thread_safe"]


@pytest.fixture
def blocking() -> Any:
    store = BlockingStore(InMemoryLightningStore())
    yield store
    store.close()


def test_blocking_store_returns_values_not_coroutines(blocking: Any) -> None:
    rollout = blocking.enqueue_rollout({"n": 1}, mode="train")
    claimed = blocking.dequeue_rollout("w")
    blocking.update_attempt(claimed.rollout_id, "latest", status="succeeded")

    assert claimed.rollout_id == rollout.rollout_id
    assert [r.status for r in blocking.wait_for_rollouts([rollout.rollout_id])] == ["succeeded"]


def test_blocking_store_raises_what_the_store_raises(blocking: Any) -> None:
    with pytest.raises(ValueError, match="Rollout nope not found"):
        blocking.update_rollout("nope", status="failed")
    with pytest.raises(AttributeError, match="no operation 'explode'"):
        blocking.explode()


def test_blocking_store_that_is_closed_says_so_to_whoever_waits_and_whoever_asks(blocking: Any) -> None:
    rollout = blocking.enqueue_rollout("a")

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(blocking.wait_for_rollouts, [rollout.rollout_id])
        while not any(task.get_name().startswith("Task") for task in asyncio.all_tasks(blocking._thread._loop)):
            time.sleep(0.001)
        blocking.close()
        with pytest.raises(StoreUnavailable, match="closed"):
            waiting.result(timeout=30)

    with pytest.raises(StoreUnavailable, match="closed"):
        blocking.enqueue_rollout("b")
    with pytest.raises(StoreUnavailable, match="closed"):
        blocking.subscribe()
    assert len(asyncio.run(blocking.store.query_rollouts())) == 1


def test_blocking_subscription_is_an_iterator(blocking: Any) -> None:
    notices = blocking.subscribe(["rollout"])
    blocking.enqueue_rollout("a", rollout_id="r-1")
    blocking.enqueue_rollout("b", rollout_id="r-2")
    assert [next(notices).rollout_id for _ in range(2)] == ["r-1", "r-2"]
