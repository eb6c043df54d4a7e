"""AgentOpsTracer, and the span processor of the 0.2 release.

Where the agentops package is installed, what its decorators and its handler for LangChain write goes to the provider of
this process and so is recorded like any other span. Where it is not, the tracer does what `OtelTracer` does.
"""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from opentelemetry import context as otel_context
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from typing_extensions import Self

from agentlightning.instrumentation.imports import is_installed
from agentlightning.instrumentation.registry import Instrumentation
from agentlightning.legacy.agentops_patches import agentops_management, langchain_handler
from agentlightning.store.base import LightningStore
from agentlightning.tracer.binding import unobserved
from agentlightning.tracer.otel import OtelTracer
from agentlightning.utils.log_failures import log_failures
from agentlightning.utils.loop_thread import LoopThread

logger = logging.getLogger(__name__)

STORE_SECONDS: Final = 60.0
"""How long the end of a span waits for the store."""
_THREAD: Final = "otel-loop"


class LightningSpanProcessor(SpanProcessor):
    """Stores each span before its `end` returns, for one attempt at a time; `OtelTracer` does better.

    A store that fails or takes longer than a minute is logged, never raised.
    """

    def __init__(self) -> None:
        self._spans: list[ReadableSpan] = []
        self._target: tuple[LightningStore, str, str] | None = None
        self._thread = LoopThread(_THREAD)

    def __enter__(self) -> Self:
        self._spans.clear()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._target = None

    @contextmanager
    def with_context(self, *, store: LightningStore, rollout_id: str, attempt_id: str) -> Iterator[Self]:
        """Spans that end inside go to this attempt; they stay readable until the next one."""
        self._target = store, rollout_id, attempt_id
        with self:
            yield self

    def spans(self) -> list[ReadableSpan]:
        """The spans since the last entry, in the order they ended."""
        return list(self._spans)

    def on_end(self, span: ReadableSpan) -> None:
        if span.context is None or not span.context.trace_flags.sampled:
            return
        if self._target is not None:
            with log_failures(logger, "Span '%s' could not be stored.", span.name):  # which the agent must not notice
                storing = self._thread.start_soon(_store_quietly(*self._target, span))
                if threading.current_thread().name != _THREAD:  # it would wait for itself
                    storing.result(STORE_SECONDS)
        self._spans.append(span)

    def shutdown(self) -> None:
        """End the private loop; harmless the second time."""
        self._thread.end()

    def __reduce__(self) -> Any:
        raise TypeError("A LightningSpanProcessor owns a thread and cannot be pickled; make one in each process.")


async def _store_quietly(store: LightningStore, rollout_id: str, attempt_id: str, span: ReadableSpan) -> None:
    otel_context.attach(otel_context.set_value(otel_context._SUPPRESS_INSTRUMENTATION_KEY, value=True))
    with unobserved():
        await store.add_otel_span(rollout_id, attempt_id, span)


class AgentOpsTracer(OtelTracer):
    """Records what AgentOps' decorators write, where the package is in use, and all that `OtelTracer` does."""

    def __init__(self, *, agentops_managed: bool = True, instrument_managed: bool = True, daemon: bool = True) -> None:
        """Install nothing yet.

        Args:
            agentops_managed: Have AgentOps record without its service, as soon as the program imports it. False leaves
                AgentOps to the program, as does a program that has started it before; its calls of models are recorded
                by us either way.
            instrument_managed: Apply our instrumentation in each worker.
            daemon: Accepted for scripts of the 0.2 release, which ran a local server.
        """
        super().__init__(instrument=instrument_managed)
        self.agentops_managed = agentops_managed
        self.instrument_managed = instrument_managed
        self.daemon = daemon

    def _instrumentations(self) -> Iterator[Instrumentation]:
        yield from super()._instrumentations()
        if not is_installed("agentops"):
            logger.info("AgentOps is not installed; recording with OpenTelemetry alone.")
        elif self.agentops_managed:
            yield agentops_management()

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
