"""CallingThread: waits for work in another thread, and runs functions for it meanwhile."""

import asyncio
import contextvars
import threading

import pytest

from agentlightning.utils.daemon_threads import CallingThread

WORD = contextvars.ContextVar("word", default="none")


def nothing() -> None:
    raise AssertionError("nobody interrupts")


def test_the_work_is_done_in_another_thread_in_the_caller_s_context() -> None:
    WORD.set("mine")

    thread, word = CallingThread().wait_for(lambda: (threading.current_thread(), WORD.get()), nothing)

    assert thread is not threading.current_thread()
    assert word == "mine"


def test_what_the_work_raises_is_raised() -> None:
    def work() -> None:
        raise LookupError("lost")

    with pytest.raises(LookupError, match="lost"):
        CallingThread().wait_for(work, nothing)


def test_functions_run_in_the_calling_thread_one_after_the_other() -> None:
    calling = CallingThread()

    async def work() -> list[threading.Thread]:
        return await asyncio.gather(*(calling.run(threading.current_thread) for _ in range(3)))

    assert calling.wait_for(lambda: asyncio.run(work()), nothing) == [threading.current_thread()] * 3


def test_what_a_function_raises_is_raised_where_it_was_called() -> None:
    calling = CallingThread()

    def failing() -> None:
        raise LookupError("lost")

    async def work() -> str:
        with pytest.raises(LookupError, match="lost"):
            await calling.run(failing)
        return "went on"

    assert calling.wait_for(lambda: asyncio.run(work()), nothing) == "went on"


def test_an_interrupt_ends_the_work_and_no_further_function_is_run() -> None:
    calling, stopped, ran = CallingThread(), threading.Event(), []

    def interrupted() -> None:
        raise KeyboardInterrupt

    async def work() -> str:
        waiting = [asyncio.ensure_future(calling.run(one)) for one in (interrupted, lambda: ran.append(1))]
        while not stopped.is_set():  # it is set in another thread
            await asyncio.sleep(0.01)
        for one in waiting:
            one.cancel()
        return "stopped"

    with pytest.raises(KeyboardInterrupt):
        calling.wait_for(lambda: asyncio.run(work()), stopped.set)
    assert ran == []
