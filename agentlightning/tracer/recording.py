"""RecordingTracer: opens and closes traces, whatever records their spans."""

from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from agentlightning.errors import ConfigurationError, TracingError
from agentlightning.store.base import LightningStore
from agentlightning.tracer.base import Tracer
from agentlightning.tracer.binding import Binding, Losses, Recorder, observe
from agentlightning.tracer.spans import operation, write_span
from agentlightning.tracer.trace_shipper import TraceShipper, trace_shippers
from agentlightning.types import Attributes, Span, SpanCoreFields, SpanRecordingContext, TraceStatus
from agentlightning.utils.otel import get_tracer

if TYPE_CHECKING:
    from opentelemetry import trace
    from opentelemetry.sdk.trace import ReadableSpan

_LAST: ContextVar[Binding | None] = ContextVar("agentlightning_last_trace", default=None)
"""The trace that was opened last in this context; it stays when the trace is closed."""


@dataclass
class LastSpans:
    """Spans of a trace that has ended which are not in the store yet."""

    spans: list[Span] = field(default_factory=list)


class RecordingTracer(Tracer):
    """A tracer whose traces are recorded here and delivered to a store.

    Any number of traces may be open at once, one in each task or thread.
    """

    needs_init_worker: bool = True

    def __init__(self) -> None:
        super().__init__()
        self._is_ready = False
        self._last: Binding | None = None
        self._shippers: dict[int, TraceShipper] = {}

    def init_worker(self, worker_id: int, store: LightningStore | None = None, *args: object, **kwargs: object) -> None:
        super().init_worker(worker_id, store)
        self._is_ready = True
        if store is not None:
            self._shipper_to(store).start()

    def teardown_worker(self, worker_id: int, *args: object, **kwargs: object) -> None:
        """Let go of the stores; spans that end from now on are lost, and counted."""
        super().teardown_worker(worker_id)
        while self._shippers:
            trace_shippers().release(self._shippers.popitem()[1])
        self._is_ready = False

    # ------------------------------------------------------------------ traces

    @asynccontextmanager
    async def trace_context(
        self,
        name: str | None = None,
        *,
        store: LightningStore | None = None,
        rollout_id: str | None = None,
        attempt_id: str | None = None,
    ) -> AsyncIterator[Recorder]:
        binding = self._bind(name, store, rollout_id, attempt_id)
        try:
            with observe(binding):
                self._remember(binding)
                yield binding.recorder
        finally:
            if binding.shipper is not None:
                await binding.shipper.flush(binding)
            self._call_listeners(lambda: _as_spans(binding))

    @contextmanager
    def _trace_context_sync(
        self,
        name: str | None = None,
        *,
        store: LightningStore | None = None,
        rollout_id: str | None = None,
        attempt_id: str | None = None,
    ) -> Iterator[Recorder]:
        binding = self._bind(name, store, rollout_id, attempt_id)
        try:
            with observe(binding):
                self._remember(binding)
                yield binding.recorder
        finally:
            if binding.shipper is not None:
                binding.shipper.flush_blocking(binding)
            self._call_listeners(lambda: _as_spans(binding))

    @asynccontextmanager
    async def attempt_context(
        self, *, store: LightningStore, rollout_id: str, attempt_id: str
    ) -> AsyncIterator[LastSpans]:
        """As `trace_context`, but what is left of a short trace at its end is the caller's to store.

        For a runner, which writes the attempt's status together with its last spans.
        """
        binding, last = self._bind(rollout_id, store, rollout_id, attempt_id), LastSpans()
        try:
            with observe(binding):
                self._remember(binding)
                yield last
        finally:
            if binding.shipper is not None:
                rest = binding.shipper.withdraw(binding)
                if rest is None:
                    await binding.shipper.flush(binding)
                else:
                    last.spans = rest
            self._call_listeners(lambda: _as_spans(binding))

    def _remember(self, binding: Binding) -> None:
        self._last = binding
        _LAST.set(binding)

    def get_last_trace(self) -> "list[ReadableSpan]":
        return self._last_binding().recorder.spans()

    def get_last_losses(self) -> Losses:
        return self._last_binding().recorder.losses

    # ------------------------------------------------------------------ spans

    def _otel_tracer(self) -> "trace.Tracer":
        """Give the tracer with which spans are written."""
        return get_tracer()

    def create_span(
        self,
        name: str,
        attributes: Attributes | None = None,
        timestamp: float | None = None,
        status: TraceStatus | None = None,
    ) -> SpanCoreFields:
        return write_span(self._otel_tracer(), name, attributes, timestamp=timestamp, status=status)

    def operation_context(
        self,
        name: str,
        attributes: Attributes | None = None,
        start_time: float | None = None,
        end_time: float | None = None,
    ) -> AbstractContextManager[SpanRecordingContext]:
        return operation(self._otel_tracer(), name, attributes, start_time=start_time, end_time=end_time)

    # ------------------------------------------------------------------ bindings

    def _bind(
        self, name: str | None, store: LightningStore | None, rollout_id: str | None, attempt_id: str | None
    ) -> Binding:
        if self.needs_init_worker and not self._is_ready:
            raise TracingError(
                f"{type(self).__name__} is not initialised in this process; call init_worker(0) first, "
                "or use `with tracer.lifespan():`."
            )
        if rollout_id is None and attempt_id is None and store is None:
            return Binding(self, Recorder(name, self._otel_tracer), None, "", "")
        store = store if store is not None else self.store
        if store is None or rollout_id is None or attempt_id is None:
            given = {"store": store, "rollout_id": rollout_id, "attempt_id": attempt_id}
            missing = [f"{label} is missing" for label, value in given.items() if value is None]
            raise ConfigurationError(
                f"A trace needs store, rollout_id and attempt_id, or none of them; {' and '.join(missing)}."
            )
        shipper = self._shipper_to(store)
        binding = Binding(self, Recorder(name, self._otel_tracer), shipper, rollout_id, attempt_id)
        shipper.open(binding)
        return binding

    def _shipper_to(self, store: LightningStore) -> TraceShipper:
        shipper = self._shippers.get(id(store))
        if shipper is None:
            shipper = trace_shippers().acquire(store)
            if self._shippers.setdefault(id(store), shipper) is not shipper:  # another thread was faster
                trace_shippers().release(shipper)
        return self._shippers[id(store)]

    def _last_binding(self) -> Binding:
        here = _LAST.get()
        last = here if here is not None and here.tracer is self else self._last
        if last is None:
            raise TracingError(f"{type(self).__name__} has recorded nothing yet; open a trace_context first.")
        return last

    def __getstate__(self) -> dict[str, object]:
        """A tracer travels to another process as it was before `init_worker`."""
        return {**self.__dict__, "store": None, "_is_ready": False, "_last": None, "_shippers": {}}


def _as_spans(binding: Binding) -> list[Span]:
    """The trace as the store would have it, numbered from 1."""
    ids, spans = (binding.rollout_id, binding.attempt_id), binding.recorder.spans()
    return [Span.from_opentelemetry(span, *ids, number) for number, span in enumerate(spans, start=1)]
