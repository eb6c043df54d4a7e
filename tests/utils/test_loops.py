"""The loop thread and the lock across loops."""

import asyncio
import threading
from contextvars import ContextVar

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


async def test_call_runs_in_the_context_of_its_caller_and_not_twice_through_the_loop() -> None:
    thread, variable = LoopThread("test-loop"), ContextVar[str]("variable")
    variable.set("mine")

    async def look() -> tuple[str, str]:
        return variable.get(), await thread.call(name_of_thread())

    assert await thread.call(look()) == ("mine", "test-loop")
    thread.stop()


@pytest.mark.parametrize("error", [LookupError("gone"), SystemExit(3)], ids=["error", "exit"])
async def test_what_a_call_raises_reaches_its_caller_and_leaves_the_loop_running(error: BaseException) -> None:
    thread = LoopThread("test-loop")

    async def fail() -> None:
        raise error

    with pytest.raises(type(error)):
        await thread.call(fail())
    assert await thread.call(name_of_thread()) == "test-loop"
    thread.stop()


@pytest.mark.parametrize("has_begun", [True, False])
async def test_a_call_that_is_cancelled_has_ended(has_begun: bool) -> None:
    thread, begun, steps = LoopThread("test-loop"), threading.Event(), list[str]()

    async def work() -> None:
        begun.set()
        try:
            await asyncio.sleep(1000)
        finally:
            await asyncio.sleep(0)
            steps.append("ended")

    call = asyncio.create_task(thread.call(work()))
    await (asyncio.to_thread(begun.wait) if has_begun else asyncio.sleep(0))
    call.cancel()

    with pytest.raises(asyncio.CancelledError):
        await call
    assert steps == (["ended"] if begun.is_set() else [])
    thread.stop()


def test_a_loop_that_is_blocked_is_left_behind_in_time() -> None:
    thread, leave, begun = LoopThread("test-loop"), threading.Event(), threading.Event()

    async def block() -> None:
        begun.set()
        leave.wait()

    thread.start_soon(block())
    begun.wait()

    assert not thread.stop(0.01)
    leave.set()


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
