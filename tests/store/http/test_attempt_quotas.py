"""A flood of spans meets the quota of its attempt, whichever way it comes, and the agent's own rollout goes on."""

import logging
from typing import Any

import aiohttp
import pytest

import agentlightning as agl
from agentlightning.errors import QuotaExceeded
from agentlightning.store import InMemoryLightningStore
from agentlightning.types import AttemptedRollout
from tests.store.http.conftest import call


def otlp(*rollouts: AttemptedRollout) -> dict[str, Any]:
    """A request with two spans of each attempt."""

    def span(rollout: AttemptedRollout, number: int) -> dict[str, Any]:
        ids = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
        named = [{"key": f"agentlightning.{key}", "value": {"stringValue": value}} for key, value in ids.items()]
        return {"traceId": "1" * 32, "spanId": f"{number:016x}", "name": "step", "attributes": named}

    spans = [span(rollout, number) for rollout in rollouts for number in (101, 102)]
    return {"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]}


@pytest.mark.parametrize("way", ["http", "ws", "rest", "otlp"])
async def test_spans_beyond_the_quota_are_answered_with_413(
    way: str, serve: Any, connect: Any, session: aiohttp.ClientSession, make_span: Any
) -> None:
    server = await serve(InMemoryLightningStore(max_attempt_spans=2))
    rollout = await server.start_rollout("a")
    await server.add_many_spans([make_span(rollout)])
    spans = [make_span(rollout), make_span(rollout)]

    if way in ("http", "ws"):
        with pytest.raises(QuotaExceeded, match="would exceed its quota of 2 spans"):
            await connect(server.endpoint, transport=way).add_many_spans(spans)
    else:
        rest = {"spans": [span.model_dump(mode="json") for span in spans]}
        path, body = ("/v1/agl/spans/batch", rest) if way == "rest" else ("/v1/traces", otlp(rollout))
        status, answer = await call(session, "POST", server, path, json=body)
        assert (status, answer["error_type"]) == (413, "QuotaExceeded")

    assert len(await server.query_spans(rollout.rollout_id)) == 1


async def test_one_attempt_beyond_its_quota_does_not_reject_the_spans_of_another(serve: Any, session: Any) -> None:
    server = await serve(InMemoryLightningStore(max_attempt_spans=3))
    full, other = await server.start_rollout("a"), await server.start_rollout("b")
    await call(session, "POST", server, "/v1/traces", json=otlp(full))

    spans = otlp(full, other)
    for number, span in enumerate(spans["resourceSpans"][0]["scopeSpans"][0]["spans"]):
        span["spanId"] = f"{number + 500:016x}"
    status, answer = await call(session, "POST", server, "/v1/traces", json=spans)

    assert (status, answer["partialSuccess"]["rejectedSpans"]) == (200, "2")
    assert "would exceed its quota" in answer["partialSuccess"]["errorMessage"]
    assert len(await server.query_spans(other.rollout_id)) == 2


async def test_an_agent_that_meets_its_quota_goes_on_and_few_lines_say_so(caplog: pytest.LogCaptureFixture) -> None:
    store = InMemoryLightningStore(max_attempt_spans=20)

    @agl.rollout
    async def chatty(task: str) -> float:
        for _ in range(40):
            agl.emit_message("again")
        return 1.0

    runner = agl.LitAgentRunner[Any](agl.OtelTracer())
    with caplog.at_level(logging.WARNING), runner.run_context(agent=chatty, store=store):
        await runner.step("a")

    (rollout,) = await store.query_rollouts(status_in=["succeeded"])
    assert isinstance(rollout, AttemptedRollout)
    lost = (rollout.attempt.metadata or {})["lost_spans"]
    assert (lost["count"] + len(await store.query_spans(rollout.rollout_id)), len(lost["reasons"])) == (41, 1)
    assert 1 <= sum("would exceed its quota" in record.getMessage() for record in caplog.records) <= 2
