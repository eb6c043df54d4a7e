"""The routes as any HTTP client meets them: paths, verbs, queries, bodies, answers."""

import logging
from typing import Any

import aiohttp
import pytest

from agentlightning.store import InMemoryLightningStore, LightningStoreServer, SqliteLightningStore
from tests.store.http.conftest import call

AWKWARD_IDS = ["a/b", "search", "latest", "attempts", "ünï→", "", "..", ".", "a b?c#d%2F&e=+", "'\"<>", "x" * 2000]


# ---------------------------------------------------------------------- paths


def escaped(identifier: str) -> str:
    """As a path segment in which no character stands for itself, so that none has a meaning."""
    return "".join(f"%{byte:02X}" for byte in identifier.encode())


@pytest.mark.parametrize("path", ["/v1/agl/workers/", "/v1/agl/rollouts/"])
async def test_any_id_can_stand_in_a_path(path: str, serve: Any, session: aiohttp.ClientSession) -> None:
    server = await serve()
    for identifier in AWKWARD_IDS:
        await server.enqueue_rollout("a", rollout_id=identifier)
        await server.update_worker(identifier)

        status, answer = await call(session, "GET", server, path + escaped(identifier))

        assert status == 200
        assert identifier in (answer.get("worker_id"), answer.get("rollout_id"))


@pytest.mark.parametrize("transport", ["http", "ws"])
async def test_client_can_name_any_id(transport: str, serve: Any, connect: Any) -> None:
    server = await serve()
    client = connect(server.endpoint, transport=transport)
    for identifier in AWKWARD_IDS:
        await server.enqueue_rollout("a", rollout_id=identifier)

        started = await client.start_attempt(identifier)
        found = await client.get_rollout_by_id(identifier)

        assert found.rollout_id == identifier
        assert await client.get_latest_attempt(identifier) == started.attempt


async def test_latest_attempt_can_be_updated_by_that_word(
    server: LightningStoreServer, session: aiohttp.ClientSession
) -> None:
    rollout_id = (await server.start_rollout("a")).rollout_id
    path = f"/v1/agl/rollouts/{rollout_id}/attempts/latest"
    status, answer = await call(session, "POST", server, path, json={"status": "succeeded"})

    assert (status, answer.get("status")) == (200, "succeeded")


async def test_unknown_route_is_not_found(server: LightningStoreServer, session: aiohttp.ClientSession) -> None:
    fetched = ("/nonsense", "/v1/agl/nonsense", "/v1/agl//rollouts", "/v1/AGL/statistics")
    for method, path in (
        *(("GET", each) for each in fetched),
        ("POST", "/v1/agl/rollouts/a/b/c/d"),
        ("POST", "/v1/agl"),
    ):
        status, answer = await call(session, method, server, path)
        assert (status, "detail" in answer) == (404, True), path


async def test_client_of_the_0_2_release_is_told_where_the_routes_are(
    server: LightningStoreServer, session: aiohttp.ClientSession
) -> None:
    for method, path in (("GET", "/dequeue_rollout"), ("POST", "/start_rollout"), ("GET", "/query_spans/ro-1")):
        status, answer = await call(session, method, server, path)
        assert (status, "under /v1/agl" in answer["detail"]) == (410, True), path


async def test_wrong_verb_is_told_the_right_ones(server: LightningStoreServer, session: aiohttp.ClientSession) -> None:
    for method, path, allowed in (
        ("GET", "/v1/agl/queues/rollouts/dequeue", {"POST"}),
        ("DELETE", "/v1/agl/rollouts/x", {"GET", "POST"}),
        ("PUT", "/health", {"GET"}),
        ("PATCH", "/v1/agl/statistics", {"GET"}),
    ):
        async with session.request(method, server.endpoint + path) as response:
            told = {verb.strip() for verb in response.headers.get("Allow", "").split(",")}

        assert (response.status, told) == (405, allowed), path


# ---------------------------------------------------------------------- queries


