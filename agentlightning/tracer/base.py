"""Tracer: what every way of observing an agent has in common.

A tracer belongs to a worker. Around each rollout the runner opens `trace_context`; what the agent does inside becomes
spans, which go to the store if one is named, and stay readable through `get_last_trace` until the next trace. While it
is open, the tracer is the active one, to which emitters speak.
"""

import atexit
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from typing_extensions import Self

from agentlightning.store.base import LightningStore
from agentlightning.tracer.binding import Losses, clear_active_tracer, get_active_tracer, set_active_tracer
from agentlightning.types import (
    Attributes,
    ParallelWorkerBase,
    Span,
    SpanCoreFields,
    SpanRecordingContext,
    TraceStatus,
)
from agentlightning.utils.log_failures import log_failures

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

__all__ = ["Listener", "Tracer", "clear_active_tracer", "get_active_tracer", "set_active_tracer"]

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

Listener = Callable[[list[Span]], Any]
"""Called with the spans of each trace when it ends; an adapter will do."""


class Tracer(ParallelWorkerBase):
    """Turns running code into spans."""

    uses_opentelemetry: bool = False
    """Whether what is written with OpenTelemetry inside a trace is recorded; otherwise only `create_span` is."""

    def __init__(self) -> None:
        super().__init__()
        self.store: LightningStore | None = None
        self._listeners: list[Listener] = []

    # ------------------------------------------------------------------ workers

    def init_worker(self, worker_id: int, store: LightningStore | None = None, *args: Any, **kwargs: Any) -> None:
        """Prepare one worker.

        Args:
            store: Where spans go when a trace names an attempt and no store.
        """
        super().init_worker(worker_id)
        self.store = store

    @contextmanager
    def lifespan(self, store: LightningStore | None = None) -> Iterator[Self]:
        """Make this process worker 0 until the block, or else the program, ends: for scripts and tests."""
        with ExitStack() as undone:
            atexit.register(undone.close)
            undone.callback(atexit.unregister, undone.close)
            self.init()
            undone.callback(self.teardown)
            self.init_worker(0, store)
            undone.callback(self.teardown_worker, 0)
            yield self

    # ------------------------------------------------------------------ traces

    def trace_context(
        self,
        name: str | None = None,
        *,
        store: LightningStore | None = None,
        rollout_id: str | None = None,
        attempt_id: str | None = None,
    ) -> AbstractAsyncContextManager[Any]:
        """Record what happens inside; with an attempt, and a store here or in `init_worker`, its spans go there.

        When it is left, the spans are in the store, or have been counted as lost.
        """
        raise NotImplementedError

    def _trace_context_sync(
        self,
        name: str | None = None,
        *,
        store: LightningStore | None = None,
        rollout_id: str | None = None,
        attempt_id: str | None = None,
    ) -> AbstractContextManager[Any]:
        """As `trace_context`, for code without an event loop."""
        raise NotImplementedError

    def get_last_trace(self) -> "list[ReadableSpan]":
        """The finished spans of the trace that this task or thread opened last, in the order they ended."""
        raise NotImplementedError

    def get_last_losses(self) -> Losses:
        """The spans of that trace which did not reach the store, by reason."""
        return Losses()

    def trace_run(self, func: Callable[..., _T], *args: Any, **kwargs: Any) -> _T:
        """Call a function and record what it does."""
        with self._trace_context_sync(name=_name_of(func)):
            return func(*args, **kwargs)

    async def trace_run_async(self, func: Callable[..., Awaitable[_T]], *args: Any, **kwargs: Any) -> _T:
        """Call a coroutine function and record what it does."""
        async with self.trace_context(name=_name_of(func)):
            return await func(*args, **kwargs)

    # ------------------------------------------------------------------ spans

    def create_span(
        self,
        name: str,
        attributes: Attributes | None = None,
        timestamp: float | None = None,
        status: TraceStatus | None = None,
    ) -> SpanCoreFields:
        """Record a span that begins and ends at once.

        Args:
            timestamp: Seconds since the epoch; now, if left out.
            status: `UNSET`, if left out.
        """
        raise NotImplementedError

    def operation_context(
        self,
        name: str,
        attributes: Attributes | None = None,
        start_time: float | None = None,
        end_time: float | None = None,
    ) -> AbstractContextManager[SpanRecordingContext]:
        """Record a span around what happens inside; an exception that passes through is noted on it."""
        raise NotImplementedError

    # ------------------------------------------------------------------ listeners

    def add_listener(self, listener: Listener) -> None:
        """Call `listener` with the spans of every trace that ends from now on; what it raises is logged."""
        self._listeners.append(listener)

    def remove_listener(self, listener: Listener) -> None:
        """Undo `add_listener`; ValueError if it does not listen."""
        self._listeners.remove(listener)

    def _call_listeners(self, spans: Callable[[], list[Span]]) -> None:
        if not self._listeners:
            return
        trace = spans()
        for listener in tuple(self._listeners):
            with log_failures(logger, "A listener of %s failed.", type(self).__name__):
                listener(trace)

    def get_langchain_handler(self) -> Any:
        """A callback handler for LangChain; None where the tracer has none to give."""
        logger.warning("%s has no callback handler for LangChain.", type(self).__name__)
        return None


def _name_of(func: Callable[..., object]) -> str:
    return getattr(func, "__name__", type(func).__name__)
