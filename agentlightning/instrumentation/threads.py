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

from agentlightning.instrumentation.model_calls import WATCHES
from agentlightning.instrumentation.patch import Original, Patch
from agentlightning.instrumentation.redirect import ROUTER

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
        self._variables = (*variables, ROUTER, WATCHES)

    def change(self, module: ModuleType) -> None:
        self.replace(threading.Thread, "start", self._start)
        self.replace(concurrent.futures.ThreadPoolExecutor, "submit", self._submit)

    def _start(self, original: Original, thread: threading.Thread) -> None:
        around = self._carrier()
        work = getattr(thread, "_target", None)
        serves_all = getattr(type(thread) if work is None else work, "__module__", None) in _SERVANTS
        if around is not None and not serves_all:
            own, run = vars(thread).get("run"), around(thread.run)

            def run_once() -> None:
                # `run` of this thread alone is changed, and until it is called, or the two would keep each other.
                vars(thread).pop("run", None)
                if own is not None:
                    vars(thread)["run"] = own
                run()

            vars(thread)["run"] = run_once
        original(thread)

    def _submit(
        self, original: Original, pool: object, function: Callable[..., object], /, *args: object, **kwargs: object
    ) -> object:
        around = self._carrier()
        return original(pool, function if around is None else around(function), *args, **kwargs)

    def _carrier(self) -> "Callable[[Callable[..., Any]], Callable[..., Any]] | None":
        """What makes a function run with the values of this moment; None if there are none to carry."""
        values = [(variable, variable.get()) for variable in self._variables]
        if all(value is None or value is False or value == () for _, value in values):
            return None
        span_context = otel_context.get_current()

        def around(function: Callable[..., object]) -> Callable[..., Any]:
            def carried(*args: object, **kwargs: object) -> Any:
                before = [(variable, variable.set(value)) for variable, value in values]
                token = otel_context.attach(span_context)
                try:
                    return function(*args, **kwargs)
                finally:  # the thread has what it had before
                    otel_context.detach(token)
                    for variable, mark in before:
                        variable.reset(mark)

            return carried

        return around
