"""OtelTracer: records everything that is written with OpenTelemetry.

It needs no service and no network. The process has one provider: ours, unless the program installed its own, which
then gets our processor besides those it has.
"""

from contextlib import AbstractContextManager
from typing import Any

from agentlightning.instrumentation.registry import Instrumentation, instrumentation
from agentlightning.instrumentation.threads import ThreadContextPatch
from agentlightning.store.base import LightningStore
from agentlightning.tracer.binding import CARRIED
from agentlightning.tracer.processor import processor_on, provider_of_this_process
from agentlightning.tracer.recording import RecordingTracer
from agentlightning.tracer.writing import operation, write_span
from agentlightning.types import Attributes, SpanCoreFields, SpanRecordingContext, TraceStatus
from agentlightning.utils.once import once
from agentlightning.utils.otel import get_tracer

__all__ = ["OtelTracer"]


class OtelTracer(RecordingTracer):
    """Records emitted spans, the program's own OpenTelemetry spans and, with `instrument`, calls of known libraries."""

    uses_opentelemetry = True

    def __init__(self, *, instrument: bool = True) -> None:
        """Nothing is installed yet.

        Args:
            instrument: Apply `agentlightning.instrumentation.instrument_all` in each worker.
        """
        super().__init__()
        self.instrument = instrument
        self._applied: tuple[Instrumentation, ...] = ()

    def init(self, *args: Any, **kwargs: Any) -> None:
        """Load what workers will need, so that those that are forked share it."""
        super().init(*args, **kwargs)
        if self.instrument:
            instrumentation()

    def init_worker(self, worker_id: int, store: LightningStore | None = None, *args: Any, **kwargs: Any) -> None:
        """Find or install the provider, and listen to it; a second time is harmless."""
        super().init_worker(worker_id, store)
        processor_on(provider_of_this_process())
        if not self._applied:
            self._applied = (_thread_context(), instrumentation()) if self.instrument else (_thread_context(),)
            for patches in self._applied:
                patches.acquire()

    def teardown_worker(self, worker_id: int, *args: Any, **kwargs: Any) -> None:
        """The provider stays, because OpenTelemetry never lets go of one, and without a trace records nothing."""
        super().teardown_worker(worker_id)
        while self._applied:
            self._applied[-1].release()
            self._applied = self._applied[:-1]

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_applied": ()}

    def create_span(
        self,
        name: str,
        attributes: Attributes | None = None,
        timestamp: float | None = None,
        status: TraceStatus | None = None,
    ) -> SpanCoreFields:
        return write_span(get_tracer(), name, attributes, timestamp=timestamp, status=status)

    def operation_context(
        self,
        name: str,
        attributes: Attributes | None = None,
        start_time: float | None = None,
        end_time: float | None = None,
    ) -> AbstractContextManager[SpanRecordingContext]:
        return operation(get_tracer(), name, attributes, start_time=start_time, end_time=end_time)


@once
def _thread_context() -> Instrumentation:
    """One per process: every tracer wants the same."""
    return Instrumentation((ThreadContextPatch(CARRIED),))
