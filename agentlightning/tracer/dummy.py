"""DummyTracer: spans without OpenTelemetry and without a store, for tests and for code that only wants to speak."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry.sdk.trace import ReadableSpan

from agentlightning.tracer.binding import current_binding, observations
from agentlightning.tracer.recording import RecordingTracer
from agentlightning.tracer.synthetic import SyntheticRecording, readable_span
from agentlightning.types import Attributes, SpanCoreFields, SpanRecordingContext, TraceStatus
from agentlightning.utils.otel import sanitize_attributes

__all__ = ["DummyTracer"]


class DummyTracer(RecordingTracer):
    """Records what is emitted and nothing else; it installs no provider and patches nothing.

    It is ready without `init_worker`. Inside a trace its spans are kept, and delivered if the trace is bound.
    """

    needs_init_worker = False

    def create_span(
        self,
        name: str,
        attributes: Attributes | None = None,
        timestamp: float | None = None,
        status: TraceStatus | None = None,
    ) -> SpanCoreFields:
        now = time.time() if timestamp is None else timestamp
        core = SpanCoreFields(
            name=name,
            status=status or TraceStatus(status_code="UNSET"),
            attributes=sanitize_attributes(attributes or {}),
            start_time=now,
            end_time=now,
        )
        self._keep(readable_span(core))
        return core

    def create_readable_span(self, name: str, attributes: Attributes | None = None) -> ReadableSpan:
        """As `create_span`, and gives the very span that is recorded."""
        now = time.time()
        unset = TraceStatus(status_code="UNSET")
        sane = sanitize_attributes(attributes or {})
        core = SpanCoreFields(name=name, status=unset, attributes=sane, start_time=now, end_time=now)
        span = readable_span(core)
        self._keep(span)
        return span

    @contextmanager
    def operation_context(
        self,
        name: str,
        attributes: Attributes | None = None,
        start_time: float | None = None,
        end_time: float | None = None,
    ) -> Iterator[SpanRecordingContext]:
        recording = SyntheticRecording(name, attributes or {}, time.time() if start_time is None else start_time)
        try:
            yield recording
        except BaseException as error:
            recording.record_exception(error)
            raise
        finally:
            recording.end(time.time() if end_time is None else end_time)
            self._keep(readable_span(recording.get_recorded_span()))

    def _keep(self, span: ReadableSpan) -> None:
        binding = current_binding() or observations().sole_binding()
        if binding is None or binding.tracer is not self:
            return
        binding.recorder.record(span)
        if binding.shipper is not None:
            binding.shipper.put(binding, span)
