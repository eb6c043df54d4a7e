"""The formats of OTLP: which values come through, what is tolerated, and that rubbish is refused and nothing worse."""

import asyncio
import copy
import json
import math
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue, KeyValueList

from agentlightning.errors import ConfigurationError, InvalidValue
from agentlightning.store import InMemoryLightningStore
from agentlightning.store.http.otlp import JSON, PROTOBUF, Traces, encode_answer, ingest_traces, read_traces
from agentlightning.types import AttributeValue

OWNER = {"agentlightning.rollout_id": "ro-1", "agentlightning.attempt_id": "at-1"}
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
SPAN_ID = "b7ad6b7169203331"


def json_body(**fields: Any) -> bytes:
    """One span in OTLP JSON."""
    span = {"traceId": TRACE_ID, "spanId": SPAN_ID, "name": "s"} | fields
    attributes = [{"key": key, "value": {"stringValue": value}} for key, value in OWNER.items()]
    scope_spans = [{"scope": {"name": "x"}, "spans": [span]}]
    return json.dumps({"resourceSpans": [{"resource": {"attributes": attributes}, "scopeSpans": scope_spans}]}).encode()


def protobuf_body(value: AnyValue) -> bytes:
    """One span with one attribute in protobuf."""
    request = ExportTraceServiceRequest()
    resource_spans = request.resource_spans.add()
    for key, text in OWNER.items():
        resource_spans.resource.attributes.add(key=key, value=AnyValue(string_value=text))
    span = resource_spans.scope_spans.add().spans.add(name="s")
    span.trace_id, span.span_id = bytes.fromhex(TRACE_ID), bytes.fromhex(SPAN_ID)
    span.attributes.add(key="a", value=value)
    return request.SerializeToString()


def attribute(value: Any) -> bytes:
    """One span with one attribute in OTLP JSON."""
    return json_body(attributes=[{"key": "a", "value": value}])


def read_attribute(body: bytes, media_type: str) -> AttributeValue | None:
    (span,) = read_traces(body, media_type).spans
    return span.attributes.get("a")


def array(*values: AnyValue) -> AnyValue:
    return AnyValue(array_value=ArrayValue(values=values))


def mapping(**values: AnyValue) -> AnyValue:
    pairs = [KeyValue(key=key, value=value) for key, value in values.items()]
    return AnyValue(kvlist_value=KeyValueList(values=pairs))


NULL, ONE, TEXT = AnyValue(), AnyValue(int_value=1), AnyValue(string_value="t")


# ---------------------------------------------------------------------- values


