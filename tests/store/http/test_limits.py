"""What a request may cost: size, time and compression, on the way in and on the way out."""

import asyncio
import gzip
import zlib
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import requests

from agentlightning.store import LightningStoreServer
from agentlightning.store.http import rest, service
from agentlightning.store.http.tokens import Scope, sign_token
from agentlightning.types import EnqueueRolloutRequest
from agentlightning.utils.deadline import until
from tests.store.http.conftest import call

MEGABYTE = 1024 * 1024
TOKEN = "a-token-of-the-operator-0123456789"


async def in_pieces(total: int) -> AsyncIterator[bytes]:
    for _ in range(total // 10_000):
        yield b" " * 10_000


@pytest.mark.parametrize("is_announced", [True, False], ids=["announced", "chunked"])
async def test_too_large_body_is_refused(is_announced: bool, serve: Any, session: aiohttp.ClientSession) -> None:
    server = await serve(max_request_bytes=100_000)
    body: Any = b" " * 200_000 if is_announced else in_pieces(200_000)

    status, answer = await call(session, "POST", server, "/v1/agl/rollouts", data=body)

    assert (status, answer["error_type"]) == (413, "PayloadTooLarge")
    assert (await call(session, "GET", server, "/health"))[0] == 200


async def test_refused_upload_hears_why_though_it_is_still_sending(serve: Any) -> None:
    server = await serve(max_request_bytes=MEGABYTE)
    answer = await asyncio.to_thread(requests.post, f"{server.endpoint}/v1/agl/spans", data=b" " * 10 * MEGABYTE)
    assert answer.status_code == 413


GZIP_BODIES = {
    "bomb": (gzip.compress(b" " * 20 * MEGABYTE, compresslevel=1), "gzip", 413),
    "garbage behind": (gzip.compress(b'{"input": 1}') + b"garbage", "gzip", 400),
    "two members": (gzip.compress(b'{"input"') + gzip.compress(b": 1}"), "GZip", 201),
    "not declared": (gzip.compress(b'{"input": 1}'), "identity", 400),
    "unknown": (b'{"input": 1}', "br", 400),
}


@pytest.mark.parametrize("case", GZIP_BODIES)
async def test_gzip_body(case: str, serve: Any, session: aiohttp.ClientSession) -> None:
    server = await serve(max_request_bytes=MEGABYTE)
    body, encoding, expected = GZIP_BODIES[case]

    headers = {"Content-Encoding": encoding}
    status, _ = await call(session, "POST", server, "/v1/agl/rollouts", data=body, headers=headers)

    assert status == expected


@pytest.mark.parametrize(
    ("size", "accepted", "is_compressed"),
    [
        (3000, "gzip, deflate", True),
        (10, "gzip", False),
        (3000, "", False),
        (3000, "identity, gzip;q=0", False),
    ],
)
async def test_answers_are_compressed_where_it_pays_and_is_wanted(
    size: int, accepted: str, is_compressed: bool, server: LightningStoreServer, session: aiohttp.ClientSession
) -> None:
    await server.enqueue_rollout("x" * size, rollout_id=f"r-{size}")
    url, headers = f"{server.endpoint}/v1/agl/rollouts/r-{size}", {"Accept-Encoding": accepted}

    async with session.get(url, headers=headers) as response:
        body = await response.read()

    assert (response.headers.get("Content-Encoding") == "gzip") is is_compressed
    plain = zlib.decompress(body, wbits=31) if is_compressed else body
    assert plain.count(b"x") >= size


async def test_slow_body_is_given_up_and_the_connection_closed(serve: Any) -> None:
    server = await serve()
    server.app.service.body_timeout_seconds = 0.05
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"POST /v1/agl/spans HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")

    answer = await asyncio.wait_for(reader.read(), 30)
    writer.close()

    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"RequestTimeout" in answer


# ---------------------------------------------------------------------- under attack