@pytest.mark.parametrize(
    ("path", "query"),
    [
        ("/v1/agl/rollouts", "status_in=queuing&status_in=running&sort_by=start_time&sort_order=desc"),
        ("/v1/agl/rollouts", "rollout_id_in=x&rollout_id_in=mine&limit=1"),
        ("/v1/agl/rollouts/mine/attempts", "limit=5"),
        ("/v1/agl/spans", "rollout_id=mine&attempt_id=latest&name_contains=st"),
        ("/v1/agl/workers", "status_in=idle&status_in=busy&limit=1"),
        ("/v1/agl/resources", "resources_id_contains=rs&limit=1"),
        ("/v1/agl/runs", "status_in=running&name=r"),
        ("/v1/agl/runs/r1/metrics", "names=loss&names=reward"),
    ],
)
async def test_searches_can_be_asked_with_get(
    path: str, query: str, serve: Any, session: aiohttp.ClientSession, make_span: Any
) -> None:
    server = await serve()
    await server.enqueue_rollout("a", rollout_id="mine")
    await server.add_span(make_span(await server.start_attempt("mine", worker_id="w")))
    await server.add_resources({"p": {"resource_type": "prompt_template", "template": "x", "engine": "f-string"}})  # type: ignore[dict-item]
    await server.start_run("r", run_id="r1")
    await server.add_metrics("r1", 1, {"loss": 0.5})

    status, page = await call(session, "GET", server, f"{path}?{query}")

    assert (status, len(page["items"]), page["total"]) == (200, 1, 1)


@pytest.mark.parametrize("query", ["limit=many", "offset=1.5", "sort_order=sideways", "sort_by=nothing", "limit=-7"])
async def test_query_that_makes_no_sense_is_refused(
    query: str, server: LightningStoreServer, session: aiohttp.ClientSession
) -> None:
    await server.enqueue_rollout("a")
    status, answer = await call(session, "GET", server, f"/v1/agl/rollouts?{query}")
    assert status in (400, 422)
    assert answer["error_type"] == "InvalidQuery"


@pytest.mark.parametrize("backend", [InMemoryLightningStore, SqliteLightningStore])
async def test_number_beyond_64_bits_is_refused_or_understood(
    backend: Any, serve: Any, session: aiohttp.ClientSession
) -> None:
    store = backend()
    server = await serve(store)
    queries = ("rollouts?limit={}", "rollouts?offset={}", "spans?rollout_id=a&limit={}", "notices?after=-{}")

    for query in queries:
        status, answer = await call(session, "GET", server, "/v1/agl/" + query.format(2**70))
        assert status == 200 or (status in (400, 422) and answer["error_type"] == "InvalidQuery"), query
    await store.close()


# ---------------------------------------------------------------------- bodies

BODIES: dict[str, tuple[str, bytes, int]] = {
    "garbage": ("/v1/agl/rollouts", b"\x00\xff not JSON", 400),
    "an array": ("/v1/agl/rollouts", b"[1]", 400),
    "a number": ("/v1/agl/queues/rollouts/enqueue-one", b"3", 400),
    "infinity": ("/v1/agl/queues/rollouts/enqueue-one", b'{"input": 1e999}', 400),
    "a number JSON readers change": (
        "/v1/agl/queues/rollouts/enqueue-one",
        b'{"input": 123456789012345678901234567890}',
        400,
    ),
    "no input": ("/v1/agl/rollouts", b"{}", 422),
    "no body": ("/v1/agl/rollouts", b"", 422),
    "wrong type": ("/v1/agl/rollouts", b'{"input": 1, "config": 7}', 422),
    "unknown name": ("/v1/agl/rollouts", b'{"input": 1, "inputt": 2}', 422),
    "not a span": ("/v1/agl/spans", b'{"name": "x"}', 422),
    "not spans": ("/v1/agl/spans/batch", b'{"spans": {"a": 1}}', 422),
    "null limit": ("/v1/agl/queues/rollouts/dequeue", b'{"limit": null}', 422),
}