@pytest.mark.parametrize(
    ("protobuf", "in_json", "expected"),
    [
        (TEXT, {"stringValue": "t"}, "t"),
        (AnyValue(string_value=""), {"stringValue": ""}, ""),
        (AnyValue(bool_value=False), {"boolValue": False}, False),
        (AnyValue(int_value=-(2**63)), {"intValue": str(-(2**63))}, -(2**63)),
        (AnyValue(int_value=2**63 - 1), {"intValue": 2**63 - 1}, 2**63 - 1),
        (AnyValue(double_value=0.5), {"doubleValue": 0.5}, 0.5),
        (AnyValue(double_value=math.nan), {"doubleValue": "NaN"}, "NaN"),
        (AnyValue(double_value=-math.inf), {"doubleValue": "-Infinity"}, "-Infinity"),
        (AnyValue(bytes_value=b"\xff\x00\xfe"), {"bytesValue": "/wD+"}, "/wD+"),
        (NULL, {}, None),
        (array(), {"arrayValue": {}}, []),
        (array(ONE, ONE), {"arrayValue": {"values": [{"intValue": 1}, {"intValue": "1"}]}}, [1, 1]),
        (
            array(ONE, AnyValue(double_value=0.0)),
            {"arrayValue": {"values": [{"intValue": 1}, {"doubleValue": 0}]}},
            [1, 0.0],
        ),
        (array(TEXT, ONE), {"arrayValue": {"values": [{"stringValue": "t"}, {"intValue": 1}]}}, '["t",1]'),
        (array(ONE, NULL), {"arrayValue": {"values": [{"intValue": 1}, {}]}}, "[1,null]"),
        (
            array(AnyValue(double_value=math.inf), AnyValue(double_value=1)),
            {"arrayValue": {"values": [{"doubleValue": "Infinity"}, {"doubleValue": 1}]}},
            '["Infinity",1.0]',
        ),
        (array(array(ONE)), {"arrayValue": {"values": [{"arrayValue": {"values": [{"intValue": 1}]}}]}}, "[[1]]"),
        (mapping(), {"kvlistValue": {}}, "{}"),
        (
            mapping(k=ONE, b=AnyValue(bytes_value=b"x")),
            {
                "kvlistValue": {
                    "values": [{"key": "k", "value": {"intValue": 1}}, {"key": "b", "value": {"bytesValue": "eA=="}}]
                }
            },
            '{"k":1,"b":"eA=="}',
        ),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else "",
)
def test_value_is_the_same_from_both_formats(protobuf: AnyValue, in_json: Any, expected: Any) -> None:
    of_protobuf = read_attribute(protobuf_body(protobuf), PROTOBUF)
    of_json = read_attribute(attribute(in_json), JSON)
    assert of_protobuf == of_json == expected
    assert type(of_protobuf) is type(of_json) is type(expected)


@pytest.mark.parametrize(("kind", "code"), [(3, 2), ("SPAN_KIND_CLIENT", "STATUS_CODE_ERROR"), (3.0, "ERROR")])
def test_enumerations_are_numbers_or_names(kind: Any, code: Any) -> None:
    (span,) = read_traces(json_body(kind=kind, status={"code": code}), JSON).spans

    assert ((span.model_extra or {})["kind"], span.status.status_code) == ("CLIENT", "ERROR")
    for future in (99, -1, "SPAN_KIND_TELEPATH"):
        (span,) = read_traces(json_body(kind=future, status={"code": future}), JSON).spans
        assert ("kind" in (span.model_extra or {}), span.status.status_code) == (False, "UNSET")


@pytest.mark.parametrize("text", ["_-4", "_-4=", "/+4", "/+4="])
def test_bytes_in_any_base64_are_accepted(text: str) -> None:
    assert read_attribute(attribute({"bytesValue": text}), JSON) == "/+4="


@pytest.mark.parametrize("media_type", ["Application/JSON", "application/json; charset=utf-8", " application/json ;"])
def test_capitals_and_parameters_change_nothing(media_type: str) -> None:
    (span,) = read_traces(json_body(traceId=TRACE_ID.upper(), spanId=SPAN_ID.upper()), media_type).spans
    assert (span.trace_id, span.span_id) == (TRACE_ID, SPAN_ID)


def test_unknown_fields_and_nulls_are_tolerated() -> None:
    nulls = dict.fromkeys(["parentSpanId", "kind", "startTimeUnixNano", "attributes", "events", "links", "status"])
    (span,) = read_traces(json_body(future={"a": [1]}, flags=None, **nulls), JSON).spans
    assert (span.name, span.attributes, span.parent) == ("s", {}, None)


# ---------------------------------------------------------------------- refusals


WRONG_FIELDS: list[dict[str, Any]] = [
    *({"name": 5}, {"traceId": [1]}, {"kind": {}}, {"status": "OK"}, {"links": 1}),
    *({"startTimeUnixNano": value} for value in (-1, "soon", True)),
    *({"endTimeUnixNano": 1.5}, {"events": [{"timeUnixNano": "x"}]}),
    *({"attributes": pairs} for pairs in ({"a": 1}, ["a"], [{"key": 1}])),
]
WRONG_VALUES: list[Any] = [
    *(1, {"stringValue": 1}, {"boolValue": "true"}, {"intValue": str(2**63)}, {"intValue": "9" * 5000}),
    *({"doubleValue": "many"}, {"bytesValue": "a"}, {"bytesValue": "ä"}, {"arrayValue": [1]}),
    {"kvlistValue": {"values": 1}},
]


@pytest.mark.parametrize("body", [*(json_body(**each) for each in WRONG_FIELDS), *map(attribute, WRONG_VALUES)])
def test_span_of_wrong_shape_is_rejected_with_a_reason(body: bytes) -> None:
    traces = read_traces(body, JSON)

    assert traces.spans == []
    (reason,) = traces.reasons
    assert len(reason) < 300
    assert "; " in reason


@pytest.mark.parametrize("levels", [60, 70, 300])
def test_depth_of_a_value_has_an_end(levels: int) -> None:
    value: dict[str, Any] = {"intValue": 1}
    for _ in range(levels):
        value = {"arrayValue": {"values": [value]}}

    traces = read_traces(attribute(value), JSON)

    assert len(traces.spans) == (levels == 60)
    assert len(traces.reasons) == (levels != 60)


NOT_JSON = (
    *(b"", b"nonsense", b"[]", b"5", b"\xff", b'{"a": NaN}', b"[" * 100_000, b'{"resourceSpans": 5}'),
    *(b'{"resourceSpans": [5]}', b'{"resourceSpans": [null]}', b'{"resourceSpans": [{"resource": []}]}'),
    b'{"resourceSpans": [{"schemaUrl": "\\ud800"}]}',
)


def test_body_that_is_not_otlp_is_refused() -> None:
    for body in NOT_JSON:
        with pytest.raises(InvalidValue, match="; "):
            read_traces(body, JSON)
    for body in (b"nonsense", b"{}", b"\x1f\x8b\x08\x00", b"\x0a\xff"):
        with pytest.raises(InvalidValue, match="not an OTLP ExportTraceServiceRequest in protobuf"):
            read_traces(body, PROTOBUF)


@pytest.mark.parametrize("media_type", ["", "text/plain", "application/grpc"])
def test_other_media_types_are_refused_by_name(media_type: str) -> None:
    with pytest.raises(InvalidValue, match=f"Content type '{media_type}' is not OTLP"):
        read_traces(b"", media_type)


# ---------------------------------------------------------------------- without the package


@pytest.fixture
def _no_protobuf(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("opentelemetry.proto")]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "opentelemetry.proto", None)


