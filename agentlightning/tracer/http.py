"""HttpTracer: one span for each HTTP call a program makes, whatever it calls. Deprecated: `OtelTracer` sees what the
calls of models and tools mean.

A function can be run in a child process, so that the libraries of this process stay as they are and a call that hangs
can be ended.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

from opentelemetry.sdk.trace import ReadableSpan

from agentlightning.instrumentation.http_clients import HttpLog, http_patches
from agentlightning.instrumentation.registry import Instrumentation
from agentlightning.tracer.binding import Binding, current_binding, is_unobserved, observations, observe
from agentlightning.tracer.dummy import DummyTracer
from agentlightning.tracer.http_child import ChildRun
from agentlightning.tracer.http_trace import HttpTrace, HttpTraceOptions
from agentlightning.tracer.writing import core_fields_of
from agentlightning.utils.deprecation import deprecated
from agentlightning.utils.once import once

__all__ = ["HttpTracer"]

_T = TypeVar("_T")


class HttpTracer(DummyTracer):
    """Records HTTP(S) calls made with requests, urllib, urllib3, http.client, aiohttp, httpx and httpx2, and what is
    emitted. Deprecated.

    A call belongs to the trace of the task or thread that makes it; in a bare thread, to the only trace that is open.
    """

    def __init__(
        self,
        include_headers: bool = False,
        include_body: bool = False,
        include_agentlightning_requests: bool = False,
        subprocess_mode: bool = True,
        subprocess_timeout: float = 3600.0,
    ) -> None:
        """Nothing is recorded yet.

        Args:
            include_headers: Write headers to the spans, with whatever secrets they hold.
            include_body: Write bodies to the spans, as text; as far as the program reads them.
            include_agentlightning_requests: Record requests of our own clients too.
            subprocess_mode: Have `trace_run` and `trace_run_async` run the function in a child process.
            subprocess_timeout: Seconds after which the child process is ended.
        """
        deprecated("HttpTracer is deprecated; OtelTracer records the calls of models and tools, not only their HTTP.")
        super().__init__()
        self.include_headers = include_headers
        self.include_body = include_body
        self.include_agentlightning_requests = include_agentlightning_requests
        self.subprocess_mode = subprocess_mode
        self.subprocess_timeout = subprocess_timeout

    # ------------------------------------------------------------------ traces

    @asynccontextmanager
    async def trace_context(self, name: str | None = None, **kwargs: Any) -> AsyncIterator[HttpTrace]:
        """Record what happens inside. Other arguments are accepted for the sake of callers of other tracers, and
        ignored: the spans go to no store."""
        with self._trace_context_sync(name) as trace:
            yield trace

    @contextmanager
    def _trace_context_sync(self, name: str | None = None, **kwargs: Any) -> Iterator[HttpTrace]:
        trace = self._new_trace(name)
        binding = Binding(self, trace)
        try:
            with observe(binding):
                _clients().acquire()
                try:
                    self._remember(binding)
                    yield trace
                finally:
                    _clients().release()
        finally:
            self._tell_listeners(trace.as_stored)

    def get_last_trace(self) -> list[ReadableSpan]:
        """One span for each call, and for each thing emitted, in the order they began; all of one trace id."""
        return super().get_last_trace()

    def _new_trace(self, name: str | None) -> HttpTrace:
        return HttpTrace(
            name,
            HttpTraceOptions(
                headers=self.include_headers,
                bodies=self.include_body,
                own_requests=self.include_agentlightning_requests,
            ),
        )

    def _keep(self, span: ReadableSpan) -> None:
        trace = _trace_here()
        if trace is not None:
            trace.record_emitted(core_fields_of(span))

    # ------------------------------------------------------------------ functions

    def trace_run(self, func: Callable[..., _T], *args: Any, **kwargs: Any) -> _T:
        """Call a function and record what it does; with `subprocess_mode`, in a child process.

        What the child's function returns or raises is returned or raised here, and its trace is kept either way. It is
        started as `multiprocessing` is set to start processes: unless that is by forking, the function must be one that
        can be imported. TracingError if it takes longer than `subprocess_timeout`, if the process dies, or if what it
        returns cannot be pickled.
        """
        if not self.subprocess_mode:
            return super().trace_run(func, *args, **kwargs)
        child, trace = self._start_child(func, args, kwargs)
        child.wait()
        result: _T = self._outcome_of(child, trace)
        return result

    async def trace_run_async(self, func: Callable[..., Awaitable[_T]], *args: Any, **kwargs: Any) -> _T:
        """As `trace_run`, for a coroutine function; cancelling it kills the child process."""
        if not self.subprocess_mode:
            return await super().trace_run_async(func, *args, **kwargs)
        child, trace = self._start_child(func, args, kwargs)
        try:
            await asyncio.to_thread(child.wait)
        except BaseException:
            child.kill()
            raise
        result: _T = self._outcome_of(child, trace)
        return result

    def _start_child(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[ChildRun, HttpTrace]:
        child = ChildRun(self, func, args, kwargs)
        trace = self._new_trace(child.name)
        self._remember(Binding(self, trace))
        return child, trace

    def _outcome_of(self, child: ChildRun, trace: HttpTrace) -> Any:
        trace.take_over(child.entries)
        self._tell_listeners(trace.as_stored)
        return child.outcome()


@once
def _clients() -> Instrumentation:
    """One per process, as the libraries it changes are; in use while a trace is open."""
    return Instrumentation(http_patches(_log_here))


def _trace_here() -> HttpTrace | None:
    """The trace of this context, or the only one of the process in a bare thread; None if it is another tracer's."""
    if is_unobserved():
        return None
    binding = current_binding() or observations().sole_binding()
    return binding.recorder if binding is not None and isinstance(binding.recorder, HttpTrace) else None


def _log_here() -> HttpLog | None:
    return _trace_here()
