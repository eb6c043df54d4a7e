"""Attacks that cost a server time or memory. Each returns what went wrong in itself, or nothing.

An attack gets the servers and runs for some seconds; meanwhile another client reads, and the memory is watched.
"""

import asyncio
import gzip
import json
import os
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import aiohttp
import psutil
from servers import Server, Site, signed

from agentlightning.types import Span

MEGABYTE = 1024**2
CONNECT_ERRORS = (OSError, asyncio.IncompleteReadError, asyncio.TimeoutError, aiohttp.ClientError)
ENQUEUE = "/v1/agl/queues/rollouts/enqueue"
LIVE = "/v1/agl/live"
CHAT = "/v1/chat/completions"
SMALL_QUERY_SECONDS = 0.25
Load = Callable[[Site], Awaitable[str | None]]


def session(server: Server, token: str | None = None) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        server.url,
        headers=server.headers(token),
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=60),
    )


async def status_of(
    server: Server, path: str, body: bytes | None, *, token: str | None = None, headers: dict[str, str] | None = None
) -> int:
    """The status of one request; 0 if the connection was closed instead."""
    try:
        async with session(server, token) as client:
            verb = client.get if body is None else client.post
            async with verb(path, data=body, headers=headers) as response:
                await response.read()
                return response.status
    except CONNECT_ERRORS:
        return 0


async def answer_of(server: Server, verb: str, path: str, *, token: str | None = None, **options: Any) -> Any:
    """Status, headers and text of an answer."""
    async with session(server, token) as client, client.request(verb, path, **options) as response:
        return response.status, response.headers, await response.text()


async def repeatedly(seconds: float, act: Callable[[], Awaitable[Any]]) -> list[Any]:
    """The results of what was done until the time was over."""
    deadline, results = time.monotonic() + seconds, []
    while time.monotonic() < deadline:
        results.append(await act())
    return results


def unexpected(found: list[int], *expected: int) -> str | None:
    wrong = sorted({status for status in found if status not in expected})
    return f"answered {wrong} instead of {list(expected)}" if wrong else None


def large_body(body: bytes, expected: tuple[int, ...], *, token: str | None = None, path: str = ENQUEUE) -> Load:
    """The same body, again and again, over four connections."""

    async def attack(site: Site) -> str | None:
        runs = [repeatedly(8, lambda: status_of(site.target, path, body, token=token)) for _ in range(4)]
        return unexpected([status for run in await asyncio.gather(*runs) for status in run], *expected, 0)

    return attack


async def gzip_members(site: Site) -> str | None:
    body = gzip.compress(b"") * 1_000_000
    headers = {"Content-Encoding": "gzip"}
    found = await repeatedly(8, lambda: status_of(site.target, "/v1/agl/spans", body, headers=headers))
    return unexpected(found, 400, 413, 0)


async def many_rollouts(site: Site) -> str | None:
    """One body of as many rollouts as fit."""
    body = b'{"rollouts":[' + b'{"input":1},' * 99_000 + b'{"input":1}]}'
    statuses = await repeatedly(8, lambda: status_of(site.target, ENQUEUE, body))
    return unexpected(statuses, 201, 413)


async def enqueue(client: aiohttp.ClientSession, count: int, content: Any = 1, size: int = 1000) -> None:
    for start in range(0, count, size):
        rollouts = [{"input": content} for _ in range(min(size, count - start))]
        async with client.post(ENQUEUE, json={"rollouts": rollouts}) as response:
            assert response.status == 201, await response.text()


async def all_rollouts(site: Site) -> str | None:
    """Everything in one page, of a store with many rollouts."""
    async with session(site.target) as client:
        await enqueue(client, 30_000)

        async def query() -> int:
            async with client.post("/v1/agl/rollouts/search", json={"limit": 10**9}) as response:
                async for _ in response.content.iter_chunked(MEGABYTE):
                    pass
                return response.status

        found = await repeatedly(10, query)
    return unexpected(found, 200, 413)


async def large_rollouts(site: Site) -> str | None:
    """A hundred rollouts of one megabyte, all of them in one answer, and four such answers at a time."""
    async with session(site.target) as client:
        await enqueue(client, 100, "x" * MEGABYTE, size=1)

        async def query() -> int:
            async with client.get("/v1/agl/rollouts?limit=1000") as response:
                async for _ in response.content.iter_chunked(MEGABYTE):
                    pass
                return response.status

        found = await asyncio.gather(*(repeatedly(8, query) for _ in range(4)))
    return unexpected([status for each in found for status in each], 200, 413)


