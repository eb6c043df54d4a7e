"""Clients that are slow, broken or unwelcome: each is refused clearly, and the server is as well as before."""

import asyncio
import gzip
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import aiohttp
import pytest

from agentlightning.asgi import protocol
from agentlightning.errors import InvalidToken
from agentlightning.store import InMemoryLightningStore, LightningStoreClient, LightningStoreServer
from tests.e2e.server_process import ServerProcess, left_behind

TOKEN = "a-secret-that-nobody-guesses-0123456789"
ENQUEUE = "/v1/agl/queues/rollouts/enqueue-one"
LIVE = "/v1/agl/live"
TOO_MANY_BYTES = 65 * 1024 * 1024
MOST_GROWTH_BYTES = 150 * 1024 * 1024
"""What a server's memory may grow by while it refuses bodies of 65 MB."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One server for all."""
    with ServerProcess(token=TOKEN, log=tmp_path_factory.mktemp("hostile") / "server.log") as process:
        yield process
        assert process.terminate() == 0
    assert left_behind() == []


@pytest.fixture(autouse=True)
async def is_well_afterwards(request: pytest.FixtureRequest) -> AsyncIterator[None]:
    """The server answers, works, holds no connection of a client that left, has not grown much, nor was surprised."""
    if "server" not in request.fixturenames:
        yield
        return
    process: ServerProcess = request.getfixturevalue("server")
    before, told_before = process.memory_bytes, len(process.log_text)
    yield
    assert process.is_healthy()
    async with LightningStoreClient(process.url, token=TOKEN) as client:
        assert (await client.enqueue_rollout({"n": 1})).status == "queuing"
    deadline = time.monotonic() + 5
    while process.open_connections > 0:
        assert time.monotonic() < deadline, f"{process.open_connections} connections are left"
        await asyncio.sleep(0.02)
    assert process.memory_bytes - before < MOST_GROWTH_BYTES
    assert "Exception in ASGI application" not in process.log_text[told_before:]


