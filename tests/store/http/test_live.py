"""The live channel as its protocol says: frames, messages, subscriptions, and what a rude client can do to others."""

import asyncio
import gc
import gzip
import json
import math
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext, suppress
from typing import Any

import aiohttp
import pytest

from agentlightning.asgi import answers as asgi_answers
from agentlightning.asgi.answers import SHARE_BYTES
from agentlightning.store import LightningStoreServer
from agentlightning.store.http import live
from agentlightning.store.http.tokens import Scope, sign_token
from agentlightning.types import EnqueueRolloutRequest

SECRET = "master"


class Channel:
    """A WebSocket to a server, as somebody would write it who read only the protocol."""

    def __init__(self, socket: "aiohttp.ClientWebSocketResponse[bool]") -> None:
        self.socket = socket
        self._unread: list[dict[str, Any]] = []

    async def send(self, *messages: Any) -> None:
        await self.socket.send_str(json.dumps(messages[0] if len(messages) == 1 else messages))

    async def read(self) -> Any:
        """The next message; None if the connection was closed."""
        while not self._unread:
            frame = await self.socket.receive(timeout=10)
            if frame.type not in (aiohttp.WSMsgType.TEXT, aiohttp.WSMsgType.BINARY):
                return None
            self._unread = json.loads(frame.data)
        return self._unread.pop(0)

    async def call(self, number: int, op: str, **args: Any) -> Any:
        await self.send({"id": number, "op": op, "args": args})
        return await self.read()


@asynccontextmanager
async def opened(
    server: LightningStoreServer, *, token: str | None = None, query: str = "", **headers: str
) -> AsyncIterator[Channel]:
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    url = f"{server.endpoint}/v1/agl/live{query}"
    async with aiohttp.ClientSession() as session, session.ws_connect(url, headers=headers, max_msg_size=0) as socket:
        yield Channel(socket)


# ---------------------------------------------------------------------- frames


async def test_frame_may_be_text_bytes_or_gzip(server: LightningStoreServer) -> None:
    frame = json.dumps({"id": 7, "op": "enqueue_rollout", "args": {"input": "ü"}})

    async with opened(server) as channel:
        for sending in (
            channel.socket.send_str(frame),
            channel.socket.send_bytes(frame.encode()),
            channel.socket.send_bytes(gzip.compress(frame.encode())),
        ):
            await sending
            told = await channel.read()

            assert (told["id"], told["result"]["input"]) == (7, "ü")


async def test_messages_of_one_frame_are_answered_each(server: LightningStoreServer) -> None:
    async with opened(server) as channel:
        await channel.send(
            {"id": 1, "op": "start_run", "args": {"name": "a"}},
            {"id": 2, "op": "start_attempt", "args": {"rollout_id": "nobody"}},
            {"id": 3, "op": "explode"},
            {"id": 4, "op": "enqueue_rollout", "args": {"inputt": 1}},
            {"id": 5, "op": "statistics"},
        )
        told = {message["id"]: message for message in [await channel.read() for _ in range(5)]}

    assert told[1]["result"]["name"] == "a"
    errors = {number: (told[number]["error"]["status"], told[number]["error"]["error_type"]) for number in (2, 3, 4)}
    assert errors == {2: (404, "NotFound"), 3: (400, "InvalidQuery"), 4: (422, "InvalidValue")}
    assert isinstance(told[4]["error"]["detail"], list)
    assert "total_rollouts" in told[5]["result"]


GARBAGE = (
    *(b"not JSON", b"", b"\xff\xfe", b"5", b"[1]", b'{"op": "statistics"}', b'{"id": "one", "op": "statistics"}'),
    *(b'{"cancel": []}', b'{"cancel": {"a": 1}}', gzip.compress(b"{}", mtime=0)[:-4], b"[" * 100_000),
    gzip.compress(b"", mtime=0) * 2000 + gzip.compress(b'{"id": 1, "op": "statistics"}', mtime=0),
)