@pytest.mark.parametrize(
    ("path", "scope", "length", "expected"),
    [
        ("/v1/agl/queues/rollouts/enqueue", Scope("attempt", "r", "a"), 1000, b"403"),
        ("/v1/agl/queues/rollouts/enqueue", Scope("runner"), 1000, b"403"),
        ("/v1/traces", Scope("reader"), 1000, b"403"),
        ("/v1/agl/spans", Scope("attempt", "r", "a"), 9 * MEGABYTE, b"413"),
        ("/v1/agl/spans", Scope("runner"), 9 * MEGABYTE, b"413"),
        ("/v1/agl/spans", Scope("admin"), 65 * MEGABYTE, b"413"),
    ],
    ids=["attempt", "runner", "reader", "large of an attempt", "large of a runner", "too large"],
)
async def test_refusal_comes_before_the_body(path: str, scope: Scope, length: int, expected: bytes, serve: Any) -> None:
    server = await serve(token=TOKEN)
    token = TOKEN if scope.kind == "admin" else sign_token(TOKEN, scope, expires_at=None)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)

    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\nContent-Length: {length}"
    writer.write(head.encode() + b"\r\n\r\n")
    answer = await asyncio.wait_for(reader.readline(), 30)
    writer.close()

    assert answer.split(b" ")[1] == expected


BAD_BODIES = {
    "many rollouts": (b'{"rollouts": [' + b'{"input":1},' * 10_001 + b'{"input":1}]}', 413),
    "100,000 levels": (b'{"input": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400),
    "long id": (b'{"input": 1, "rollout_id": "' + b"x" * 2049 + b'"}', 400),
}


@pytest.mark.parametrize("case", BAD_BODIES)
async def test_body_that_costs_too_much_is_refused_in_words(
    case: str, server: LightningStoreServer, session: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture
) -> None:
    body, expected = BAD_BODIES[case]
    path = "/v1/agl/queues/rollouts/enqueue" + ("" if b"rollouts" in body else "-one")

    status, answer = await call(session, "POST", server, path, data=body)

    assert status == expected
    assert answer["error_type"] in ("PayloadTooLarge", "InvalidValue")
    assert not [record for record in caplog.records if record.exc_info]


async def test_client_sends_what_is_too_much_for_one_call_in_parts(
    serve: Any, connect: Any, session: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "MOST_ITEMS", 3)
    monkeypatch.setattr(rest, "DEFAULT_QUERY_LIMIT", 4)
    server = await serve()
    client = connect(server.endpoint)

    enqueued = await client.enqueue_many_rollouts([EnqueueRolloutRequest(input=n) for n in range(10)])

    assert [rollout.input for rollout in enqueued] == list(range(10))
    assert [rollout.input for rollout in await client.query_rollouts()] == list(range(10))
    _, page = await call(session, "GET", server, "/v1/agl/rollouts")
    assert (len(page["items"]), page["limit"], page["total"]) == (4, 4, 10)
    _, page = await call(session, "GET", server, "/v1/agl/rollouts?limit=-1")
    assert (len(page["items"]), page["limit"]) == (10, -1)


async def test_long_answer_is_whole(serve: Any) -> None:
    server = await serve()
    inputs = ["x" * size for size in (10, 300_000, 5, 200_000, 1)] + [n * "y" for n in range(3000)]
    await server.enqueue_many_rollouts([EnqueueRolloutRequest(input=each) for each in inputs])

    for encoding in ("gzip", "identity"):
        async with aiohttp.ClientSession(headers={"Accept-Encoding": encoding}) as session:
            _, page = await call(session, "GET", server, "/v1/agl/rollouts")
        assert [item["input"] for item in page["items"]] == inputs


@pytest.mark.parametrize("transport", ["http", "ws"])
async def test_answers_to_queries_wait_for_memory(transport: Any, serve: Any, connect: Any) -> None:
    server = await serve()
    answers = server.app.service.answers
    async with answers.room_for("all of it"):
        querying = asyncio.create_task(connect(server.endpoint, transport=transport).query_rollouts())
        assert await until(lambda: bool(answers._room.waiting), beside=querying, timeout_seconds=30.0)

    assert len(await querying) == 0