async def silent_connections(site: Site) -> str | None:
    """Connections that send nothing, or a head without end; every one is to be closed within a minute."""
    port, seconds = site.target.port, 45.0
    sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(600)]
    slow = sockets[:100]
    deadline = time.monotonic() + seconds
    is_open = dict.fromkeys(sockets, True)
    try:
        for each in sockets:
            each.settimeout(0.0)
        for each in slow:
            each.send(b"GET /health HTTP/1.1\r\n")
        while any(is_open.values()) and time.monotonic() < deadline:
            await asyncio.sleep(1)
            for each in [each for each in sockets if is_open[each]]:
                try:
                    if each in slow:
                        each.send(b"X-Slow: 1\r\n")
                    is_open[each] = each.recv(1) != b""
                except BlockingIOError:
                    continue
                except OSError:
                    is_open[each] = False
    finally:
        for each in sockets:
            each.close()
    left = sum(is_open.values())
    return f"{left} connections are still open after {seconds:.0f} s" if left else None


async def large_header(site: Site) -> str | None:
    async def send() -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", site.target.port)
        try:
            writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Large: " + b"x" * (8 * MEGABYTE))
            with suppress(OSError):
                await writer.drain()
            return await asyncio.wait_for(reader.read(20), 20)
        except CONNECT_ERRORS as error:
            return b"" if not isinstance(error, asyncio.TimeoutError) else b"nothing within 20 s"
        finally:
            writer.transport.abort()

    answers = {answer for answer in await repeatedly(5, send) if not answer.startswith(b"HTTP/1.1 431") and answer}
    return f"answered {answers} instead of 431" if answers else None


