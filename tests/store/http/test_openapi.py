"""The description of the routes: committed, complete, and no request it permits makes the server fail."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest
import requests
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from agentlightning import errors
from agentlightning.store import LightningStore, LightningStoreServer, SqliteLightningStore
from agentlightning.store.http.app import NOT_SUPPORTED
from agentlightning.store.operations import operations_of

COMMITTED = Path(__file__).parents[3] / "docs" / "reference" / "openapi.json"
EXAMPLES = int(os.environ.get("AGL_TEST_OPENAPI_EXAMPLES", "2"))
"""Requests for each route; several hundred look more closely."""
LONGEST_WAIT_SECONDS = 0.01
KNOWN_FAILURES = {*errors.__all__, "MethodNotAllowed", "UnknownRoute"}
"""What a request may be refused with; any other name is an exception nobody expected, which travels as a 400."""

document = json.loads(COMMITTED.read_text(encoding="utf-8"))
routes = [f"{verb.upper()} {path}" for path, verbs in document["paths"].items() for verb in verbs]
tested = sorted(route for route in routes if not route.endswith(NOT_SUPPORTED))


@pytest.fixture(scope="module")
def operations() -> dict[str, Any]:
    """By the name of their route; schemathesis takes a second to be imported, which no other test needs."""
    import schemathesis

    return {found.ok().label: found.ok() for found in schemathesis.openapi.from_dict(document).get_all_operations()}


@pytest.fixture(scope="module")
def server() -> Any:
    """One that serves a database, which is less forgiving than memory."""
    store = SqliteLightningStore()
    started = LightningStoreServer(store, "127.0.0.1", 0)
    asyncio.run(started.start())
    yield started
    asyncio.run(started.stop())
    asyncio.run(store.close())


@pytest.fixture(scope="module")
def session() -> Any:
    with requests.Session() as opened:
        yield opened


async def test_committed_description_is_what_the_server_says(server: LightningStoreServer) -> None:
    answer = await asyncio.to_thread(requests.get, f"{server.endpoint}/openapi.json")
    assert answer.json() == document, "run `make reference`, and commit docs/reference"


def test_every_operation_is_described() -> None:
    described = {operation["summary"] for verbs in document["paths"].values() for operation in verbs.values()}

    assert described >= set(operations_of(LightningStore))


def test_every_route_has_a_name_of_its_own() -> None:
    names = [operation["operationId"] for verbs in document["paths"].values() for operation in verbs.values()]
    assert len(set(names)) == len(names)


def without_waiting(case: Any) -> Any:
    """The request, with any time it would wait cut short."""
    for part in (case.query, case.body):
        if isinstance(part, dict):
            for name in {"wait", "timeout"} & part.keys():
                part[name] = LONGEST_WAIT_SECONDS
    if case.operation.label.endswith("wait_for_rollouts") or case.path.endswith("/waits/rollouts"):
        case.body = {**case.body, "timeout": LONGEST_WAIT_SECONDS} if isinstance(case.body, dict) else case.body
    return case


@st.composite
def producible(draw: st.DrawFn, cases: st.SearchStrategy[Any]) -> Any:
    """Requests, without those that schemathesis finds it cannot make when it is about to."""
    from schemathesis.core.errors import UnsupportedSchema

    try:
        return draw(cases)
    except UnsupportedSchema:
        reject()


@pytest.mark.parametrize("label", tested)
def test_no_request_makes_the_server_fail(
    label: str, operations: dict[str, Any], server: LightningStoreServer, session: requests.Session
) -> None:
    from schemathesis import GenerationMode
    from schemathesis.checks import not_a_server_error

    operation = operations[label]
    modes = [producible(operation.as_strategy(mode)) for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)]

    @settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
    @given(st.one_of(modes))
    def send(case: Any) -> None:
        response = without_waiting(case).call(base_url=server.endpoint, session=session, timeout=10)
        case.validate_response(response, checks=[not_a_server_error])
        if response.status_code == 400:
            assert response.json()["error_type"] in KNOWN_FAILURES, response.text

    send()
