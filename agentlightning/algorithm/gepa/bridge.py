"""From the engine's thread to the event loop: gepa's engine is synchronous, while stores and models are awaited.

The engine runs in a thread of its own. What it needs of the loop it asks for with `call`, which blocks its thread and
nothing else. An error on the loop ends the engine at once, whatever the engine would make of it, and is raised where
the engine was started. Whoever cancels the run ends the engine too, and waits until its thread is done.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

from agentlightning.utils.daemon_threads import DaemonThreads

__all__ = ["EngineBridge"]

_T = TypeVar("_T")


class _Halt(BaseException):
    """Ends the engine; not an `Exception`, because the engine goes on after some of those. It stays in this file."""


class EngineBridge:
    """The loop on which it is made, as a thread sees it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._changing = threading.Lock()  # protects what is under way and whether the bridge is closed
        self._under_way: Future[Any] | None = None
        self._is_closed = False
        self._failure: BaseException | None = None

    async def run(self, engine: Callable[[], object]) -> None:
        """Run an engine in a thread until it ends; raises what ended it."""
        threads = DaemonThreads("gepa")
        work = asyncio.ensure_future(threads.run(lambda: self._until_halted(engine)))
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            self._close()
            await asyncio.gather(work, return_exceptions=True)
            raise
        finally:
            threads.close()
        if self._failure is not None:
            raise self._failure

    def call(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """What a coroutine returns on the loop; for the engine's thread."""
        with self._changing:
            if self._is_closed:
                coroutine.close()
                raise _Halt
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
            self._under_way = future
        try:
            return future.result()
        except CancelledError:
            raise _Halt from None
        except BaseException as error:
            self._failure = error
            raise _Halt from error

    def _until_halted(self, engine: Callable[[], object]) -> None:
        try:
            engine()
        except _Halt:
            return

    def _close(self) -> None:
        with self._changing:
            self._is_closed = True
            if self._under_way is not None:
                self._under_way.cancel()
