"""OtelTracer: records everything that is written with OpenTelemetry.

It needs no service and no network. The process has one provider: ours, unless the program installed its own, which
then gets our span processor besides those it has. There is one such processor on a provider, however many tracers and
rollouts share it; it finds the rollout of each span where the span begins, and hands the span on when it ends.
"""

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.environment_variables import OTEL_ATTRIBUTE_COUNT_LIMIT, OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace import Span as LiveSpan
from opentelemetry.sdk.trace.sampling import ALWAYS_ON

from agentlightning.errors import TracingError
from agentlightning.instrumentation.registry import Instrumentation, instrumentation
from agentlightning.instrumentation.threads import ThreadContextPatch
from agentlightning.store.base import LightningStore
from agentlightning.tracer.binding import CARRIED, Binding, current_binding, is_unobserved, observations
from agentlightning.tracer.recording import RecordingTracer
from agentlightning.utils.once import once
from agentlightning.utils.otel import SCOPE_NAME
from agentlightning.utils.spelling import suggests_arguments

__all__ = ["OtelTracer", "RolloutSpanProcessor", "binding_of_open", "private_tracer"]

logger = logging.getLogger(__name__)

MOST_OPEN_SPANS: Final = 100_000
"""Spans that began and have not ended; beyond this the oldest count as never ended."""
_KEPT_AS: Final = "_agentlightning_processor"
_INSTALLING = threading.Lock()  # makes looking for a provider, or a processor, and installing one a single step


@suggests_arguments
class OtelTracer(RecordingTracer):
    """Records emitted spans, the program's own OpenTelemetry spans and, with `instrument`, calls of known libraries."""

    uses_opentelemetry = True

    def __init__(self, *, instrument: bool = True) -> None:
        """Install nothing yet.

        Args:
            instrument: Apply `agentlightning.instrumentation.instrument_all` in each worker.
        """
        super().__init__()
        self.instrument = instrument
        self._applied: tuple[Instrumentation, ...] = ()

    def init(self, *args: object, **kwargs: object) -> None:
        """Load what workers will need, so that those that are forked share it."""
        super().init(*args, **kwargs)
        if self.instrument:
            instrumentation()

    def init_worker(self, worker_id: int, store: LightningStore | None = None, *args: object, **kwargs: object) -> None:
        """Find or install the provider, and listen to it; a second time is harmless."""
        super().init_worker(worker_id, store)
        _listen_to(_provider())
        if not self._applied:
            for patches in self._instrumentations():
                patches.acquire()
                self._applied = (*self._applied, patches)

    def teardown_worker(self, worker_id: int, *args: object, **kwargs: object) -> None:
        """The provider stays, because OpenTelemetry never lets go of one, and without a trace records nothing."""
        super().teardown_worker(worker_id)
        while self._applied:
            self._applied[-1].release()
            self._applied = self._applied[:-1]

    def _instrumentations(self) -> Iterator[Instrumentation]:
        """What is applied in each worker, and undone in the reverse order."""
        yield _thread_context()
        if self.instrument:
            yield instrumentation()

    def __getstate__(self) -> dict[str, object]:
        return {**super().__getstate__(), "_applied": ()}


@once
def _thread_context() -> Instrumentation:
    """One per process: every tracer wants the same."""
    return Instrumentation((ThreadContextPatch(CARRIED),))


def _provider() -> TracerProvider:
    """The SDK provider that is installed; ours is, if there was none."""
    with _INSTALLING:
        if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
            trace.set_tracer_provider(_new_provider())
    provider = trace.get_tracer_provider()
    if not isinstance(provider, TracerProvider):
        raise TracingError(
            f"The installed tracer provider is a {type(provider).__module__}.{type(provider).__qualname__}, to which "
            "no span processor can be added; install opentelemetry.sdk.trace.TracerProvider, or none."
        )
    return provider


def _new_provider() -> TracerProvider:
    """One that keeps every span, and all attributes that it has: a long conversation has more than the usual 128."""
    is_limited = bool({OTEL_ATTRIBUTE_COUNT_LIMIT, OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT} & os.environ.keys())
    limits = SpanLimits() if is_limited else SpanLimits(max_span_attributes=SpanLimits.UNSET)
    return TracerProvider(ALWAYS_ON, span_limits=limits, shutdown_on_exit=False)


@once
def private_tracer() -> trace.Tracer:
    """For a tracer that installs no provider: its spans are recorded in their trace, and nowhere else."""
    provider = _new_provider()
    _listen_to(provider)
    return provider.get_tracer(SCOPE_NAME)


def _listen_to(provider: TracerProvider) -> None:
    """Add our processor to a provider, which keeps it, once."""
    with _INSTALLING:
        if _KEPT_AS not in vars(provider):
            vars(provider)[_KEPT_AS] = RolloutSpanProcessor()
            provider.add_span_processor(vars(provider)[_KEPT_AS])


def binding_of_open(span: trace.Span) -> Binding | None:
    """The binding of a span that has not ended; None if it belongs to no trace of ours, or its provider is another."""
    processor: RolloutSpanProcessor | None = getattr(trace.get_tracer_provider(), _KEPT_AS, None)
    return None if processor is None else processor.binding_by_span.get(span.get_span_context().span_id)


class RolloutSpanProcessor(SpanProcessor):
    """Finds the binding where a span begins, and hands the span to it when it ends, wherever that is."""

    def __init__(self) -> None:
        self.binding_by_span: dict[int, Binding] = {}
        """Of spans that have begun here and not ended."""
        self._has_warned = False

    def on_start(self, span: trace.Span, parent_context: Context | None = None) -> None:
        # That of an open parent comes first: what a rollout asks of a loop or thread of another is still its own.
        parent = getattr(span, "parent", None)
        binding = None if parent is None or is_unobserved() else self.binding_by_span.get(parent.span_id)
        binding = binding or current_binding()
        if binding is None and not is_unobserved():
            binding = self._sole_binding(span)
        if binding is None:
            return
        self.binding_by_span[span.get_span_context().span_id] = binding
        if binding.shipper is not None and isinstance(span, LiveSpan):
            binding.recorder.open_spans[span.get_span_context().span_id] = span
        if len(self.binding_by_span) > MOST_OPEN_SPANS:
            with suppress(RuntimeError, KeyError, StopIteration):  # another thread changed it: it will be tried again
                oldest = next(iter(self.binding_by_span))
                self.binding_by_span.pop(oldest).recorder.losses.add("the span was never ended")

    def on_end(self, span: ReadableSpan) -> None:
        if (context := span.context) is None:
            return
        binding = self.binding_by_span.pop(context.span_id, None)
        if binding is not None and context.trace_flags.sampled:
            binding.finish(span)

    def _sole_binding(self, span: trace.Span) -> Binding | None:
        """That of the only rollout there is."""
        count = len(observations().bindings)
        if count > 1 and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "Span '%s' began in thread '%s', which inherited no context, while %d rollouts were running; "
                "such spans are left out. Start threads with contextvars.copy_context().run, or asyncio.to_thread.",
                getattr(span, "name", ""),
                threading.current_thread().name,
                count,
            )
        return observations().sole_binding()
