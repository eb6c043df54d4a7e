"""One way for everything that is emitted: from a name and attributes to a finished span.

Under a tracer of ours that writes with OpenTelemetry, or with a provider of the program's own, the span is a child of
the current span. Other tracers of ours `create_span`. Where no tracer is active, `NoActiveTracer` is raised.
"""

import dataclasses
import logging
import os
from collections.abc import Callable, Mapping
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import PurePath
from typing import Any
from uuid import UUID

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan
from pydantic import BaseModel

from agentlightning.env_var import LightningEnvVar, resolve_bool_env_var
from agentlightning.instrumentation.otel_internals import events_of
from agentlightning.tracer.binding import Binding, binding_here, get_active_tracer
from agentlightning.tracer.dummy import DummyTracer
from agentlightning.tracer.otel import binding_of_open, private_tracer
from agentlightning.tracer.spans import core_fields_of, readable_span
from agentlightning.types import SpanCoreFields
from agentlightning.utils.otel import check_attributes_sanity, flatten_attributes

logger = logging.getLogger(__name__)

TracerSource = Callable[..., trace.Tracer]
"""`get_tracer`, as each emitter module imports it."""
_PLAIN = frozenset({str, bool, int, float, list, tuple})
_DEBUG = LightningEnvVar.AGL_EMITTER_DEBUG.value


class EmittedSpan(ReadableSpan):
    """A finished span, as OpenTelemetry has it; `core_fields` is the same in our own terms."""

    _binding: Binding | None = None

    @classmethod
    def of(cls, span: ReadableSpan, binding: Binding | None = None) -> "EmittedSpan":
        emitted = cls(
            name=span.name,
            context=span.get_span_context(),
            parent=span.parent,
            resource=span.resource,
            attributes=span.attributes,
            events=events_of(span),
            kind=span.kind,
            status=span.status,
            start_time=span.start_time,
            end_time=span.end_time,
            instrumentation_scope=span.instrumentation_scope,
        )
        emitted._binding = binding
        return emitted

    @property
    def rollout_id(self) -> str | None:
        """The rollout it belongs to; None outside of all."""
        return None if self._binding is None else self._binding.rollout_id or None

    @property
    def attempt_id(self) -> str | None:
        return None if self._binding is None else self._binding.attempt_id or None

    @property
    def sequence_id(self) -> int | None:
        """Its number in the store; None as long as a store of another process has not given it."""
        binding, context = self._binding, self.get_span_context()
        if binding is None or binding.shipper is None or context is None:
            return None
        if context.span_id not in binding.recorder.numbers:
            binding.shipper.number_waiting()
        return binding.recorder.numbers.get(context.span_id)

    @property
    def core_fields(self) -> SpanCoreFields:
        """Name, status, attributes and times, in seconds."""
        return core_fields_of(self)


def plain_value(value: Any) -> Any:
    """A value that JSON does not know, one step closer to what it knows; TypeError for other types.

    Made for `json.dumps(default=…)`, which looks at what is inside by itself.
    """
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, (date, time)):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, (set, frozenset)):
        try:
            return sorted(value)
        except TypeError:  # of several types
            return list(value)
    if isinstance(value, (PurePath, UUID, Decimal)):
        return str(value)
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"objects of type {type(value).__qualname__} cannot be written as JSON")


def _plain_attributes(value: object) -> Any:
    """Nested attributes with plain values; fields of a model that hold None are left out, as no attribute can.

    What is of no known type stays, for the check of the attributes to name it.
    """
    if isinstance(value, Mapping):
        return {key: _plain_attributes(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain_attributes(item) for item in value]
    if value is None or (isinstance(value, (str, int, float)) and not isinstance(value, Enum)):
        return value
    try:
        plain = plain_value(value)
    except TypeError:
        return value
    if isinstance(plain, dict):
        plain = {name: item for name, item in plain.items() if item is not None}
    return _plain_attributes(plain)


def user_attributes(attributes: Mapping[str, Any] | None) -> dict[str, Any]:
    """Attributes a caller wants on the span, flattened; ValueError for values a span cannot hold."""
    if not attributes:
        return {}
    flat = flatten_attributes(attributes)
    if not all(type(value) in _PLAIN for value in flat.values()):
        flat = flatten_attributes(_plain_attributes(attributes))
    check_attributes_sanity(flat)
    return flat


def emit(
    name: str,
    attributes: dict[str, Any],
    tracer_source: TracerSource,
    *,
    propagate: bool = True,
    exception: BaseException | None = None,
) -> EmittedSpan | None:
    """Write a span that begins and ends now; None if the provider's sampler left it out.

    Args:
        propagate: False makes the span without sending it anywhere.
        exception: Noted on the span as an event.
    """
    if _DEBUG in os.environ and resolve_bool_env_var(LightningEnvVar.AGL_EMITTER_DEBUG, fallback=False):
        logger.info("emitted %s %s", name, attributes)
    active = get_active_tracer()
    is_dummy = propagate and isinstance(active, DummyTracer)
    if propagate and active is not None and not active.uses_opentelemetry and not is_dummy:
        return EmittedSpan.of(readable_span(active.create_span(name, attributes)), binding_here())
    # Without arguments by default: programs and tests may have put their own `get_tracer` in place.
    source = private_tracer if is_dummy else tracer_source
    tracer = source() if propagate else tracer_source(use_active_span_processor=False)
    with tracer.start_span(name, attributes=attributes) as span:
        if exception is not None:
            span.record_exception(exception)
        binding = binding_here() if is_dummy else binding_of_open(span) if isinstance(span, ReadableSpan) else None
    return EmittedSpan.of(span, binding) if isinstance(span, ReadableSpan) else None
