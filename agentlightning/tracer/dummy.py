"""DummyTracer: spans without OpenTelemetry and without a store, for tests and for code that only emits."""

from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry.sdk.trace import ReadableSpan

from agentlightning.tracer.binding import binding_here
from agentlightning.tracer.recording import RecordingTracer
from agentlightning.tracer.spans import SyntheticRecording, readable_span
from agentlightning.types import Attributes, SpanCoreFields, SpanRecordingContext, TraceStatus

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
        recording = SyntheticRecording(name, attributes or {}, timestamp, status)
        core = recording.end(recording.get_recorded_span().start_time)
        self._keep(readable_span(core))
        return core

    def create_readable_span(self, name: str, attributes: Attributes | None = None) -> ReadableSpan:
        """As `create_span`, and gives the very span that is recorded."""
        span = readable_span(SyntheticRecording(name, attributes or {}).end())
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
        recording = SyntheticRecording(name, attributes or {}, start_time)
        try:
            yield recording
        except BaseException as error:
            recording.record_exception(error)
            raise
        finally:
            self._keep(readable_span(recording.end(end_time)))

    def _keep(self, span: ReadableSpan) -> None:
        if (binding := binding_here()) is not None and binding.tracer is self:
            binding.finish(span)
