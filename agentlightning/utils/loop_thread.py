"""Event loops in several threads: the one place that makes a second loop, and a lock across loops."""

import asyncio
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from typing import TypeVar

__all__ = ["CrossLoopLock", "LoopThread", "LoopThreadEnded", "run_in_loop"]

ResultT = TypeVar("ResultT")


class LoopThreadEnded(RuntimeError):
    """A loop thread that was ended for good was asked to run something."""


class LoopThread:
    """Runs coroutines for synchronous callers; started by the first of them."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._starting = threading.Lock()  # protects what follows; nothing is handed to a loop that is being stopped
        self._has_ended = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def run(self, coroutine: Coroutine[object, object, ResultT]) -> ResultT:
        """Run a coroutine to its end and return what it returns; blocks the calling thread."""
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise RuntimeError(f"Called from the loop thread '{self._name}' itself, which would wait for ever.")
        future = self.start_soon(coroutine)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def start_soon(self, coroutine: Coroutine[object, object, ResultT]) -> Future[ResultT]:
        """Run a coroutine in the background of the calling thread."""
        with self._starting:
            if self._has_ended:
                coroutine.close()
                raise LoopThreadEnded(f"The loop thread '{self._name}' has ended.")
            return asyncio.run_coroutine_threadsafe(coroutine, self._started())

    async def call(self, coroutine: Coroutine[object, object, ResultT]) -> ResultT:
        """Await a coroutine there, in the caller's context; cancelling cancels it, and waits until it has ended."""
        here = asyncio.get_running_loop()
        if here is self._loop:
            return await coroutine
        is_over: asyncio.Future[None] = here.create_future()
        tasks: list[asyncio.Task[ResultT]] = []

        def start() -> None:
            tasks.append(asyncio.create_task(_contained(coroutine)))
            tasks[0].add_done_callback(lambda _: _post(here, _grant, is_over))

        with self._starting:
            there = self._started()
            there.call_soon_threadsafe(start)
        while not is_over.done():
            try:
                await asyncio.shield(is_over)
            except asyncio.CancelledError:
                _post(there, lambda: tasks[0].cancel())
        coroutine.close()  # it never began if it was cancelled at once
        try:
            return tasks[0].result()
        except _Exit as error:
            raise error.__cause__ or error from None

    def end(self) -> None:
        """As `stop`, for good: what is under way is cancelled, and a later call raises `LoopThreadEnded`."""
        with self._starting:
            self._has_ended = True
        self.stop()

    def stop(self, timeout_seconds: float | None = None) -> bool:
        """End the loop and its thread; a later call starts a new one. Returns whether the thread ended in time."""
        with self._starting:
            loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
        if loop is not None and thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            thread.join(timeout_seconds)
        return thread is None or not thread.is_alive()

    def _started(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=_serve, args=(self._loop,), name=self._name, daemon=True)
            self._thread.start()
        return self._loop


def run_in_loop(work: Awaitable[ResultT], name: str = "agl-loop") -> ResultT:
    """Await something on an event loop of its own, also where one runs in the calling thread."""

    async def awaited() -> ResultT:
        return await work

    thread = LoopThread(name)
    try:
        return thread.run(awaited())
    finally:
        thread.stop()


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        pending = asyncio.all_tasks(loop)
        for task in pending:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*pending, return_exceptions=True))
        loop.run_until_complete(asyncio.sleep(0))  # transports that were closed last are let go in the next round
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
    finally:
        loop.close()


class _Exit(Exception):
    """SystemExit or KeyboardInterrupt, its cause: out of a task these would end the loop."""


async def _contained(coroutine: Coroutine[object, object, ResultT]) -> ResultT:
    try:
        return await coroutine
    except (SystemExit, KeyboardInterrupt) as error:
        raise _Exit from error


class CrossLoopLock:
    """Mutual exclusion across loops, first come first served; waiting never blocks a loop's thread."""

    def __init__(self) -> None:
        self._guard = threading.Lock()  # protects the two fields below; held for a few instructions only
        self._is_taken = False
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def __aenter__(self) -> None:
        with self._guard:
            if not self._is_taken:
                self._is_taken = True
                return
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
        try:
            await turn
        except BaseException:
            self._leave_line(turn)
            raise

    async def __aexit__(self, *exc_info: object) -> None:
        self._pass_on()

    def _leave_line(self, turn: "asyncio.Future[None]") -> None:
        """The waiter was cancelled; if the lock was handed to it meanwhile, the next in line gets it."""
        with self._guard:
            if turn in self._waiting:
                self._waiting.remove(turn)
                return
        self._pass_on()

    def _pass_on(self) -> None:
        """Hand the lock to the first in line whose loop still lives."""
        while True:
            with self._guard:
                if not self._waiting:
                    self._is_taken = False
                    return
                turn = self._waiting.popleft()
            if _post(turn.get_loop(), _grant, turn):
                return


def _post(loop: asyncio.AbstractEventLoop, callback: Callable[..., object], *arguments: object) -> bool:
    """Call something in the loop of another thread; False if that loop is closed."""
    try:
        loop.call_soon_threadsafe(callback, *arguments)
    except RuntimeError:
        return False
    return True


def _grant(turn: "asyncio.Future[None]") -> None:
    """Runs in the waiter's loop; a waiter that was cancelled passes the lock on in `_leave_line`."""
    if not turn.done():
        turn.set_result(None)
