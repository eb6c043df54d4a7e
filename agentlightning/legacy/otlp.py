"""Reading and sending OTLP traces as helpers of 0.3 do: `agentlightning.utils.otlp` offers these names.

The store's own server reads OTLP by itself; these are for servers and exporters that users wrote.
"""

import gzip
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from google.protobuf.message import DecodeError, Message  # type: ignore[import-untyped] # protobuf has no types
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from starlette.requests import Request
from starlette.responses import Response

from agentlightning.asgi.compression import decompress
from agentlightning.errors import InvalidValue, PayloadTooLarge
from agentlightning.semconv import LightningResourceAttributes
from agentlightning.store.http.otlp import PROTOBUF, read_traces
from agentlightning.types import Span

__all__ = ["PROTOBUF_CT", "LightningStoreOTLPExporter", "handle_otlp_export", "spans_from_proto"]

PROTOBUF_CT = PROTOBUF
_LARGEST_BODY_BYTES = 64 * 1024**2
_BAD_REQUEST = 400


async def handle_otlp_export(
    request: Request,
    request_message_cls: type[Message],
    response_message_cls: type[Message],
    message_callback: Callable[[Any], Awaitable[None]] | None,
    signal_name: str,
) -> Response:
    """Read an OTLP request in protobuf, call back with its message, and answer.

    Args:
        signal_name: What is exported, for messages: "traces".
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip()
    if media_type != PROTOBUF_CT:
        return _refusal(f"Unsupported Content-Type '{media_type}', expected '{PROTOBUF_CT}'")
    body = await request.body()
    try:
        if request.headers.get("content-encoding") == "gzip":
            body = await decompress(body, _LARGEST_BODY_BYTES)
        message = request_message_cls.FromString(body)
    except (DecodeError, InvalidValue, PayloadTooLarge) as error:
        return _refusal(f"Unable to parse OTLP {signal_name} payload: {error}")
    if message_callback is not None:
        await message_callback(message)
    content, headers = response_message_cls().SerializeToString(), {}
    if "gzip" in request.headers.get("accept-encoding", ""):
        content, headers = gzip.compress(content), {"content-encoding": "gzip"}
    return Response(content, media_type=PROTOBUF_CT, headers=headers)


def _refusal(reason: str) -> Response:
    from google.rpc.status_pb2 import Status  # type: ignore[import-untyped] # comes with the exporter

    return Response(Status(message=reason).SerializeToString(), _BAD_REQUEST, media_type=PROTOBUF_CT)


async def spans_from_proto(
    request: Message, sequence_id_bulk_issuer: Callable[[Sequence[tuple[str, str]]], Awaitable[Sequence[int]]]
) -> list[Span]:
    """The spans of an ExportTraceServiceRequest that name their attempt; those without a number get one.

    Args:
        sequence_id_bulk_issuer: Numbers for pairs of rollout and attempt: `store.get_many_span_sequence_ids`.
    """
    spans = list(read_traces(request.SerializeToString(), PROTOBUF).spans)
    places = [place for place, span in enumerate(spans) if not span.sequence_id]
    numbers = await sequence_id_bulk_issuer([(spans[place].rollout_id, spans[place].attempt_id) for place in places])
    for place, number in zip(places, numbers, strict=True):
        spans[place] = spans[place].model_copy(update={"sequence_id": number})
    return spans


class LightningStoreOTLPExporter(OTLPSpanExporter):
    """Exports the spans of one attempt to a store; nothing is exported before `enable_store_otlp`."""

    def __init__(self, endpoint: str | None = None, **options: Any) -> None:
        """As OpenTelemetry's exporter; the options also count for the store."""
        super().__init__(endpoint, **options)
        self._options = options
        self._owner: tuple[str, str] | None = None
        self._to_store: OTLPSpanExporter | None = None

    @property
    def endpoint(self) -> str:
        """Where spans go."""
        return (self._to_store or self)._endpoint

    @property
    def rollout_id(self) -> str | None:
        return None if self._owner is None else self._owner[0]

    @property
    def attempt_id(self) -> str | None:
        return None if self._owner is None else self._owner[1]

    def enable_store_otlp(self, endpoint: str, rollout_id: str, attempt_id: str) -> None:
        """Send what follows to this endpoint of a store (`store.otlp_traces_endpoint()`), as spans of the attempt."""
        self.disable_store_otlp()
        self._owner, self._to_store = (rollout_id, attempt_id), OTLPSpanExporter(endpoint, **self._options)

    def disable_store_otlp(self) -> None:
        if self._to_store is not None:
            self._to_store.shutdown()  # type: ignore[no-untyped-call] # of OpenTelemetry
        self._owner = self._to_store = None

    def should_bypass(self) -> bool:
        """Whether spans of no attempt are dropped; override it to export them to the default endpoint."""
        return True

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        if self._owner is None or self._to_store is None:
            return SpanExportResult.SUCCESS if self.should_bypass() else super().export(spans)
        names = LightningResourceAttributes.ROLLOUT_ID.value, LightningResourceAttributes.ATTEMPT_ID.value
        owner = Resource(dict(zip(names, self._owner, strict=True)))
        return self._to_store.export([_owned(span, owner) for span in spans])

    def shutdown(self) -> None:
        self.disable_store_otlp()
        super().shutdown()  # type: ignore[no-untyped-call] # of OpenTelemetry


def _owned(span: ReadableSpan, owner: Resource) -> ReadableSpan:
    """The same span with the ids of its attempt in its resource."""
    return ReadableSpan(
        name=span.name,
        context=span.context,
        parent=span.parent,
        resource=span.resource.merge(owner),
        attributes=span.attributes,
        events=span.events,
        links=span.links,
        kind=span.kind,
        status=span.status,
        start_time=span.start_time,
        end_time=span.end_time,
        instrumentation_scope=span.instrumentation_scope,
    )
