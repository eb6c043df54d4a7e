"""Helpers that scripts and tests of 0.3 import: they exist and behave."""

import gzip
import json
from typing import Any

import pytest
from fastapi import FastAPI, Request
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from starlette.testclient import TestClient

from agentlightning.llm_proxy import StreamConversionMiddleware
from agentlightning.store import InMemoryLightningStore, LightningStoreServer
from agentlightning.utils.otlp import PROTOBUF_CT, LightningStoreOTLPExporter, handle_otlp_export, spans_from_proto

EMPTY = b""
ANSWERS: dict[str, Any] = {
    "/v1/chat/completions": {
        "model": "m",
        "choices": [
            {
                "finish_reason": "tool_calls",
                "message": {
                    "role": "assistant",
                    "content": "hello",
                    "tool_calls": [{"id": "t1", "function": {"name": "add", "arguments": "{}"}}],
                },
            }
        ],
    },
    "/v1/messages": {
        "id": "m1",
        "role": "assistant",
        "content": [{"type": "text", "text": "hello"}, {"type": "tool_use", "id": "t1", "name": "add", "input": {}}],
        "stop_reason": "tool_use",
        "usage": {"input_tokens": 1, "output_tokens": 2},
    },
}


def whole_answers() -> FastAPI:
    """A server of models that cannot stream."""
    app = FastAPI()
    app.add_middleware(StreamConversionMiddleware)

    @app.post("/{path:path}")
    async def answer(path: str, request: Request) -> Any:
        assert (await request.json())["stream"] is False
        return ANSWERS[f"/{path}"]

    return app


def streamed(path: str, *, stream: bool = True) -> str:
    with TestClient(whole_answers()) as client:
        return client.post(path, json={"model": "m", "stream": stream}).text


def test_whole_chat_completion_is_streamed() -> None:
    *chunks, done = [line.removeprefix("data: ") for line in streamed("/v1/chat/completions").splitlines() if line]

    choices = [json.loads(chunk)["choices"][0] for chunk in chunks]
    deltas = [choice["delta"] for choice in choices]
    assert deltas[:2] == [{"role": "assistant"}, {"content": "hello"}]
    assert [delta["tool_calls"][0]["function"] for delta in deltas[2:4]] == [{"name": "add"}, {"arguments": "{}"}]
    assert [choice["finish_reason"] for choice in choices] == [None, None, None, None, "tool_calls"]
    assert done == "[DONE]"


def test_whole_message_is_streamed() -> None:
    events = [
        line.removeprefix("event: ") for line in streamed("/v1/messages").splitlines() if line.startswith("event")
    ]

    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert events == ["message_start", "ping", *block, *block, "message_delta", "message_stop"]


def test_request_for_a_whole_answer_is_passed_on() -> None:
    assert json.loads(streamed("/v1/messages", stream=False)) == ANSWERS["/v1/messages"]


def otlp_app(seen: list[Any]) -> FastAPI:
    app = FastAPI()

    async def note(message: Any) -> None:
        seen.append(message)

    @app.post("/v1/traces")
    async def traces(request: Request) -> Any:
        kinds = trace_service_pb2.ExportTraceServiceRequest, trace_service_pb2.ExportTraceServiceResponse
        return await handle_otlp_export(request, *kinds, note, "traces")

    return app


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (EMPTY, {"content-type": PROTOBUF_CT}, 200),
        (gzip.compress(EMPTY), {"content-type": PROTOBUF_CT, "content-encoding": "gzip"}, 200),
        (EMPTY, {"content-type": "application/json"}, 400),
        (b"\xff\xff", {"content-type": PROTOBUF_CT}, 400),
        (b"zz", {"content-type": PROTOBUF_CT, "content-encoding": "gzip"}, 400),
    ],
    ids=["plain", "gzip", "json", "broken", "broken-gzip"],
)
def test_otlp_request_is_read_and_answered(body: bytes, headers: dict[str, str], status: int) -> None:
    seen: list[Any] = []

    with TestClient(otlp_app(seen)) as client:
        answer = client.post("/v1/traces", content=body, headers=headers)

    assert (answer.status_code, len(seen)) == (status, int(status == 200))
    assert answer.headers["content-type"] == PROTOBUF_CT


async def test_exporter_sends_the_spans_of_an_attempt_to_a_store() -> None:
    store = InMemoryLightningStore()
    server = LightningStoreServer(store, "127.0.0.1", 0)
    await server.start()
    rollout = await store.start_rollout("task")
    exporter = LightningStoreOTLPExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("mine")

    tracer.start_span("dropped").end()
    exporter.enable_store_otlp(f"{server.endpoint}/v1/traces", rollout.rollout_id, rollout.attempt.attempt_id)
    tracer.start_span("kept").end()
    exporter.disable_store_otlp()
    tracer.start_span("dropped").end()

    assert [span.name for span in await store.query_spans(rollout.rollout_id)] == ["kept"]
    provider.shutdown()
    await server.stop()


async def test_spans_of_a_message_are_numbered_by_the_caller() -> None:
    message = trace_service_pb2.ExportTraceServiceRequest()
    resource_spans = message.resource_spans.add()
    for key, value in (("agentlightning.rollout_id", "r"), ("agentlightning.attempt_id", "a")):
        attribute = resource_spans.resource.attributes.add()
        attribute.key, attribute.value.string_value = key, value
    resource_spans.scope_spans.add().spans.add(name="step", trace_id=b"1" * 16, span_id=b"2" * 8)

    async def numbers(pairs: Any) -> list[int]:
        assert pairs == [("r", "a")]
        return [7]

    assert [(span.name, span.sequence_id) for span in await spans_from_proto(message, numbers)] == [("step", 7)]