async def test_garbage_closes_its_own_connection_only(server: LightningStoreServer) -> None:
    async with opened(server) as other:
        for number, frame in enumerate(GARBAGE):
            async with opened(server) as channel:
                await channel.socket.send_bytes(frame)

                assert await channel.read() is None, frame[:50]
                assert channel.socket.close_code == 1007, frame[:50]
            assert (await other.call(number, "statistics"))["id"] == number


async def test_frame_that_is_too_large_closes_its_connection(server: LightningStoreServer) -> None:
    frame = b'{"id": 1, "op": "statistics"}'

    async with opened(server) as channel:
        await channel.socket.send_bytes(frame + b" " * 9 * 1024**2)
        assert "result" in await channel.read()
        with suppress(aiohttp.ClientError, ConnectionError):  # the server leaves before all has come
            await channel.socket.send_bytes(frame + b" " * 11 * 1024**2)
        assert await channel.read() is None


async def test_subscription_to_nonsense_is_refused_in_our_words(server: LightningStoreServer) -> None:
    async with opened(server) as channel:
        for kinds in (["nonsense"], [[]], "rollout", 5):
            await channel.send({"id": 1, "subscribe": kinds})
            told = await channel.read()

            assert (told["error"]["status"], told["error"]["error_type"]) == (400, "InvalidQuery")


async def test_compact_connection_is_told_echoes_in_short(server: LightningStoreServer, make_span: Any) -> None:
    span = make_span(await server.start_rollout("a")).model_dump(mode="json")
    async with opened(server, query="?compact=1") as channel:
        told = await channel.call(1, "add_many_spans", spans=[span, span])
    assert told == {"id": 1, "result": [True, False]}


async def test_message_sent_twice_is_answered_once(server: LightningStoreServer) -> None:
    waiting = {"id": 1, "op": "wait_for_rollouts", "args": {"rollout_ids": ["nobody"], "timeout": 0.05}}

    async with opened(server) as channel:
        await channel.send(waiting, waiting)
        told = [await channel.read(), await channel.call(2, "statistics")]

    assert [message["id"] for message in told] == [1, 2]


# ---------------------------------------------------------------------- waiting


async def test_wait_that_is_cancelled_or_whose_connection_goes_away_claims_nothing(serve: Any, eventually: Any) -> None:
    server = await serve()

    async with opened(server) as channel:
        await channel.send({"id": 1, "op": "dequeue_rollout", "args": {"wait": 60}})
        await eventually(lambda: server.app.service.waiting_calls == 1)
        await channel.send({"cancel": 1}, {"cancel": 99})
        await eventually(lambda: server.app.service.waiting_calls == 0)
        await channel.call(2, "enqueue_rollout", input="a")
        assert (await server.dequeue_rollout()).input == "a"
        await channel.send({"id": 3, "op": "dequeue_rollout", "args": {"wait": 60}})
        await eventually(lambda: server.app.service.waiting_calls == 1)

    await eventually(lambda: server.app.service.waiting_calls == server.app.service.live_connections == 0)


async def test_many_waiting_calls_do_not_keep_out_the_one_they_wait_for(
    serve: Any, monkeypatch: pytest.MonkeyPatch, eventually: Any
) -> None:
    monkeypatch.setattr(live, "MOST_CALLS", 4)
    server = await serve()

    async with opened(server) as channel:
        for number in range(4):
            await channel.send({"id": number, "op": "dequeue_rollout", "args": {"wait": 60}})
        await eventually(lambda: server.app.service.waiting_calls == 4)
        told = await channel.call(9, "enqueue_rollout", input="a")

    assert told is not None


# ---------------------------------------------------------------------- subscriptions


async def test_subscription_resumes_behind_its_cursor(serve: Any) -> None:
    server = await serve()
    async with opened(server) as channel:
        await channel.send({"id": 1, "subscribe": ["rollout"]})
        begun = await channel.read()
        await server.enqueue_many_rollouts([EnqueueRolloutRequest(input=n) for n in range(3)])
        first = (await channel.read())["notice"]

    async with opened(server) as channel:
        await channel.send({"id": 5, "subscribe": ["rollout"], "after": first["cursor"]})
        resumed = await channel.read()
        rest = [(await channel.read())["notice"]["cursor"] for _ in range(2)]

    assert begun == {"id": 1, "cursor": 0}
    assert resumed == {"id": 5, "cursor": first["cursor"]}
    assert rest == [first["cursor"] + 1, first["cursor"] + 2]


