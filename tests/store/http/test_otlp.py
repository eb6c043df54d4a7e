"""OTLP ingest: what becomes of exported spans, whose they are, and what a store makes of them."""

import base64
import copy
import json
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict, ParseDict
from opentelemetry import trace as otel
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from agentlightning.errors import StoreUnavailable
from agentlightning.store import InMemoryLightningStore, LightningStore, SqliteLightningStore
from agentlightning.store.http.otlp import JSON, PROTOBUF, RejectedSpans, encode_answer, ingest_traces, read_traces
from agentlightning.types import AttemptedRollout, Span

both_formats = pytest.mark.parametrize("media_type", [PROTOBUF, JSON])
OWNER_KEYS = ("agentlightning.rollout_id", "agentlightning.attempt_id")
SEQUENCE_KEY = "agentlightning.span_sequence_id"
OWNER = dict(zip(OWNER_KEYS, ("ro-1", "at-1"), strict=True))
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
SPAN_ID = "b7ad6b7169203331"
MAX_SPAN_BYTES = 20_000


# ---------------------------------------------------------------------- making requests


def recorded(record: Callable[[otel.Tracer], None], resource: dict[str, str] = OWNER) -> Sequence[ReadableSpan]:
    """The spans that the OpenTelemetry SDK hands to an exporter."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(resource=Resource(resource, schema_url="https://resource.example"))
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    record(provider.get_tracer("my.scope", "1.2", schema_url="https://scope.example", attributes={"part": "x"}))
    provider.shutdown()
    return exporter.get_finished_spans()


def exported(spans: Sequence[ReadableSpan], media_type: str) -> bytes:
    """The spans as OpenTelemetry's own exporter sends them."""
    message = encode_spans(spans)
    if media_type == PROTOBUF:
        return message.SerializeToString()
    return json.dumps(with_ids(MessageToDict(message), lambda text: base64.b64decode(text).hex())).encode()


def with_ids(request: dict[str, Any], convert: Callable[[str], str]) -> dict[str, Any]:
    """The request with other ids: OTLP JSON has them in hexadecimal, protobuf's own JSON in base64."""
    request = copy.deepcopy(request)
    spans = [span for r in request["resourceSpans"] for s in r["scopeSpans"] for span in s["spans"]]
    for holder in [*spans, *(link for span in spans for link in span.get("links", ()))]:
        for name in ("traceId", "spanId", "parentSpanId"):
            if name in holder:
                holder[name] = convert(holder[name])
    return request


def request_of(*spans: dict[str, Any], resource: dict[str, Any] = OWNER) -> dict[str, Any]:
    """A request in OTLP JSON; spans that lack ids or a name get some."""
    complete = [{"traceId": TRACE_ID, "spanId": f"{n:016x}", "name": f"span {n}"} | s for n, s in enumerate(spans, 1)]
    return {
        "resourceSpans": [
            {"resource": {"attributes": attributes_of(resource)}, "scopeSpans": [{"spans": complete}]},
        ]
    }


def attributes_of(values: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"key": key, "value": {"intValue": value} if isinstance(value, int) else {"stringValue": value}}
        for key, value in values.items()
    ]


def body_of(request: dict[str, Any], media_type: str) -> bytes:
    if media_type == JSON:
        return json.dumps(request).encode()
    in_base64 = with_ids(request, lambda text: base64.b64encode(bytes.fromhex(text)).decode())
    return ParseDict(in_base64, ExportTraceServiceRequest()).SerializeToString()


def owner_of(rollout: AttemptedRollout) -> dict[str, str]:
    return dict(zip(OWNER_KEYS, (rollout.rollout_id, rollout.attempt.attempt_id), strict=True))


def record_family(tracer: otel.Tracer) -> None:
    """A parent and a child with everything a span can have."""
    state = otel.TraceState([("vendor", "a:b"), ("other", "c")])
    sampled = otel.TraceFlags(otel.TraceFlags.SAMPLED)
    remote = otel.SpanContext(int(TRACE_ID, 16), int(SPAN_ID, 16), True, sampled, state)  # noqa: FBT003
    context = otel.set_span_in_context(otel.NonRecordingSpan(remote))
    with tracer.start_as_current_span("parent", context, kind=otel.SpanKind.SERVER) as parent:
        parent.set_status(otel.StatusCode.OK)
        links = [otel.Link(parent.get_span_context(), {"why": "test"}), otel.Link(remote)]
        with tracer.start_as_current_span("child", kind=otel.SpanKind.CLIENT, links=links) as child:
            child.set_attributes({"text": "ü", "yes": True, "n": -(2**62), "x": 0.5, "empty": ""})
            child.set_attributes({"ids": [0, 1, 2**40], "floats": [0.0, 1.5], "names": ["", "b"], "none": []})
            child.set_attributes({"flags": [True, False], "tokens": [7, 8, 9], "logprobs": [-0.5, -2.5]})
            child.add_event("tool", {"name": "search"})
            child.set_status(otel.Status(otel.StatusCode.ERROR, "it broke"))


