"""HttpTrace: the HTTP calls of one trace, and the spans they are shown as."""

import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import SpanKind, Status, StatusCode

from agentlightning.instrumentation.http_clients import HttpCall
from agentlightning.tracer.binding import Recorder
from agentlightning.tracer.writing import nanoseconds
from agentlightning.types import Span, SpanCoreFields

__all__ = ["Entry", "HttpTrace", "HttpTraceOptions"]

OWN_HEADER: Final = "x-agentlightning-client"
"""Sent as `true` by our own clients."""
_FIRST_ERROR_STATUS: Final = 400
_NANOSECONDS_IN_MILLISECOND: Final = 1_000_000
_ZLIB_OR_GZIP: Final = 32 + zlib.MAX_WBITS

Entry = HttpCall | SpanCoreFields
"""What a trace holds: a call, or something that was emitted."""


@dataclass(frozen=True)
class HttpTraceOptions:
    """What the spans of a trace show."""

    headers: bool = False
    bodies: bool = False
    own_requests: bool = False
    """Whether requests of our own clients are shown."""


class HttpTrace(Recorder):
    """What one trace saw, in the order it began; an `HttpLog`.

    A call is written down when it begins, and its span made when the trace is read: a response may be read long after
    it came.
    """

    def __init__(self, name: str | None, options: HttpTraceOptions) -> None:
        super().__init__(name)
        self.options = options
        self._ids = RandomIdGenerator()
        self._trace_id = self._ids.generate_trace_id()
        self._entries: list[tuple[int, Entry]] = []  # with the id of the span

    @property
    def keeps_bodies(self) -> bool:
        return self.options.bodies

    def record_call(self, call: HttpCall) -> None:
        self._entries.append((self._ids.generate_span_id(), call))

    def record_emitted(self, core: SpanCoreFields) -> None:
        self._entries.append((self._ids.generate_span_id(), core))

    def entries(self) -> list[Entry]:
        """Everything the trace holds, to be carried to another process."""
        return [entry for _, entry in self._entries]

    def take_over(self, entries: Iterable[Entry]) -> None:
        """Add what the trace of another process held."""
        self._entries += [(self._ids.generate_span_id(), entry) for entry in entries]

    def spans(self) -> list[ReadableSpan]:
        return [self._span_of(span_id, entry) for span_id, entry in list(self._entries) if self._shows(entry)]

    def as_stored(self) -> list[Span]:
        """The spans as a store would have them, numbered from 1."""
        return [Span.from_opentelemetry(span, "", "", number) for number, span in enumerate(self.spans(), start=1)]

    def _shows(self, entry: Entry) -> bool:
        if self.options.own_requests or isinstance(entry, SpanCoreFields):
            return True
        return _headers(entry.request_headers).get(OWN_HEADER, "").lower() != "true"

    def _span_of(self, span_id: int, entry: Entry) -> ReadableSpan:
        sampled = trace.TraceFlags(trace.TraceFlags.SAMPLED)
        context = trace.SpanContext(self._trace_id, span_id, is_remote=False, trace_flags=sampled)
        if isinstance(entry, SpanCoreFields):
            return ReadableSpan(
                name=entry.name,
                context=context,
                resource=Resource.get_empty(),
                attributes=entry.attributes,
                status=Status(StatusCode[entry.status.status_code], entry.status.description),
                start_time=nanoseconds(entry.start_time),
                end_time=nanoseconds(entry.end_time),
            )
        return ReadableSpan(
            name=f"HTTP {entry.method} {entry.url}",
            context=context,
            resource=Resource.get_empty(),
            kind=SpanKind.CLIENT,
            attributes=self._attributes_of(entry),
            status=_status_of(entry),
            start_time=entry.started_ns,
            end_time=entry.last_seen_ns,
        )

    def _attributes_of(self, call: HttpCall) -> dict[str, Any]:
        address = urlsplit(call.url)
        attributes: dict[str, Any] = {
            "http.method": call.method,
            "http.url": call.url,
            "http.target": address.path or "/",
            "http.host": address.netloc,
            "http.duration_ms": (call.last_seen_ns - call.started_ns) / _NANOSECONDS_IN_MILLISECOND,
        }
        if call.status_code > 0:
            attributes["http.status_code"] = call.status_code
        for kind, pairs, chunks in (
            ("request", call.request_headers, call.request_chunks),
            ("response", call.response_headers, call.response_chunks),
        ):
            headers = _headers(pairs)
            if self.options.headers:
                attributes |= {f"http.{kind}.header.{name}": value for name, value in headers.items()}
            if self.options.bodies and chunks:
                attributes[f"http.{kind}.body"] = _body(b"".join(chunks), headers)
        return attributes


def _headers(pairs: list[tuple[str, str]]) -> dict[str, str]:
    """By name in small letters; the values of one that occurs several times are joined."""
    headers: dict[str, str] = {}
    for name, value in pairs:
        key = name.lower()
        headers[key] = f"{headers[key]}, {value}" if key in headers else value
    return headers


def _status_of(call: HttpCall) -> Status:
    if call.error is not None:
        return Status(StatusCode.ERROR, call.error)
    if call.status_code >= _FIRST_ERROR_STATUS:
        return Status(StatusCode.ERROR, f"HTTP {call.status_code}")
    return Status(StatusCode.UNSET)


# ---------------------------------------------------------------------- bodies


def _body(data: bytes, headers: dict[str, str]) -> str:
    """A body as text, without the transfer's framing and compression; bytes that are no text are shown as escapes."""
    if "chunked" in headers.get("transfer-encoding", "").lower():
        data = _without_frames(data)
    if headers.get("content-encoding", "").lower() in ("gzip", "x-gzip", "deflate"):
        data = _inflated(data)
    return data.decode("utf-8", errors="backslashreplace")


def _without_frames(data: bytes) -> bytes:
    """The content of HTTP chunks; as it is, where a library has taken it out of them before."""
    content, rest = [], data
    while rest:
        head, separator, rest = rest.partition(b"\r\n")
        try:
            size = int(head.split(b";")[0], 16)
        except ValueError:
            return data
        if not separator:
            return data
        if size == 0:
            break
        content.append(rest[:size])
        rest = rest[size + 2 :]
    return b"".join(content)


def _inflated(data: bytes) -> bytes:
    """What was compressed; as it is, where a library has inflated it before."""
    for window_bits in (_ZLIB_OR_GZIP, -zlib.MAX_WBITS):
        try:
            return zlib.decompressobj(window_bits).decompress(data)
        except zlib.error:
            continue
    return data
