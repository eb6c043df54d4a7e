"""Traces as the OpenTelemetry SDK's own exporter sends them, from a span to the store."""

import asyncio
import contextlib
import json
from collections.abc import Iterator
from typing import Any

import pytest
import requests
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from agentlightning.store import LightningStoreServer
from agentlightning.store.http.app import NOT_SUPPORTED
from agentlightning.store.http.tokens import Scope, sign_token
from agentlightning.types import AttemptedRollout

TOKEN = "a-secret-nobody-may-read"


@contextlib.contextmanager
def tracing(server: Any, rollout: AttemptedRollout, token: str | None, **options: Any) -> Iterator[Any]:
    """A tracer whose spans are exported to a server when the block ends."""
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    exporter = OTLPSpanExporter(server.otlp_traces_endpoint(), headers=headers, timeout=5, **options)
    owner = {
        "agentlightning.rollout_id": rollout.rollout_id,
        "agentlightning.attempt_id": rollout.attempt.attempt_id,
    }
    provider = TracerProvider(resource=Resource(owner), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    yield provider.get_tracer("test")
    provider.shutdown()


@pytest.mark.parametrize("compression", [Compression.NoCompression, Compression.Gzip], ids=str)
async def test_exported_spans_arrive_in_their_attempt(compression: Compression, serve: Any) -> None:
    server: LightningStoreServer = await serve(token=TOKEN)
    rollout = await server.start_rollout("a")

    def work() -> None:
        with tracing(server, rollout, TOKEN, compression=compression) as tracer:
            for n in range(50):
                with tracer.start_as_current_span(f"step {n}", attributes={"n": n, "text": "ü" * 100}):
                    pass

    await asyncio.to_thread(work)
    spans = await server.query_spans(rollout.rollout_id, "latest")

    assert [span.name for span in spans] == [f"step {n}" for n in range(50)]
    assert [span.sequence_id for span in spans] == list(range(1, 51))
    assert spans[7].attributes["n"] == 7
    assert (await server.get_rollout_by_id(rollout.rollout_id)).status == "running"  # type: ignore[union-attr]


@pytest.mark.parametrize("token", ["wrong", "other attempt", "own attempt", "runner", "reader"])
async def test_exporter_may_write_what_its_token_permits(
    token: str, serve: Any, caplog: pytest.LogCaptureFixture
) -> None:
    server: LightningStoreServer = await serve(token=TOKEN)
    rollout, other = await server.start_rollout("a"), await server.start_rollout("b")
    scopes = {
        "other attempt": Scope("attempt", other.rollout_id, other.attempt.attempt_id),
        "own attempt": Scope("attempt", rollout.rollout_id, rollout.attempt.attempt_id),
        "runner": Scope("runner"),
        "reader": Scope("reader"),
    }
    shown = sign_token(TOKEN, scopes[token], expires_at=None) if token in scopes else token

    def work() -> None:
        with tracing(server, rollout, shown) as tracer, tracer.start_as_current_span("step"):
            pass

    await asyncio.to_thread(work)

    assert len(await server.query_spans(rollout.rollout_id)) == (1 if token in ("own attempt", "runner") else 0)
    assert shown not in caplog.text


@pytest.mark.parametrize(
    ("body", "media_type", "expected"),
    [(b"{", "application/json", 400), (b"{}", "application/json; charset=utf-8", 200), (b"x", "text/plain", 400)],
)
async def test_body_that_is_no_trace_is_refused(
    body: bytes, media_type: str, expected: int, server: LightningStoreServer
) -> None:
    headers = {"Content-Type": media_type}
    answer = await asyncio.to_thread(requests.post, f"{server.endpoint}/v1/traces", data=body, headers=headers)
    assert answer.status_code == expected


async def test_spans_of_nobody_are_counted_as_rejected(server: LightningStoreServer) -> None:
    span = {"traceId": "0af7651916cd43dd8448eb211c80319c", "spanId": "b7ad6b7169203331", "name": "lost"}
    body = {"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]}

    answer = await asyncio.to_thread(requests.post, f"{server.endpoint}/v1/traces", json=body)

    assert answer.status_code == 200
    assert answer.json()["partialSuccess"]["rejectedSpans"] == "1"
    assert "agentlightning.rollout_id" in json.dumps(answer.json())


async def test_other_signals_are_not_taken(server: LightningStoreServer) -> None:
    for path in NOT_SUPPORTED:
        answer = await asyncio.to_thread(requests.post, server.endpoint + path, data=b"")
        assert (answer.status_code, answer.json()["error_type"]) == (501, "NotSupported")