# ---------------------------------------------------------------------- reading


@both_formats
def test_exported_span_is_what_the_direct_conversion_gives_with_kind_and_scope(media_type: str) -> None:
    family = recorded(record_family)

    read = read_traces(exported(family, media_type), media_type).spans

    assert [span.name for span in read] == ["parent", "child"]
    not_sent: Any = {"parent": {"trace_state"}, "links": {"__all__": {"context": {"trace_state"}}}}
    direct = [Span.from_opentelemetry(span, "ro-1", "at-1", 0) for span in reversed(family)]
    assert [span.model_dump(exclude=not_sent | {"kind": True, "instrumentation_scope": True}) for span in read] == [
        span.model_dump(exclude=not_sent) for span in direct
    ]
    scope = {"name": "my.scope", "version": "1.2", "schema_url": "https://scope.example", "attributes": {"part": "x"}}
    kept = [{"kind": kind, "instrumentation_scope": scope} for kind in ("SERVER", "CLIENT")]
    assert [span.model_extra for span in read] == kept


@both_formats
def test_spans_are_read_in_the_order_they_began(media_type: str) -> None:
    nanoseconds = (1_700_000_000_000_000_003, 1_700_000_000_000_000_001, 1_700_000_000_000_000_002)
    request = request_of(*({"startTimeUnixNano": str(n)} for n in nanoseconds))
    traces = read_traces(body_of(request, media_type), media_type)
    assert [span.name for span in traces.spans] == ["span 2", "span 3", "span 1"]


# ---------------------------------------------------------------------- whose span


@both_formats
def test_links_keep_their_trace_state(media_type: str) -> None:
    link = {"traceId": TRACE_ID, "spanId": SPAN_ID, "traceState": "vendor=a:b,other=c"}
    [span] = read_traces(body_of(request_of({"links": [link]}), media_type), media_type).spans
    assert span.links[0].context.trace_state == {"vendor": "a:b", "other": "c"}


