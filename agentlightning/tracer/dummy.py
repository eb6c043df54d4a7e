"""DummyTracer: spans without a provider and without a store, for tests and for code that only emits."""

from opentelemetry import trace

from agentlightning.tracer.otel import private_tracer
from agentlightning.tracer.recording import RecordingTracer

__all__ = ["DummyTracer"]


class DummyTracer(RecordingTracer):
    """Records what is emitted, or begun with the trace itself, and nothing else; it installs and patches nothing.

    It is ready without `init_worker`. Inside a trace its spans are kept, and delivered if the trace is bound.
    """

    needs_init_worker = False

    def _otel_tracer(self) -> trace.Tracer:
        return private_tracer()
