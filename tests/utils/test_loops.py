"""The loop thread and the lock across loops."""

import asyncio
import threading

import pytest

from agentlightning.utils.loop_thread import CrossLoopLock, LoopThread


async def name_of_thread() -> str:
    return threading.current_thread().name


def test_coroutine_runs_in_the_thread_and_returns_its_value() -> None:
    thread = LoopThread("test-loop")

    assert thread.run(name_of_thread()) == "test-loop"
    thread.stop()


def test_exception_reaches_the_caller() -> None:
    async def fail() -> None:
        raise LookupError("gone")

    thread = LoopThread("test-loop")
    with pytest.raises(LookupError, match="gone"):
        thread.run(fail())
    thread.stop()


def test_stopped_thread_starts_again_on_demand() -> None:
    thread = LoopThread("test-loop")
    thread.run(name_of_thread())
    thread.stop()
    thread.stop()

    assert thread.run(name_of_thread()) == "test-loop"
    thread.stop()
    assert "test-loop" not in [t.name for t in threading.enumerate()]


def test_calling_from_the_thread_itself_is_refused() -> None:
    thread = LoopThread("test-loop")

    async def call_back() -> None:
        thread.run(name_of_thread())

    with pytest.raises(RuntimeError, match="wait for ever"):
        thread.run(call_back())
    thread.stop()


async def test_lock_is_given_in_the_order_of_asking() -> None:
    lock, order = CrossLoopLock(), []

    async def take(number: int) -> None:
        async with lock:
            order.append(number)
            await asyncio.sleep(0)

    await asyncio.gather(*(take(n) for n in range(10)))

    assert order == list(range(10))


def test_lock_passes_over_a_loop_that_is_closed() -> None:
    lock = CrossLoopLock()
    gone = asyncio.new_event_loop()
    gone.run_until_complete(lock.__aenter__())
    lock._waiting.append(gone.create_future())
    gone.close()

    async def take() -> str:
        async with lock:
            return "taken"

    async def release_and_take() -> str:
        await lock.__aexit__(None, None, None)
        return await asyncio.wait_for(take(), 10)

    assert asyncio.run(release_and_take()) == "taken"
