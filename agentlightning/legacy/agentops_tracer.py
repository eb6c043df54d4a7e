"""AgentOpsTracer, and the span processor of the 0.2 release.

AgentOps brings decorators, and instrumentation of its own for many frameworks. Where the package is installed, what
they write goes to the provider of this process and so is recorded like any other span; its service is never contacted.
Where it is not, the tracer does what `OtelTracer` does.
"""

import asyncio
import logging
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from opentelemetry import context as otel_context
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.trace import Span
from typing_extensions import Self

from agentlightning.errors import TracingError
from agentlightning.instrumentation.imports import is_installed
from agentlightning.instrumentation.registry import Instrumentation
from agentlightning.legacy.agentops_patches import agentops_instrumentors, agentops_management, langchain_handler
from agentlightning.store.base import LightningStore
from agentlightning.tracer.binding import unobserved
from agentlightning.tracer.otel import OtelTracer
from agentlightning.utils.log_failures import log_failures
from agentlightning.utils.loop_thread import LoopThread

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

STORE_SECONDS: Final = 60.0
"""How long the end of a span waits for the store."""


class LightningSpanProcessor(SpanProcessor):
    """Stores each span before its `end` returns, for one attempt at a time; `OtelTracer` does better.

    A store that fails or takes longer than a minute is logged, never raised.
    """

    def __init__(self) -> None:
        self._spans: list[ReadableSpan] = []
        self._store: LightningStore | None = None
        self._rollout_id: str | None = None
        self._attempt_id: str | None = None
        self._thread = LoopThread("otel-loop")
        self._loop: asyncio.AbstractEventLoop | None
        self._loop, self._loop_thread = self._thread.run(_loop_and_thread())

    # ------------------------------------------------------------------ binding

    def __enter__(self) -> Self:
        self._spans.clear()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._store = self._rollout_id = self._attempt_id = None

    @contextmanager
    def with_context(self, *, store: LightningStore, rollout_id: str, attempt_id: str) -> Iterator[Self]:
        """Spans that end inside go to this attempt; they stay readable until the next one."""
        self._store, self._rollout_id, self._attempt_id = store, rollout_id, attempt_id
        with self:
            yield self

    def spans(self) -> list[ReadableSpan]:
        """The spans since the last entry, in the order they ended."""
        return list(self._spans)

    # ------------------------------------------------------------------ spans

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Nothing: the span belongs to whatever is bound when it ends."""

    def on_end(self, span: ReadableSpan) -> None:
        if span.context is None or not span.context.trace_flags.sampled:
            return
        store, rollout_id, attempt_id = self._store, self._rollout_id, self._attempt_id
        if store is not None and rollout_id is not None and attempt_id is not None:
            with log_failures(logger, "Span '%s' could not be stored.", span.name):  # which the agent must not notice
                self._await_in_loop(_store_quietly(store, rollout_id, attempt_id, span), timeout=STORE_SECONDS)
        self._spans.append(span)

    def _await_in_loop(self, coroutine: Coroutine[object, object, _T], timeout: float | None = None) -> _T | None:
        """Run a coroutine on the private loop and wait for it; on the loop's own thread it is only scheduled."""
        if self._loop is None:
            coroutine.close()
            raise TracingError("Loop is not initialized; the processor was shut down.")
        future: Future[_T] = self._thread.start_soon(coroutine)
        if threading.current_thread() is self._loop_thread:
            return None
        try:
            return future.result(timeout)
        except BaseException:
            future.cancel()
            raise

    def shutdown(self) -> None:
        """End the private loop; harmless the second time."""
        self._loop = None
        self._thread.stop()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """True: there is never anything left to flush."""
        return True

    def __reduce__(self) -> Any:
        raise TypeError("A LightningSpanProcessor owns a thread and cannot be pickled; make one in each process.")


async def _loop_and_thread() -> tuple[asyncio.AbstractEventLoop, threading.Thread]:
    return asyncio.get_running_loop(), threading.current_thread()


async def _store_quietly(store: LightningStore, rollout_id: str, attempt_id: str, span: ReadableSpan) -> None:
    otel_context.attach(otel_context.set_value(otel_context._SUPPRESS_INSTRUMENTATION_KEY, value=True))
    with unobserved():
        await store.add_otel_span(rollout_id, attempt_id, span)


class AgentOpsTracer(OtelTracer):
    """Records what AgentOps' decorators and instrumentors write, where the package is in use, and all that
    `OtelTracer` does."""

    def __init__(self, *, agentops_managed: bool = True, instrument_managed: bool = True, daemon: bool = True) -> None:
        """Nothing is installed yet.

        Args:
            agentops_managed: Set AgentOps up for this process, as soon as the program imports it, without its service;
                of a program that has started AgentOps itself, withhold what would reach the service (see
                `instrumentation.agentops.enable_agentops_service`). False leaves AgentOps to the program, service
                included: it must have called `agentops.init` before `init_worker`.
            instrument_managed: Apply the instrumentation in each worker: ours, and AgentOps' for the libraries that
                only it knows, so that a call is one span.
            daemon: Accepted for scripts of the 0.2 release, which ran a local server.
        """
        super().__init__(instrument=instrument_managed)
        self.agentops_managed = agentops_managed
        self.instrument_managed = instrument_managed
        self.daemon = daemon

    def _instrumentations(self) -> Iterator[Instrumentation]:
        yield from super()._instrumentations()
        if not self.agentops_managed:
            return
        if not is_installed("agentops"):
            logger.info("AgentOps is not installed; recording with OpenTelemetry alone.")
            return
        yield agentops_management()
        if self.instrument_managed:
            yield agentops_instrumentors()

    def get_langchain_handler(self, tags: list[str] | None = None) -> Any:
        """AgentOps' callback handler for LangChain; None, with a warning, where either is not installed.

        With `instrument_managed` LangChain is recorded anyway: then the handler may be passed as ever, and records
        nothing a second time.
        """
        try:
            return langchain_handler(tags or [], is_quiet=self.instrument_managed)
        except ImportError:
            return super().get_langchain_handler()

    get_langchain_callback_handler = get_langchain_handler