def request_bytes(body: bytes = b"", *headers: str, token: str | None = TOKEN, length: int | None = None) -> bytes:
    """An HTTP request that enqueues a rollout."""
    lines = [f"POST {ENQUEUE} HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json", *headers]
    if token is not None:
        lines.append(f"Authorization: Bearer {token}")
    if "Transfer-Encoding: chunked" not in headers:
        lines.append(f"Content-Length: {len(body) if length is None else length}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


async def exchange(port: int, content: bytes) -> bytes:
    """Send bytes and read the head of the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(content)
        with suppress(OSError):  # refused before it was read
            await writer.drain()
        return await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
    finally:
        writer.transport.abort()


BAD_REQUESTS = {
    "no-http": (b"\x16\x03\x01\x02\x00garbage\r\n\r\n", 400),
    "wrong-token": (request_bytes(b"{}", token="wrong"), 401),
    "no-token": (request_bytes(b"{}", token=None), 401),
    "garbage-body": (request_bytes(b"\x00\xff{"), 400),
    "no-object": (request_bytes(b"[1]"), 400),
    "wrong-arguments": (request_bytes(b'{"nonsense": 1}'), 422),
    "deep-body": (request_bytes(b"[" * 100_000), 400),
    "garbage-gzip": (request_bytes(b"\x00\xff{", "Content-Encoding: gzip"), 400),
    "half-gzip": (request_bytes(gzip.compress(b"{}" * 100)[:-9], "Content-Encoding: gzip"), 400),
    "gzip-bomb": (request_bytes(gzip.compress(b"0" * TOO_MANY_BYTES, compresslevel=1), "Content-Encoding: gzip"), 413),
    "announced-oversize": (request_bytes(length=10**12), 413),
    "negative-length": (request_bytes(length=-1), 400),
    "unannounced-oversize": (
        request_bytes(b"%x\r\n" % TOO_MANY_BYTES + b"0" * TOO_MANY_BYTES + b"\r\n", "Transfer-Encoding: chunked"),
        413,
    ),
}


@pytest.mark.parametrize("case", BAD_REQUESTS)
async def test_bad_request_is_refused_with_a_status(server: ServerProcess, case: str) -> None:
    content, status = BAD_REQUESTS[case]

    head = await exchange(server.port, content)

    assert head.startswith(b"HTTP/1.1 %d " % status)


async def test_endless_header_is_cut_off(server: ServerProcess) -> None:
    try:
        head = await exchange(server.port, request_bytes(b'{"input": 1}', "X-Endless: " + "x" * 8_000_000))
    except (OSError, asyncio.IncompleteReadError):
        return  # what was not read can take the answer down with it

    assert head.startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize("transport", ["http", "ws", "auto"])
async def test_client_with_a_wrong_token_is_told_at_once(server: ServerProcess, transport: Any) -> None:
    began = time.monotonic()
    async with LightningStoreClient(server.url, token="wrong", transport=transport) as client:
        with pytest.raises(InvalidToken):
            await client.enqueue_rollout({"n": 1})
        with pytest.raises(InvalidToken):
            await client.dequeue_rollout(wait=30)

    assert time.monotonic() - began < 20


# ---------------------------------------------------------------------- WebSocket

BAD_CALLS: dict[str, Any] = {
    "unknown-operation": {"op": "close"},
    "no-name": {"op": ["statistics"]},
    "no-arguments": {"op": "statistics", "args": [1]},
    "wrong-arguments": {"op": "add_span", "args": {"span": {}}},
    "unknown-kind": {"subscribe": ["weather"]},
    "no-kinds": {"subscribe": 5},
    "kinds-of-arrays": {"subscribe": [["rollout"]]},
    "no-cursor": {"subscribe": None, "after": "x"},
}


@pytest.mark.parametrize("case", BAD_CALLS)
async def test_bad_call_is_answered_and_the_channel_lives_on(server: ServerProcess, case: str) -> None:
    async with connected(server.url) as channel:
        await channel.send_json({"id": 1, **BAD_CALLS[case]})
        (refused,) = await channel.receive_json(timeout=5)
        await channel.send_json({"id": 2, "op": "statistics"})
        (answered,) = await channel.receive_json(timeout=5)

    assert refused["error"]["status"] in (400, 422)
    assert refused["error"]["error_type"] in ("InvalidQuery", "InvalidValue")
    assert "result" in answered


BAD_FRAMES = {
    "unmasked": (b"\x82\x02[]", 1002),
    "unknown-opcode": (b"\x83\x80\x00\x00\x00\x00", 1002),
    "reserved-bits": (b"\xf2\x80\x00\x00\x00\x00", 1002),
    "oversized": (b"\x82\xff" + (1 << 40).to_bytes(8, "big") + b"\x00\x00\x00\x00", 1009),
    "no-utf-8": (b"\x81\x82\x00\x00\x00\x00\xff\xfe", 1007),
    "random": (bytes(range(256)), 1002),
}


@pytest.mark.parametrize("case", BAD_FRAMES)
async def test_garbage_frame_ends_the_channel_with_its_code(server: ServerProcess, case: str) -> None:
    frame, code = BAD_FRAMES[case]

    reader, writer = await upgraded(server.port)
    writer.write(frame)
    answer = await asyncio.wait_for(reader.readexactly(4), 30)
    writer.transport.abort()

    assert answer[0] == 0x88
    assert int.from_bytes(answer[2:], "big") == code


# ---------------------------------------------------------------------- slowness


async def test_slow_clients_hold_up_nobody_else(server: ServerProcess) -> None:
    slow = [asyncio.create_task(_send_slowly(server.port, request_bytes(b'{"input": 1}'))) for _ in range(20)]
    waits: list[float] = []
    async with LightningStoreClient(server.url, token=TOKEN) as client:
        for _ in range(20):
            began = time.monotonic()
            await client.enqueue_rollout({"n": 1})
            waits.append(time.monotonic() - began)
            await asyncio.sleep(0.05)
    for task in slow:
        task.cancel()
    await asyncio.gather(*slow, return_exceptions=True)

    assert max(waits) < 1


WELL = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
SLOW = {
    "nothing": (b"", b"", b""),
    "half-a-header": (b"", b"POST /health HTTP/1.1\r\nHost:", b""),
    "half-a-second-header": (WELL, b"GET /health HTTP/1.1\r\nHost:", b""),
    "half-a-body": (b"", request_bytes(b'{"input"', length=100), b"HTTP/1.1 408 "),
    "half-a-second-body": (WELL, request_bytes(b'{"input"', length=100), b"HTTP/1.1 408 "),
}


@pytest.mark.parametrize("case", SLOW)
async def test_request_that_does_not_arrive_in_time_is_given_up(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, half, expected = SLOW[case]
    monkeypatch.setattr(protocol, "HEADER_SECONDS", 0.5)
    served = LightningStoreServer(InMemoryLightningStore(), "127.0.0.1", 0)
    served.app.service.body_timeout_seconds = 0.5
    await served.start()

    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    try:
        if whole:
            writer.write(whole)
            await reader.readuntil(b'{"status":"ok"}')
        writer.write(half)
        answer = await asyncio.wait_for(reader.read(), 30)  # to the end of the connection
    finally:
        writer.transport.abort()
        await served.stop()

    assert answer.startswith(expected)
    assert bool(answer) == bool(expected)


# ---------------------------------------------------------------------- means


@asynccontextmanager
async def connected(url: str, *, token: str = TOKEN) -> AsyncIterator["aiohttp.ClientWebSocketResponse[bool]"]:
    headers = {"Authorization": f"Bearer {token}"}
    async with aiohttp.ClientSession(headers=headers) as session, session.ws_connect(url + LIVE) as channel:
        yield channel


async def upgraded(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A WebSocket without a client library, to send what one would not."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    lines = [f"GET {LIVE} HTTP/1.1", "Host: 127.0.0.1", f"Authorization: Bearer {TOKEN}"]
    lines += ["Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13"]
    lines += ["Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=="]
    writer.write("\r\n".join(lines).encode() + b"\r\n\r\n")
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 101 ")
    return reader, writer


async def _send_slowly(port: int, content: bytes) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        await _drip(writer, content)
    finally:
        writer.transport.abort()


async def _drip(writer: asyncio.StreamWriter, content: bytes) -> None:
    for number in range(len(content)):
        writer.write(content[number : number + 1])
        await asyncio.sleep(0.1)
