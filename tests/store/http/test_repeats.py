"""Repeats over plain HTTP: every route of both families that takes ids of the caller's acts once for each of them."""

from typing import Any
from urllib.parse import quote

import aiohttp
import pytest
import yarl
from pydantic_core import to_jsonable_python

from agentlightning.store.http.routes import RestRoute, routes
from agentlightning.types import EnqueueRolloutRequest
from tests.contract.test_repeats import REPEATED
from tests.store.http.conftest import Serve

ROUTES = [route for route in routes() if route.operation in REPEATED]


def request_of(route: RestRoute, arguments: dict[str, Any]) -> dict[str, Any]:
    """A call as a request, with what stands neither in the path nor in the body in the query."""
    left = to_jsonable_python(arguments)
    path = "/".join(quote(left.pop(s[1:-1]), safe="") if s.startswith("{") else s for s in route.path.split("/"))
    if route.verb == "GET":
        return {"method": "GET", "path": path, "params": left}
    if route.body is not None:
        return {"method": "POST", "path": path, "json": left.pop(route.body), "params": left}
    return {"method": "POST", "path": path, "json": left}


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.verb} {route.path}")
async def test_request_sent_twice_with_the_same_ids_acts_once(
    route: RestRoute, serve: Serve, session: aiohttp.ClientSession
) -> None:
    server = await serve()
    held = await server.start_rollout("held", rollout_id="held")
    await server.start_run(run_id="run")
    await server.enqueue_many_rollouts([EnqueueRolloutRequest(input=n) for n in range(6)])
    ids = {"rollout_id": "held", "attempt_id": held.attempt.attempt_id}
    taken = {name: value for name, value in ids.items() if name in route.codec.op.signature.parameters}
    request = request_of(route, taken | REPEATED[route.operation])
    url = yarl.URL(server.endpoint + request.pop("path"), encoded=True)

    async def answer() -> tuple[int, str]:
        async with session.request(url=url, **request) as response:
            return response.status, await response.text()

    first = await answer()
    counts = await server.statistics()
    again = await answer()

    assert first[0] == route.status
    assert again == first
    assert {**await server.statistics(), "uptime": 0} == {**counts, "uptime": 0}