@pytest.mark.parametrize("case", BODIES)
async def test_bad_body_is_refused(case: str, server: LightningStoreServer, session: aiohttp.ClientSession) -> None:
    path, body, expected = BODIES[case]

    status, answer = await call(session, "POST", server, path, data=body)

    assert status == expected
    assert answer["error_type"] == "InvalidValue"
    assert isinstance(answer["detail"], list if expected == 422 else str)


async def test_every_mistake_in_a_body_is_listed(server: LightningStoreServer, session: aiohttp.ClientSession) -> None:
    body = {"mode": 3, "config": {"max_attempts": "x"}, "worker_id": []}
    _, answer = await call(session, "POST", server, "/v1/agl/rollouts", json=body)
    places = {tuple(complaint["loc"]) for complaint in answer["detail"]}
    assert places >= {("input",), ("mode",), ("config", "max_attempts"), ("worker_id",)}


async def test_unexpected_exception_is_400_without_traceback(serve: Any, session: aiohttp.ClientSession) -> None:
    class Broken(InMemoryLightningStore):
        async def get_latest_resources(self) -> Any:
            raise ZeroDivisionError("by all things")

    status, answer = await call(session, "GET", await serve(Broken()), "/v1/agl/resources/latest")

    assert status == 400
    assert answer["error_type"] == "ZeroDivisionError"
    assert answer["detail"] == "by all things"
    assert set(answer) == {"detail", "error_type"}


# ---------------------------------------------------------------------- answers in short, and the log


async def test_echo_can_be_told_in_short(
    server: LightningStoreServer, session: aiohttp.ClientSession, make_span: Any
) -> None:
    span = make_span(await server.start_rollout("a")).model_dump(mode="json")

    one = await call(session, "POST", server, "/v1/agl/spans", json=span, headers={"Prefer": "return=minimal"})
    headers = {"Prefer": "respond-async, return=minimal"}
    many = await call(session, "POST", server, "/v1/agl/spans/batch", json={"spans": [span]}, headers=headers)

    assert one == (201, True)
    assert many == (201, [False])


def _lines(caplog: pytest.LogCaptureFixture, path: str) -> list[str]:
    """What was logged about a path; other requests of the module may be logged late."""
    return [record.getMessage() for record in caplog.records if path in record.getMessage()]


async def test_every_request_leaves_a_line_in_the_log(
    server: LightningStoreServer, session: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture, eventually: Any
) -> None:
    caplog.set_level(logging.DEBUG)

    await call(session, "GET", server, "/v1/agl/rollouts/x%0Ay?secret=1")
    await eventually(lambda: _lines(caplog, "rollouts/x"))  # written once the answer is on its way

    (line,) = _lines(caplog, "rollouts/x")
    assert line.startswith("127.0.0.1:")
    assert "'/v1/agl/rollouts/x\\ny' 200" in line
    assert line.endswith(" ms")
    assert "secret" not in line


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/agl/rollouts", rb'{"input": "\ud800"}'),
        ("/v1/agl/rollouts", rb'{"input": {"\ud800": 1}}'),
        ("/v1/agl/rollouts", rb'{"input": "\ud800", "metadata": {"n": 1234567890123456789}}'),
        ("/v1/agl/queues/rollouts/enqueue-one", rb'{"input": 1, "resources_id": "\udfff"}'),
        ("/v1/agl/rollouts/%ED%A0%80", b"{}"),
        ("/v1/traces", rb'{"resourceSpans": [{"scopeSpans": [{"spans": [{"name": "\ud800"}]}]}]}'),
    ],
    ids=["text", "key", "beside a long number", "id", "path", "OTLP"],
)
async def test_half_a_character_is_refused(
    path: str, body: bytes, server: LightningStoreServer, session: aiohttp.ClientSession
) -> None:
    headers = {"Content-Type": "application/json"}
    status, answer = await call(session, "POST", server, path, data=body, headers=headers)
    assert (status, answer["error_type"]) == (400, "InvalidValue")
