"""Context in threads: a thread that a rollout starts belongs to it, and so does what it hands to a thread pool.

Tasks and `asyncio.to_thread` inherit context variables; bare threads and pools do not. While this patch is applied,
the values of the variables it carries, and the current span of OpenTelemetry, go along. All other context variables
are left as Python leaves them. Where nothing is observed, nothing is changed.
"""

import concurrent.futures
import threading
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from types import ModuleType
from typing import Any, Final

from opentelemetry import context as otel_context

from agentlightning.instrumentation.model_calls import WATCH
from agentlightning.instrumentation.patch import Patch
from agentlightning.instrumentation.redirect import ROUTER

__all__ = ["ThreadContextPatch"]

_SERVANTS: Final = ("concurrent.futures.thread", "concurrent.futures.process", "multiprocessing.pool")
"""Modules whose threads serve whoever comes, so that they belong to nobody."""


class ThreadContextPatch(Patch):
    """Carries context into `threading.Thread`, `threading.Timer` and `ThreadPoolExecutor`."""

    name = "threading"
    module = "threading"

    def __init__(self, variables: Sequence[ContextVar[Any]]) -> None:
        """Nothing is changed yet.

        Args:
            variables: What is carried besides the variables of this room; a default says that there is nothing to.
        """
        super().__init__()
        self._variables = (*variables, ROUTER, WATCH)

    def change(self, module: ModuleType) -> None:
        self.replace(threading.Thread, "start", self._start)
        self.replace(concurrent.futures.ThreadPoolExecutor, "submit", self._submit)

    def _start(self, original: Any, thread: threading.Thread) -> None:
        carried = self._carried()
        if carried.is_anything and not _is_servant(thread):
            _run_with(carried, thread)
        original(thread)

    def _submit(self, original: Any, pool: Any, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        carried = self._carried()
        return original(pool, carried.around(function) if carried.is_anything else function, *args, **kwargs)

    def _carried(self) -> "_Carried":
        return _Carried([(variable, variable.get()) for variable in self._variables])


def _is_servant(thread: threading.Thread) -> bool:
    work = getattr(thread, "_target", None)
    return getattr(type(thread) if work is None else work, "__module__", None) in _SERVANTS


def _run_with(carried: "_Carried", thread: threading.Thread) -> None:
    """Change `run` of this thread alone, and until it is called, or the two would keep each other."""
    own, run = vars(thread).get("run"), carried.around(thread.run)

    def run_once() -> None:
        vars(thread).pop("run", None)
        if own is not None:
            vars(thread)["run"] = own
        run()

    vars(thread)["run"] = run_once


class _Carried:
    """The values of one moment."""

    def __init__(self, values: list[tuple[ContextVar[Any], Any]]) -> None:
        self._values = values
        self._span_context = otel_context.get_current()
        self.is_anything = any(value is not None and value is not False for _, value in values)

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, called with these values; afterwards the thread has those it had before."""

        def carried(*args: Any, **kwargs: Any) -> Any:
            before = [(variable, variable.set(value)) for variable, value in self._values]
            token = otel_context.attach(self._span_context)
            try:
                return function(*args, **kwargs)
            finally:
                otel_context.detach(token)
                for variable, mark in before:
                    variable.reset(mark)

        return carried
