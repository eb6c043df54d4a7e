"""The span processor that sits on the provider: it says to which rollout each span belongs, and hands it on.

There is one on a provider, however many tracers and rollouts share it. The provider is ours if the process had none;
otherwise our processor joins those of the user.
"""

import logging
import os
import threading
from contextlib import suppress
from typing import Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.environment_variables import OTEL_ATTRIBUTE_COUNT_LIMIT, OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace import Span as LiveSpan
from opentelemetry.sdk.trace.sampling import ALWAYS_ON

from agentlightning.errors import TracingError
from agentlightning.tracer.binding import Binding, current_binding, is_unobserved, observations

__all__ = ["RolloutSpanProcessor", "binding_of_open", "processor_on", "provider_of_this_process"]

logger = logging.getLogger(__name__)

MOST_OPEN_SPANS: Final = 100_000
"""Spans that began and have not ended; beyond this the oldest count as forgotten by whoever began them."""
_KEPT_AS: Final = "_agentlightning_processor"
_INSTALLING = threading.Lock()  # makes looking for a provider and installing one a single step


class RolloutSpanProcessor(SpanProcessor):
    """Finds the binding where a span begins, and hands the span to it when it ends, wherever that is."""

    def __init__(self) -> None:
        self._binding_by_span: dict[int, Binding] = {}
        self._has_warned = False

    def on_start(self, span: trace.Span, parent_context: Context | None = None) -> None:
        binding = self._binding_of_parent(span) or current_binding()
        if binding is None:
            binding = self._binding_without_context(span)
            if binding is None:
                return
        self._binding_by_span[span.get_span_context().span_id] = binding
        shipper = binding.shipper
        if shipper is not None and isinstance(span, LiveSpan):
            shipper.begin(binding, span)
        if len(self._binding_by_span) > MOST_OPEN_SPANS:
            self._forget_oldest()

    def on_end(self, span: ReadableSpan) -> None:
        context = span.context
        if context is None:
            return
        binding = self._binding_by_span.pop(context.span_id, None)
        if binding is None or not context.trace_flags.sampled:
            return
        binding.recorder.record(span)
        if binding.shipper is not None:
            binding.shipper.put(binding, span)

    def binding_of(self, span_id: int) -> Binding | None:
        """The binding of a span that has begun here and not ended."""
        return self._binding_by_span.get(span_id)

    def _binding_of_parent(self, span: trace.Span) -> Binding | None:
        """That of an open parent: what a rollout asks of a loop or thread that another one started is still its own."""
        parent = getattr(span, "parent", None)
        if parent is None or is_unobserved():
            return None
        return self._binding_by_span.get(parent.span_id)

    def _binding_without_context(self, span: trace.Span) -> Binding | None:
        """That of the only rollout there is."""
        if is_unobserved():
            return None
        binding = observations().sole_binding()
        if binding is None:
            self._warn_of_strays(span, observations().count)
        return binding

    def _warn_of_strays(self, span: trace.Span, count: int) -> None:
        if count > 1 and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "Span '%s' began in thread '%s', which inherited no context, while %d rollouts were running; "
                "such spans are left out. Start threads with contextvars.copy_context().run, or asyncio.to_thread.",
                getattr(span, "name", ""),
                threading.current_thread().name,
                count,
            )

    def _forget_oldest(self) -> None:
        with suppress(RuntimeError, KeyError, StopIteration):  # another thread changed it: it will be tried again
            oldest = next(iter(self._binding_by_span))
            self._binding_by_span.pop(oldest).recorder.losses.add("the span was never ended")


def provider_of_this_process() -> TracerProvider:
    """The SDK provider that is installed; ours is, if there was none."""
    with _INSTALLING:
        if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
            trace.set_tracer_provider(_our_provider())
    provider = trace.get_tracer_provider()
    if not isinstance(provider, TracerProvider):
        raise TracingError(
            f"The installed tracer provider is a {type(provider).__module__}.{type(provider).__qualname__}, to which "
            "no span processor can be added; install opentelemetry.sdk.trace.TracerProvider, or none."
        )
    return provider


def _our_provider() -> TracerProvider:
    """Every span is kept, and as many attributes as it has: a long conversation has more than the usual 128."""
    limits = SpanLimits()
    if not {OTEL_ATTRIBUTE_COUNT_LIMIT, OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT} & os.environ.keys():
        limits = SpanLimits(max_span_attributes=SpanLimits.UNSET)
    return TracerProvider(sampler=ALWAYS_ON, span_limits=limits, shutdown_on_exit=False)


def processor_on(provider: TracerProvider) -> RolloutSpanProcessor:
    """Our processor on a provider, which keeps it; it is added once."""
    with _INSTALLING:
        processor: RolloutSpanProcessor | None = vars(provider).get(_KEPT_AS)
        if processor is None:
            processor = vars(provider)[_KEPT_AS] = RolloutSpanProcessor()
            provider.add_span_processor(processor)
    return processor


def binding_of_open(span: trace.Span) -> Binding | None:
    """The binding of a span that has not ended; None if it belongs to no trace of ours, or its provider is another."""
    processor: RolloutSpanProcessor | None = getattr(trace.get_tracer_provider(), _KEPT_AS, None)
    return None if processor is None else processor.binding_of(span.get_span_context().span_id)