async def test_ended_subscription_is_told_nothing_more(serve: Any) -> None:
    server = await serve()

    async with opened(server) as channel:
        await channel.send({"id": 1, "subscribe": None})
        await channel.read()
        await channel.send({"cancel": 1})
        await channel.call(2, "statistics")
        told = [await channel.call(number, "enqueue_rollout", input="a") for number in (3, 4)]

    assert [message["id"] for message in told] == [3, 4]


def unsent_bytes() -> int:
    """What servers of this process keep for clients that do not read."""
    gc.collect()
    return max(thing._unread_bytes for thing in gc.get_objects() if isinstance(thing, live._LiveConnection))


async def test_subscriber_that_does_not_read_costs_little_and_blocks_nobody(serve: Any, eventually: Any) -> None:
    server = await serve()

    async with opened(server) as sleepy, opened(server) as other:
        await sleepy.send({"id": 1, "subscribe": ["rollout"]})
        assert "cursor" in await sleepy.read()
        for batch in range(20):
            names = [f"{batch}-{n}-" + "x" * 200_000 for n in range(5)]
            await server.enqueue_many_rollouts([EnqueueRolloutRequest(input=0, rollout_id=name) for name in names])
            assert (await other.call(batch, "statistics"))["id"] == batch
        assert unsent_bytes() < 2 * SHARE_BYTES
        told = [await sleepy.read() for _ in range(100)]

    assert [message["notice"]["cursor"] for message in told] == list(range(1, 101))


async def test_subscriber_that_reads_too_late_is_told_of_a_gap(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "STALL_SECONDS", 0.0)
    monkeypatch.setattr(live, "MOST_BACKLOG_BYTES", 1000)
    monkeypatch.setattr(live, "PACE_SECONDS", math.inf)  # no pause between notices, in which they would be sent
    server = await serve()

    async with opened(server) as sleepy:
        await sleepy.send({"id": 1, "subscribe": ["rollout"]})
        assert "cursor" in await sleepy.read()
        await server.enqueue_many_rollouts([EnqueueRolloutRequest(input=0) for _ in range(500)])
        told = [(await sleepy.read())["notice"]]
        while told[-1]["kind"] != "gap":
            told.append((await sleepy.read())["notice"])
        last = await server.enqueue_rollout(1)
        following = (await sleepy.read())["notice"]

    assert len(told) < 100
    assert told[-1]["cursor"] == 500
    assert following["rollout_id"] == last.rollout_id