async def deaf_subscribers(site: Site) -> str | None:
    """Subscribers that do not read, and many changes."""
    head = "\r\n".join(
        [
            f"GET {LIVE} HTTP/1.1",
            "Host: localhost",
            "Upgrade: websocket",
            "Connection: Upgrade",
            "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
            "Sec-WebSocket-Version: 13",
            f"Authorization: Bearer {site.target.key}",
        ]
    )
    message = b'{"id":1,"subscribe":null,"after":0}'
    frame = bytes([0x82, 0x80 | len(message)]) + bytes(4) + message
    writers = []
    for _ in range(500):
        reader, writer = await asyncio.open_connection("127.0.0.1", site.target.port)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        writer.write(head.encode() + b"\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(frame)
        writers.append(writer)
    async with session(site.target) as client:
        began = time.monotonic()
        await enqueue(client, 3000, size=10)
        rate = 3000 / (time.monotonic() - began)
    for writer in writers:
        writer.transport.abort()
    return None if rate > 0 else f"{rate:.0f} rollouts a second were enqueued"


async def fill_rollout(server: Server, megabytes: int) -> str:
    """The id of a rollout with so many spans of one megabyte."""
    _, _, text = await answer_of(server, "POST", "/v1/agl/rollouts", json={"input": 1})
    begun = json.loads(text)
    ids = {"rollout_id": begun["rollout_id"], "attempt_id": begun["attempt"]["attempt_id"]}
    for number in range(1, megabytes + 1):
        span = Span.from_attributes(attributes={"text": "x" * MEGABYTE}, sequence_id=number, name="s", **ids)
        status, _, text = await answer_of(server, "POST", "/v1/agl/spans", json=span.model_dump(mode="json"))
        assert status in (200, 201), text
    return ids["rollout_id"]


async def small_queries(server: Server, seconds: float) -> str | None:
    """Queries of another reader for a few items, and for all spans of a small rollout, while others do not read."""
    async with session(server, signed("reader")) as client:
        paths = ("/v1/agl/rollouts?limit=1", "/v1/agl/spans?rollout_id=read-by-another")
        deadline, waits = time.monotonic() + seconds, []
        while time.monotonic() < deadline:
            for path in paths:
                began = time.monotonic()
                async with client.get(path) as response:
                    await response.read()
                waits.append(time.monotonic() - began)
            await asyncio.sleep(0.05)
    worst = sorted(waits)[int(len(waits) * 0.99)]
    return f"99 of 100 small queries took {worst:.2f} s" if worst > SMALL_QUERY_SECONDS else None


async def unread_answers(site: Site) -> str | None:
    """One frame with 200 queries of 20 MB each, by a reader's token; nothing is read."""
    large = await fill_rollout(site.target, 20)
    calls = [{"id": n, "op": "query_spans", "args": {"rollout_id": large}} for n in range(200)]
    async with session(site.target, signed("reader")) as client, client.ws_connect(LIVE, max_msg_size=0) as channel:
        await channel.send_json(calls)
        transport = channel._response.connection.transport  # type: ignore[union-attr]
        transport.pause_reading()
        return await small_queries(site.target, 15)


async def slow_reader(site: Site) -> str | None:
    """A page of 24 MB, read at 16 kB a second, three times over."""
    large, token = await fill_rollout(site.target, 24), signed("reader")
    head = f"GET /v1/agl/spans?rollout_id={large} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}"
    connections = [await asyncio.open_connection("127.0.0.1", site.target.port, limit=4096) for _ in range(3)]

    async def read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        writer.write(head.encode() + b"\r\n\r\n")
        with suppress(*CONNECT_ERRORS):
            while await reader.read(4096):  # noqa: ASYNC110 # the speed is the attack
                await asyncio.sleep(0.25)

    readers = [asyncio.create_task(read(*connection)) for connection in connections]
    try:
        return await small_queries(site.target, 20)
    finally:
        for task in readers:
            task.cancel()


async def unread_records(site: Site) -> str | None:
    """Forty connections, one after the other, that ask for a rollout of 7 MB and read nothing of it."""
    body = {"rollouts": [{"rollout_id": "long", "input": "x" * 7 * MEGABYTE}]}
    status, _, text = await answer_of(site.target, "POST", ENQUEUE, json=body)
    if status not in (200, 201):
        return f"answered {status}: {text[:100]}"
    head = f"GET /v1/agl/rollouts/long HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {signed('reader')}\r\n\r\n"
    writers: list[asyncio.StreamWriter] = []
    for _ in range(40):
        _, writer = await asyncio.open_connection("127.0.0.1", site.target.port, limit=4096)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        writer.write(head.encode())
        writers.append(writer)
        await asyncio.sleep(0.2)
    complaint = await small_queries(site.target, 10)
    ports = {writer.get_extra_info("sockname")[1] for writer in writers}
    held = psutil.Process(site.target.process.pid).net_connections()
    n_open = sum(bool(one.raddr) and one.raddr.port in ports and one.status == "ESTABLISHED" for one in held)
    for writer in writers:
        writer.transport.abort()
    return complaint or (f"{n_open} of them are kept" if n_open else None)


async def waiting_calls(site: Site) -> str | None:
    """Calls that wait, without end, on one live connection."""
    async with session(site.target) as client:
        await enqueue(client, 1)
        async with client.ws_connect(LIVE, max_msg_size=0) as channel:
            for start in range(0, 50_000, 500):
                calls = [
                    {"id": n, "op": "wait_for_rollouts", "args": {"rollout_ids": ["read-by-another"], "timeout": 60}}
                    for n in range(start, start + 500)
                ]
                try:
                    await asyncio.wait_for(channel.send_json(calls), 5)
                except (asyncio.TimeoutError, OSError, aiohttp.ClientError):
                    break
            await asyncio.sleep(4)
    return None


async def long_polls(site: Site) -> str | None:
    async with session(site.target) as client:
        await enqueue(client, 1)
        body = {"rollout_ids": ["read-by-another"], "timeout": 8}
        polls = [client.post("/v1/agl/waits/rollouts", json=body) for _ in range(1000)]

        async def poll(request: Any) -> int:
            try:
                async with request as response:
                    await response.read()
                    return int(response.status)
            except CONNECT_ERRORS:
                return 0

        running = []
        for each in polls:
            running.append(asyncio.create_task(poll(each)))
            await asyncio.sleep(0.003)
        found = await asyncio.gather(*running)
    return unexpected(list(found), 200, 404, 429, 503)


async def long_ids(site: Site) -> str | None:
    """Ids of eight kilobytes, all of them different, in every place that takes one."""

    async def send(client: aiohttp.ClientSession, number: int) -> int:
        long = f"{number:08}" * 1000
        requests = [
            ("/v1/agl/queues/rollouts/dequeue", {"limit": 1, "claim_id": long}),
            ("/v1/agl/queues/rollouts/enqueue-one", {"input": 1, "rollout_id": long}),
            (f"/v1/agl/workers/{long}", {}),
        ]
        path, body = requests[number % len(requests)]
        async with client.post(path, json=body) as response:
            await response.read()
            return response.status

    async with session(site.target) as client:
        found: list[int] = []
        for start in range(0, 6000, 50):
            found += await asyncio.gather(*[send(client, n) for n in range(start, start + 50)])
    return unexpected(found, 400, 414, 422, 431)


async def garbage(site: Site) -> str | None:
    """Requests that name nothing, all of them different: ids, tokens, routes, workers, claims, traces."""
    attempt = signed("attempt", "r", "a")

    async def send(client: aiohttp.ClientSession, number: int) -> None:
        name = os.urandom(30).hex()
        forged = {"Authorization": f"Bearer agl1.{name}.{name}"}
        requests: list[tuple[str, str, dict[str, Any]]] = [
            ("GET", f"/v1/agl/rollouts/{name}", {}),
            ("GET", f"/{name}/{name}", {}),
            ("GET", f"/v1/agl/{name}?{name}={name}", {}),
            ("GET", "/v1/agl/statistics", {"headers": forged}),
            ("POST", f"/v1/agl/workers/{name}", {"json": {"heartbeat_stats": {name: name}}}),
            ("POST", "/v1/agl/queues/rollouts/dequeue", {"json": {"worker_id": name, "claim_id": name}}),
            ("POST", "/v1/agl/spans/next", {"json": {"rollout_id": name, "attempt_id": name}}),
            ("POST", "/v1/agl/spans", {"json": {name: name}, "headers": {"Authorization": f"Bearer {attempt}"}}),
            ("POST", "/v1/agl/waits/rollouts", {"json": {"rollout_ids": [name], "timeout": 0}}),
            ("POST", "/v1/agl/rollouts/search", {"json": {"rollout_id_contains": name}}),
            ("GET", f"/v1/agl/rollouts/{name}", {"headers": {"Host": f"{name}.example", "Origin": f"http://{name}"}}),
            ("POST", "/v1/traces", {"data": os.urandom(200), "headers": {"Content-Type": "application/x-protobuf"}}),
            (name[:12].upper(), f"/v1/agl/rollouts/{name}", {}),
            ("GET", f"/v1/agl/notices?after={number}&kinds=rollout", {}),
        ]
        verb, path, options = requests[number % len(requests)]
        with suppress(*CONNECT_ERRORS):
            async with client.request(verb, path, **options) as response:
                await response.read()

    async with session(site.target) as client:
        deadline, number = time.monotonic() + 40, 0
        while number < 60_000 and time.monotonic() < deadline:
            await asyncio.gather(*[send(client, n) for n in range(number, number + 50)])
            number += 50
    return None


# ---------------------------------------------------------------------- model calls


def call_model(word: str, expected: tuple[int, ...], *, stream: bool = False) -> Load:
    """Calls for which the backend has a hostile answer, two at a time."""
    body = json.dumps({"model": "m", "stream": stream, "messages": [{"role": "user", "content": word}]}).encode()

    async def attack(site: Site) -> str | None:
        async with session(site.servers["store"]) as client:
            path = await attempt_path(client)
        runs = [repeatedly(8, lambda: status_of(site.target, path, body)) for _ in range(2)]
        return unexpected([status for run in await asyncio.gather(*runs) for status in run], *expected)

    return attack


async def attempt_path(client: aiohttp.ClientSession) -> str:
    """Where an attempt that runs calls the proxy."""
    async with client.post("/v1/agl/rollouts", json={"input": 1}) as response:
        started = await response.json()
    return f"/rollout/{started['rollout_id']}/attempt/{started['attempt']['attempt_id']}/v1/chat/completions"


async def many_unknown_attempts(site: Site) -> str | None:
    """Calls of rollouts and attempts that nobody knows, all of them different, to a proxy without a key."""
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "Well?"}]}).encode()

    async def send(client: aiohttp.ClientSession) -> None:
        name = os.urandom(100).hex()
        with suppress(*CONNECT_ERRORS):
            path = f"/rollout/{name}/attempt/{name}/v1/chat/completions"
            async with client.post(path, data=body, headers={"x-request-id": name}) as response:
                await response.read()

    async with session(site.target) as client:
        deadline, number = time.monotonic() + 15, 0
        while number < 20_000 and time.monotonic() < deadline:
            await asyncio.gather(*[send(client) for _ in range(40)])
            number += 40
    return None
