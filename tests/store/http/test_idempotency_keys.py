"""Idempotency keys over HTTP: every mutating route of both families acts once for requests that come twice."""

from typing import Any
from urllib.parse import quote

import aiohttp
import pytest
import yarl

from agentlightning.store import InMemoryLightningStore, LightningStoreServer
from agentlightning.store.base import LightningStore
from agentlightning.store.http.tokens import Scope, sign_token
from agentlightning.store.http.wire import WireRoute, routes
from agentlightning.store.operations import operations_of
from agentlightning.types import AttemptedRollout, EnqueueRolloutRequest


async def call(
    session: aiohttp.ClientSession, method: str, server: LightningStoreServer, path: str, **options: Any
) -> tuple[int, Any]:
    """One request; its status and its JSON."""
    async with session.request(method, yarl.URL(server.endpoint + path, encoded=True), **options) as response:
        return response.status, await response.json(content_type=None)


SECRET = "a-master-token-of-some-length"


class ForeignStore(LightningStore):
    """A store that keeps no answers itself."""

    def __init__(self) -> None:
        self._inner = InMemoryLightningStore()

    async def start_rollout(self, *args: Any, **options: Any) -> AttemptedRollout:
        return await self._inner.start_rollout(*args, **options)

    async def query_rollouts(self, *args: Any, **options: Any) -> Any:
        return await self._inner.query_rollouts(*args, **options)


def arguments_for(operation: str, rollout: Any, span: dict[str, Any]) -> dict[str, Any]:
    """A call of a mutating operation that succeeds."""
    owner = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
    resources = {"p": {"resource_type": "prompt_template", "template": "x", "engine": "f-string"}}
    known: dict[str, dict[str, Any]] = {
        "abandon_request": {"request_id": "nothing"},
        "forget_requests": {"request_ids": ["nothing"]},
        "enqueue_many_rollouts": {"rollouts": [{"input": 1}, {"input": 2}]},
        "dequeue_rollout": {},
        "dequeue_many_rollouts": {"limit": 2},
        "claim_rollouts": {"limit": 2, "known_resources": [["mine", 1]]},
        "return_claims": {"rollout_attempt_ids": [list(owner.values())]},
        "update_rollout": {"rollout_id": rollout.rollout_id, "metadata": {}},
        "start_attempt": {"rollout_id": rollout.rollout_id},
        "update_attempt": {**owner, "status": "running"},
        "finish_attempt": {**owner, "status": "succeeded", "spans": [span]},
        "finish_and_claim": {**owner, "status": "succeeded", "spans": [span], "worker_id": "w"},
        "add_span": {"span": span},
        "add_many_spans": {"spans": [span]},
        "add_open_spans": {"spans": [span]},
        "get_next_span_sequence_id": owner,
        "get_many_span_sequence_ids": {"rollout_attempt_ids": [list(owner.values())] * 2},
        "add_resources": {"resources": resources},
        "update_resources": {"resources_id": "mine", "resources": resources},
        "update_worker": {"worker_id": "w"},
        "mark_worker_lost": {"worker_id": "w", "reason": "it died"},
        "start_run": {"name": "r"},
        "finish_run": {"run_id": "run"},
        "add_metrics": {"run_id": "run", "step": 1, "values": {"loss": 0.5}},
    }
    return known.get(operation, {"input": 1})


def request_of(route: WireRoute, arguments: dict[str, Any]) -> dict[str, Any]:
    """The path and the body of a call."""
    left, body_name = dict(arguments), route.codec.op.route.body
    path = "/".join(quote(left.pop(s[1:-1]), safe="") if s.startswith("{") else s for s in route.segments)
    is_whole = body_name is not None and (not route.is_old or route.operation == "add_span")
    return {"method": route.verb, "path": path, "json": left[body_name or ""] if is_whole else left}


MUTATING = [route for route in routes() if route.codec.op.mutates]


@pytest.mark.parametrize("route", MUTATING, ids=lambda route: f"{route.verb} {route.path}")
async def test_request_sent_twice_under_one_key_acts_once(
    route: WireRoute, server: LightningStoreServer, session: aiohttp.ClientSession, make_span: Any
) -> None:
    rollout = await server.start_rollout("a")
    await server.start_run(run_id="run")
    await server.enqueue_many_rollouts([EnqueueRolloutRequest(input=n) for n in range(6)])
    request = request_of(route, arguments_for(route.operation, rollout, make_span(rollout).model_dump(mode="json")))
    method, path, body = request["method"], request["path"], request["json"]
    headers = {"Idempotency-Key": f"twice {route.path}"}

    first = await call(session, method, server, path, json=body, headers=headers)
    counts = await server.statistics()
    again = await call(session, method, server, path, json=body, headers=headers)

    assert first[0] == route.status
    assert again == first
    assert {**await server.statistics(), "uptime": 0} == {**counts, "uptime": 0}


def test_every_mutating_operation_has_a_route() -> None:
    declared = {name for name, op in operations_of(LightningStore).items() if op.mutates}

    assert {route.operation for route in MUTATING} == declared


async def test_one_key_for_two_operations_is_a_conflict(
    server: LightningStoreServer, session: aiohttp.ClientSession
) -> None:
    headers = {"Idempotency-Key": "two operations"}
    await call(session, "POST", server, "/v1/agl/runs", json={}, headers=headers)

    status, answer = await call(session, "POST", server, "/enqueue_rollout", json={"input": 1}, headers=headers)

    assert (status, answer["error_type"]) == (409, "RequestConflict")


def keyed(key: str, token: str) -> dict[str, str]:
    return {"Idempotency-Key": key, "Authorization": f"Bearer {token}"}


@pytest.mark.parametrize("is_foreign", [False, True], ids=["a store of ours", "a store of somebody else"])
@pytest.mark.parametrize("change", ["body", "token"])
async def test_a_key_belongs_to_its_body_and_to_the_scope_of_its_token(
    change: str, is_foreign: bool, serve: Any, session: aiohttp.ClientSession
) -> None:
    store: Any = ForeignStore() if is_foreign else InMemoryLightningStore()
    server = await serve(store, token=SECRET)
    runner = sign_token(SECRET, Scope("runner"), expires_at=None)
    first, other = {"worker_id": "w"}, {"worker_id": "v"} if change == "body" else {"worker_id": "w"}

    path = "/start_rollout"
    before = await call(session, "POST", server, path, json={"input": 1, **first}, headers=keyed("k", SECRET))
    token = runner if change == "token" else SECRET
    after = await call(session, "POST", server, path, json={"input": 1, **other}, headers=keyed("k", token))
    again = await call(session, "POST", server, path, json={"input": 1, **first}, headers=keyed("k", SECRET))

    assert (after[0], after[1]["error_type"]) == (409, "RequestConflict")
    assert again == before
    assert len(await server.query_rollouts()) == 1


@pytest.mark.parametrize("is_foreign", [False, True], ids=["a store of ours", "a store of somebody else"])
async def test_a_long_key_is_refused(is_foreign: bool, serve: Any, session: aiohttp.ClientSession) -> None:
    store: Any = ForeignStore() if is_foreign else InMemoryLightningStore()
    server = await serve(store)

    status, told = await call(
        session, "POST", server, "/start_rollout", json={"input": 1}, headers={"Idempotency-Key": "k" * 8000}
    )

    assert (status, told["error_type"]) == (400, "InvalidValue")
    assert len(told["detail"]) < 200
