"""What an attempt's token may still do when the attempt is over, and what becomes of it."""

import json
import time
from typing import Any

import aiohttp
import pytest

from agentlightning.errors import InvalidToken
from agentlightning.semconv import AGL_LATE
from agentlightning.store import InMemoryLightningStore, SqliteLightningStore
from agentlightning.store.http.tokens import sign_for_attempt
from agentlightning.types import AttemptedRollout

TOKEN = "secret"  # of this test's own server


def otlp(rollout: AttemptedRollout, **values: Any) -> dict[str, Any]:
    """A request with one span."""
    ids = {"agentlightning.rollout_id": rollout.rollout_id, "agentlightning.attempt_id": rollout.attempt.attempt_id}
    named = [{"key": key, "value": {"stringValue": value}} for key, value in ids.items()]
    named += [{"key": key, "value": {"doubleValue": value}} for key, value in values.items()]
    span = {"traceId": "1" * 32, "spanId": "2" * 16, "name": "agentlightning.reward", "attributes": named}
    return {"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]}


@pytest.mark.parametrize("end", ["succeeded", "failed", "cancelled", "followed"])
@pytest.mark.parametrize(("seconds_ago", "is_valid"), [(30, True), (61, False)])
@pytest.mark.parametrize("transport", ["http", "ws", "otlp"])
async def test_a_token_ends_a_minute_after_its_attempt(
    transport: str, seconds_ago: int, is_valid: bool, end: Any, serve: Any, connect: Any, make_span: Any, session: Any
) -> None:
    server = await serve(InMemoryLightningStore(clock=lambda: time.time() - seconds_ago), token=TOKEN)
    rollout = await server.start_rollout("a")
    token = sign_for_attempt(TOKEN, rollout.rollout_id, rollout.attempt.attempt_id)
    if end == "cancelled":
        await server.update_rollout(rollout.rollout_id, status=end)
    elif end == "followed":
        await server.start_attempt(rollout.rollout_id)
    else:
        await server.update_attempt(rollout.rollout_id, rollout.attempt.attempt_id, status=end)

    if transport == "otlp":
        headers = {"Authorization": f"Bearer {token}"}
        async with session.post(f"{server.endpoint}/v1/traces", json=otlp(rollout), headers=headers) as answer:
            assert (answer.status, "60 seconds after" in await answer.text()) == (
                (200, False) if is_valid else (401, True)
            )
    elif is_valid:
        await connect(server.endpoint, token=token, transport=transport).add_span(make_span(rollout))
    else:
        with pytest.raises(InvalidToken, match="ended 1 seconds ago, 60 seconds after the attempt"):
            await connect(server.endpoint, token=token, transport=transport).add_span(make_span(rollout))

    assert len(await server.query_spans(rollout.rollout_id)) == is_valid


async def test_the_store_is_asked_once_for_many_batches_of_an_attempt_that_runs(
    serve: Any, connect: Any, make_span: Any
) -> None:
    class Counting(InMemoryLightningStore):
        asked = 0

        async def query_attempts(self, *args: Any, **kwargs: Any) -> Any:
            self.asked += 1
            return await super().query_attempts(*args, **kwargs)

    store = Counting()
    server = await serve(store, token=TOKEN)
    rollout = await server.start_rollout("a")
    client = connect(server.endpoint, token=sign_for_attempt(TOKEN, rollout.rollout_id, rollout.attempt.attempt_id))

    for _ in range(20):
        await client.add_many_spans([make_span(rollout)])

    assert store.asked == 1


@pytest.mark.parametrize("backend", ["memory", "sqlite"])
async def test_a_late_reward_by_otlp_changes_nothing(
    backend: str, serve: Any, session: aiohttp.ClientSession, tmp_path: Any
) -> None:
    store = InMemoryLightningStore() if backend == "memory" else SqliteLightningStore(tmp_path / "store.db")
    server = await serve(store, token=TOKEN)
    rollout = await server.start_rollout("a")
    token = sign_for_attempt(TOKEN, rollout.rollout_id, rollout.attempt.attempt_id)
    await server.update_attempt(rollout.rollout_id, "latest", status="failed")

    body = json.dumps(otlp(rollout, reward=77.0, **{AGL_LATE: 0.0}))
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    async with session.post(f"{server.endpoint}/v1/traces", data=body, headers=headers) as answer:
        assert answer.status == 200

    assert (await server.get_rollout_by_id(rollout.rollout_id)).reward is None
    (span,) = await server.query_spans(rollout.rollout_id)
    assert (span.attributes["reward"], span.attributes[AGL_LATE]) == (77.0, True)
    await store.close()