@pytest.mark.usefixtures("_no_protobuf")
def test_protobuf_without_its_package_names_it() -> None:
    with pytest.raises(ConfigurationError, match="pip install opentelemetry-proto"):
        read_traces(b"", PROTOBUF)


@pytest.mark.usefixtures("_no_protobuf")
def test_json_needs_no_extra_package() -> None:
    assert read_attribute(attribute({"intValue": "1"}), JSON) == 1
    assert encode_answer(JSON, 0, "") == b"{}"


# ---------------------------------------------------------------------- rubbish

WHOLE: dict[str, Any] = json.loads(
    json_body(
        kind=3,
        parentSpanId=SPAN_ID,
        traceState="a=b",
        startTimeUnixNano="1700000000000000000",
        endTimeUnixNano=1700000000000000001,
        flags=256,
        attributes=[
            {"key": "text", "value": {"stringValue": "t"}},
            {"key": "number", "value": {"intValue": "5"}},
            {"key": "list", "value": {"arrayValue": {"values": [{"doubleValue": 0.5}, {"boolValue": True}]}}},
            {"key": "map", "value": {"kvlistValue": {"values": [{"key": "k", "value": {"bytesValue": "eA=="}}]}}},
        ],
        events=[{"name": "e", "timeUnixNano": 1, "attributes": []}],
        links=[{"traceId": TRACE_ID, "spanId": SPAN_ID, "attributes": []}],
        status={"code": 2, "message": "bad"},
    )
)

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every part of a JSON value but the whole."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield (*path, key)
        yield from places(value[key], (*path, key))


def changed(path: tuple[Any, ...], content: Any) -> dict[str, Any]:
    request: Any = copy.deepcopy(WHOLE)
    holder = request
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = content
    return dict(request)


def digest(body: bytes, media_type: str) -> None:
    """Read a body and give it to a store; refusals and rejections are fine."""

    async def ingest() -> None:
        store = InMemoryLightningStore()
        rollout = await store.start_rollout("task")
        traces = read_traces(body, media_type)
        owner = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
        spans = [span.model_copy(update=owner) for span in traces.spans]
        rejected = await ingest_traces(store, Traces(spans, traces.reasons))
        encode_answer(media_type, rejected.count, rejected.message)

    try:
        asyncio.run(ingest())
    except InvalidValue as error:
        assert len(str(error)) < 1000  # noqa: PT017 # any refusal is fine, but none may be boundless


@given(st.sampled_from(list(places(WHOLE))), anything)
def test_damaged_json_is_at_worst_refused(path: tuple[Any, ...], content: Any) -> None:
    digest(json.dumps(changed(path, content)).encode(), JSON)


@given(st.data())
def test_damaged_protobuf_is_at_worst_refused(data: st.DataObject) -> None:
    body = bytearray(protobuf_body(mapping(k=array(ONE, TEXT), b=AnyValue(double_value=0.5))))
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    digest(bytes(body[: data.draw(st.integers(len(body) // 2, len(body)))]), PROTOBUF)