@both_formats
def test_owner_on_the_span_wins_over_the_resource(media_type: str) -> None:
    own = {OWNER_KEYS[0]: "ro-2", OWNER_KEYS[1]: "at-2", SEQUENCE_KEY: 7}
    request = request_of({}, {"attributes": attributes_of(own)}, resource=OWNER | {SEQUENCE_KEY: 3})

    traces = read_traces(body_of(request, media_type), media_type)

    assert [(span.rollout_id, span.attempt_id, span.sequence_id) for span in traces.spans] == [
        ("ro-1", "at-1", 3),
        ("ro-2", "at-2", 7),
    ]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"attributes": attributes_of({OWNER_KEYS[0]: ""})}, "Span 'span 2': agentlightning.rollout_id is ''; "),
        ({"attributes": attributes_of({OWNER_KEYS[1]: 5})}, "attempt_id is 5"),
        ({"attributes": attributes_of({SEQUENCE_KEY: -1})}, "span_sequence_id is -1"),
        ({"attributes": attributes_of({SEQUENCE_KEY: 2**62})}, f"span_sequence_id is {2**62}"),
        ({"attributes": attributes_of({SEQUENCE_KEY: "first"})}, "span_sequence_id is 'first'"),
        ({"spanId": ""}, "span_id is missing"),
        ({"traceId": "0" * 32}, "trace_id is missing"),
        ({"traceId": "ab"}, "trace_id is 'ab'"),
        ({"parentSpanId": "ab"}, "parent_span_id is 'ab'"),
        ({"links": [{"traceId": TRACE_ID, "spanId": "ab"}]}, "span_id is 'ab'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@both_formats
def test_impossible_span_is_rejected_alone(media_type: str, changes: dict[str, Any], complaint: str) -> None:
    traces = read_traces(body_of(request_of({}, changes), media_type), media_type)

    assert [span.name for span in traces.spans] == ["span 1"]
    (reason,) = traces.reasons
    assert complaint in reason
    assert "; give " in reason or "; set " in reason


# ---------------------------------------------------------------------- adding


@pytest.fixture(params=["memory", "sqlite"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[LightningStore]:
    if request.param == "memory":
        yield InMemoryLightningStore(max_span_bytes=MAX_SPAN_BYTES)
        return
    async with SqliteLightningStore(tmp_path / "s.db", max_span_bytes=MAX_SPAN_BYTES) as opened:
        yield opened


async def ingest(store: LightningStore, *spans: dict[str, Any], resource: dict[str, Any]) -> RejectedSpans:
    return await ingest_traces(store, read_traces(body_of(request_of(*spans, resource=resource), JSON), JSON))


async def names_and_numbers(store: LightningStore, rollout: AttemptedRollout) -> list[tuple[str, int]]:
    return [(span.name, span.sequence_id) for span in await store.query_spans(rollout.rollout_id)]


@both_formats
async def test_real_export_arrives_in_the_store(store: LightningStore, media_type: str) -> None:
    rollout = await store.start_rollout("task")
    traces = read_traces(exported(recorded(record_family, owner_of(rollout)), media_type), media_type)

    assert await ingest_traces(store, traces) == RejectedSpans(0, "")

    kept = await store.query_spans(rollout.rollout_id, "latest")
    assert [span.model_copy(update={"sequence_id": 0}) for span in kept] == traces.spans
    assert [(span.name, span.sequence_id) for span in kept] == [("parent", 1), ("child", 2)]


async def test_missing_sequence_ids_follow_the_start_within_each_rollout(store: LightningStore) -> None:
    first, second = await store.start_rollout(1), await store.start_rollout(2)
    await store.get_next_span_sequence_id(first.rollout_id, first.attempt.attempt_id)
    of_second = attributes_of(owner_of(second))
    spans: list[dict[str, Any]] = [
        {"name": "c", "startTimeUnixNano": 30},
        {"name": "z", "startTimeUnixNano": 25, "attributes": of_second},
        {"name": "a", "startTimeUnixNano": 10},
        {"name": "given", "startTimeUnixNano": 20, "attributes": attributes_of({SEQUENCE_KEY: 9})},
        {"name": "y", "startTimeUnixNano": 5, "attributes": of_second},
    ]

    await ingest(store, *spans, resource=owner_of(first))

    assert await names_and_numbers(store, first) == [("a", 2), ("given", 9), ("c", 10)]
    assert await names_and_numbers(store, second) == [("y", 1), ("z", 2)]


async def test_repeated_export_changes_nothing(store: LightningStore) -> None:
    rollout = await store.start_rollout("task")
    await ingest(store, {}, {}, resource=owner_of(rollout))
    before = await store.query_spans(rollout.rollout_id)

    assert await ingest(store, {}, {}, {}, resource=owner_of(rollout)) == RejectedSpans(0, "")

    after = await store.query_spans(rollout.rollout_id)
    assert [span.name for span in after] == ["span 1", "span 2", "span 3"]
    assert after[:2] == before[:]


async def test_unknown_rollout_does_not_sink_the_others(store: LightningStore) -> None:
    rollout = await store.start_rollout("task")
    lost = [{"attributes": attributes_of({OWNER_KEYS[n]: "nowhere"})} for n in (0, 0, 1)]

    long = [{"attributes": attributes_of({OWNER_KEYS[0]: letter * 900})} for letter in "ab"]
    rejected = await ingest(store, *lost, {}, {}, *long, resource=owner_of(rollout))

    assert rejected.count == 5
    assert "nowhere" in rejected.message
    assert len(rejected.message) == 1000
    assert [span.name for span in await store.query_spans(rollout.rollout_id)] == ["span 4", "span 5"]


async def test_span_the_store_refuses_does_not_sink_its_attempt(store: LightningStore) -> None:
    rollout = await store.start_rollout("task")
    large = {"attributes": attributes_of({"text": "x" * MAX_SPAN_BYTES})}

    rejected = await ingest(store, {}, large, {}, resource=owner_of(rollout))

    assert rejected.count == 1
    assert "max_span_bytes" in rejected.message
    assert [span.name for span in await store.query_spans(rollout.rollout_id)] == ["span 1", "span 3"]


class Away(InMemoryLightningStore):
    async def add_many_spans(self, spans: Sequence[Span]) -> Sequence[Span | None]:
        raise StoreUnavailable("The store is away.")


async def test_store_that_is_away_is_not_a_rejection() -> None:
    with pytest.raises(StoreUnavailable):
        await ingest(Away(), {}, resource=OWNER)


# ---------------------------------------------------------------------- the answer


def test_partial_success_counts_and_explains() -> None:
    partial = ExportTraceServiceResponse.FromString(encode_answer(PROTOBUF, 3, "why")).partial_success
    in_json = json.loads(encode_answer(f"{JSON}; charset=utf-8", 3, "why"))
    assert (partial.rejected_spans, partial.error_message) == (3, "why")
    assert in_json == {"partialSuccess": {"rejectedSpans": "3", "errorMessage": "why"}}