async def test_calls_that_wait_on_one_connection_are_bounded(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MOST_WAITING", 3)
    server = await serve()
    await server.enqueue_rollout(1, rollout_id="r")

    async with opened(server) as channel:
        for number in range(4):
            await channel.send({"id": number, "op": "wait_for_rollouts", "args": {"rollout_ids": ["r"]}})
        refused = await channel.read()
        answered = await channel.call(9, "statistics")

    assert (refused["id"], refused["error"]["status"]) == (3, 503)
    assert "result" in answered


async def test_caller_that_does_not_read_its_answers_costs_little(serve: Any) -> None:
    server, kept = await serve(), -1
    await server.enqueue_rollout("x" * 1_000_000)

    async with opened(server) as sleepy, opened(server) as other:
        for number in range(64):
            await sleepy.send({"id": number, "op": "query_rollouts"})
        while kept != (kept := unsent_bytes()):  # until nothing moves any more
            await other.call(1, "statistics")
            await asyncio.sleep(0.2)

        assert unsent_bytes() < (live.READS_AT_ONCE + 1) * SHARE_BYTES
        assert len([await sleepy.read() for _ in range(64)]) == 64


async def test_large_answers_that_nobody_reads_cost_a_few_and_hold_up_nobody(serve: Any, eventually: Any) -> None:
    server = await serve()
    await server.enqueue_many_rollouts([EnqueueRolloutRequest(input="x" * 1_000_000) for _ in range(8)])

    async with opened(server) as greedy, opened(server) as other:
        await greedy.send(*[{"id": number, "op": "query_rollouts"} for number in range(50)])
        await eventually(lambda: server.app.service.answers.unsent_bytes > 0)
        few = await asyncio.wait_for(other.call(1, "query_rollouts", limit=1), 10)
        all_of_them = await asyncio.wait_for(other.call(2, "query_rollouts"), 10)
        assert unsent_bytes() < live.READS_AT_ONCE * 10_000_000

    assert (len(few["result"]["items"]), len(all_of_them["result"]["items"])) == (1, 8)


async def test_caller_that_reads_nothing_of_a_large_answer_is_disconnected(
    serve: Any, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asgi_answers, "GRACE_SECONDS", 0.01)
    server = await serve()
    service = server.app.service
    await server.enqueue_many_rollouts([EnqueueRolloutRequest(input="x" * 1_000_000) for _ in range(20)])

    async with opened(server) as greedy:
        await greedy.send(*[{"id": number, "op": "query_rollouts"} for number in range(50)])
        await eventually(lambda: service.live_connections == 1 and service.answers.unsent_bytes > 0)
        await eventually(lambda: service.live_connections == 0)

    assert service.answers.unsent_bytes == 0


async def test_caller_that_leaves_with_answers_unread_leaves_nothing_behind(serve: Any, eventually: Any) -> None:
    server = await serve()
    await server.enqueue_many_rollouts([EnqueueRolloutRequest(input="x" * 1_000_000) for _ in range(20)])

    async with opened(server) as greedy:
        await greedy.send(*[{"id": number, "op": "query_rollouts"} for number in range(300)])
        await eventually(lambda: server.app.service.answers.unsent_bytes > 0)
        greedy.socket._response.connection.transport.abort()  # type: ignore[union-attr] # it does not say goodbye
        await eventually(lambda: server.app.service.live_connections == 0)


@pytest.mark.parametrize("is_of_a_page", [True, False], ids=["page", "record"])
async def test_item_that_is_long_and_not_read_is_given_up_over_http_too(
    is_of_a_page: bool,
    serve: Any,
    eventually: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = await serve()
    service = server.app.service
    rollout_id = (await server.enqueue_rollout("x" * 20_000_000)).rollout_id
    path = "/v1/agl/rollouts" if is_of_a_page else f"/v1/agl/rollouts/{rollout_id}"
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=4096)

    writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    await eventually(lambda: service.answers.unsent_bytes > 10_000_000)
    monkeypatch.setattr(asgi_answers, "GRACE_SECONDS", 0.01)
    await eventually(lambda: service.answers.unsent_bytes == 0)

    received = await reader.read()
    writer.close()
    assert len(received) < 20_000_000  # it is broken off, not closed when all of it is sent
    assert "without completing" not in caplog.text


# ---------------------------------------------------------------------- who may come in


async def test_wrong_token_is_refused_at_the_handshake(serve: Any, caplog: pytest.LogCaptureFixture) -> None:
    server = await serve(token=SECRET)
    expired = sign_token(SECRET, Scope("runner"), expires_at=time.time() - 1)

    for token in (None, "wrong", "agl1.e30.e30", expired):
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            async with opened(server, token=token):
                pass

        assert refused.value.status == 401
        assert refused.value.headers is not None
        assert refused.value.headers["WWW-Authenticate"] == "Bearer"
    await server.stop()
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


async def test_scope_of_the_token_holds_for_every_message(serve: Any, make_span: Any) -> None:
    server = await serve(token=SECRET)
    rollout = await server.start_rollout("a")
    scope = Scope("attempt", rollout.rollout_id, rollout.attempt.attempt_id)

    async with opened(server, token=sign_token(SECRET, scope, expires_at=None)) as channel:
        written = await channel.call(1, "add_span", span=make_span(rollout).model_dump(mode="json"))
        read = await channel.call(2, "query_rollouts")
        await channel.send({"id": 3, "subscribe": None})
        followed = await channel.read()

    assert written["result"]["rollout_id"] == rollout.rollout_id
    assert [message["error"]["status"] for message in (read, followed)] == [403, 403]


def is_refusal(told: Any) -> bool:
    return told is None or told.get("error", {}).get("status") == 401


async def test_expired_token_ends_calls_and_subscriptions(serve: Any, eventually: Any) -> None:
    server = await serve(token=SECRET)
    expires_at = time.time() + 0.5
    token = sign_token(SECRET, Scope("runner"), expires_at=expires_at)

    async with opened(server, token=token) as calling, opened(server, token=token) as following:
        await following.send({"id": 1, "subscribe": ["rollout"]})
        assert "cursor" in await following.read()
        await eventually(lambda: time.time() > expires_at)
        await server.enqueue_rollout("a")

        assert is_refusal(await calling.call(2, "dequeue_rollout"))
        while not is_refusal(await following.read()):  # what was on its way may still come
            pass
        await server.enqueue_rollout("b")
        assert await following.read() is None

    assert (await server.dequeue_rollout()).input == "a"


@pytest.mark.parametrize(
    ("allowed", "let_in", "kept_out"),
    [
        (None, ["http://127.0.0.1:{port}"], ["https://evil.example", "null", "http://127.0.0.1:1"]),
        (["https://good.example"], ["https://good.example"], ["https://evil.example"]),
        ("*", ["https://any.example"], []),
    ],
)
async def test_web_pages_of_others_are_kept_out(allowed: Any, let_in: Any, kept_out: Any, serve: Any) -> None:
    server = await serve(cors_allow_origins=allowed)

    for origin in let_in:
        async with opened(server, Origin=origin.format(port=server.port)) as channel:
            assert (await channel.call(1, "statistics"))["id"] == 1
    for origin in kept_out:
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            async with opened(server, Origin=origin):
                pass
        assert refused.value.status == 403


@pytest.mark.parametrize(
    ("options", "hosts", "is_let_in"),
    [
        ({}, ["evil.example:{port}", "evil.example.localhost.evil.example", "[::"], False),
        ({}, ["localhost:{port}", "0.0.0.0:{port}", "[::1]:{port}", "agent.localhost", socket.gethostname()], True),
        ({"token": SECRET}, ["evil.example"], True),
        ({"cors_allow_origins": ["http://good.example"]}, ["good.example"], True),
    ],
)
async def test_a_name_that_others_lead_here_reads_nothing(
    options: dict[str, Any], hosts: list[str], is_let_in: bool, serve: Any, session: aiohttp.ClientSession
) -> None:
    server = await serve(**options)
    for host in hosts:
        headers = {"Host": host.format(port=server.port), "Authorization": f"Bearer {SECRET}"}
        async with session.get(f"{server.endpoint}/v1/agl/rollouts", headers=headers) as response:
            assert response.status == (200 if is_let_in else 403), await response.text()

        with nullcontext() if is_let_in else pytest.raises(aiohttp.WSServerHandshakeError):
            async with opened(server, **headers) as channel:
                assert (await channel.call(1, "statistics"))["id"] == 1


async def test_a_text_that_is_not_utf8_ends_the_channel_without_a_traceback(
    serve: Any, caplog: pytest.LogCaptureFixture
) -> None:
    server = await serve()
    async with aiohttp.ClientSession() as session, session.ws_connect(f"{server.endpoint}/v1/agl/live") as socket:
        await socket._writer.send_frame(b'{"id": 1, "op": "\xff\xfe"}', aiohttp.WSMsgType.TEXT)

        told = await socket.receive(timeout=10)

    assert (told.type, socket.close_code) == (aiohttp.WSMsgType.CLOSE, 1007)
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []
