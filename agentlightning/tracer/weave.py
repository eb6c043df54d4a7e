"""WeaveTracer: for programs that use W&B Weave."""

import importlib.util
from collections.abc import Iterator
from typing import Any, Final

from agentlightning.instrumentation.registry import Instrumentation
from agentlightning.instrumentation.weave import weave_management
from agentlightning.semconv import LightningSpanAttributes
from agentlightning.tracer.otel import OtelTracer
from agentlightning.types import Span, TraceStatus
from agentlightning.utils.otel import flatten_attributes, sanitize_attributes

__all__ = ["WeaveTracer"]

_NAME: Final = LightningSpanAttributes.OPERATION_NAME.value
_INPUT: Final = LightningSpanAttributes.OPERATION_INPUT.value
_OUTPUT: Final = LightningSpanAttributes.OPERATION_OUTPUT.value


class WeaveTracer(OtelTracer):
    """Records the calls of Weave's ops, what is emitted, and what is written with OpenTelemetry.

    Weave's service is not used: ops are recorded without a login, and `weave.init` asks for none. A program that has
    called `weave.init` before `init_worker` keeps its client, and its service; its ops are recorded besides if
    `instrument` is true.
    """

    def __init__(
        self,
        *,
        instrument: bool = True,
        project_name: str | None = None,
        weave_user_settings: object = None,
        instrument_managed: bool = True,
    ) -> None:
        """ImportError if the package weave is missing.

        Args:
            instrument: Apply `agentlightning.instrumentation.instrument_all` in each worker.
            project_name: Accepted and ignored, as `weave_user_settings`: Weave's service is not used.
            instrument_managed: The older name of `instrument`; both must be true.
        """
        if importlib.util.find_spec("weave") is None:
            raise ImportError("WeaveTracer needs the package weave: pip install weave, or use OtelTracer.")
        super().__init__(instrument=instrument and instrument_managed)

    def _instrumentations(self) -> Iterator[Instrumentation]:
        yield from super()._instrumentations()
        yield weave_management()

    async def convert_call_to_span(
        self, call: Any, rollout_id: str | None = None, attempt_id: str | None = None, sequence_id: int | None = None
    ) -> Span:
        """A call that Weave has recorded (its `CallSchema`) as a span, named as its function."""
        values = {_NAME: call.op_name, **(call.attributes or {}), _INPUT: call.inputs, _OUTPUT: call.output}
        values |= call.summary or {}
        if call.exception:
            values["exception.message"] = call.exception
        given = {name: value for name, value in values.items() if value is not None}
        return Span.from_attributes(
            rollout_id=rollout_id or "rollout-dummy",
            attempt_id=attempt_id or "attempt-dummy",
            sequence_id=sequence_id or 0,
            trace_id=call.trace_id,
            span_id=call.id,
            parent_id=call.parent_id,
            name=call.op_name.rpartition("/")[2].partition(":")[0],
            attributes=sanitize_attributes(flatten_attributes(given)),
            start_time=call.started_at.timestamp(),
            end_time=None if call.ended_at is None else call.ended_at.timestamp(),
            status=TraceStatus(status_code="ERROR" if call.exception else "OK", description=call.exception),
        )
