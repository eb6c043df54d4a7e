"""The live channel, server side: one WebSocket for operations, subscriptions and what waits.

A frame is a JSON object or an array of them, as text, or as bytes with gzip around it or not. A client sends

    {"id": 1, "op": "dequeue_rollout", "args": {"wait": 60}}     an operation
    {"id": 2, "subscribe": ["rollout"], "after": 17}             notices behind a cursor, or from now on
    {"cancel": 1}                                                end of either

and is told, in any order,

    {"id": 1, "result": …}   or   {"id": 1, "error": {"status": 404, "error_type": "NotFound", "detail": "…"}}
    {"id": 2, "cursor": 17}, then {"id": 2, "notice": {…}} as changes are committed

Messages that are ready at the same time share a frame. A connection opened with `?compact=1` gets frames of bytes,
compressed if they cross a network, and answers in short where it knows the rest.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import orjson
from uvicorn.protocols.utils import ClientDisconnected

from agentlightning.asgi.answers import SHARE_BYTES, kind_of, patience_seconds
from agentlightning.asgi.bodies import SMALL_BYTES
from agentlightning.asgi.compression import COMPRESS_FROM_BYTES, GZIP_MAGIC, compressed, decompress, too_large
from agentlightning.asgi.protocol import Outbox
from agentlightning.asgi.request import Disconnected, Message, Receive, Request, Send
from agentlightning.errors import AgentLightningError, InvalidQuery, InvalidToken, InvalidValue, StoreUnavailable
from agentlightning.store.base import LightningStore
from agentlightning.store.http.codec import (
    MOST_FRAME_BYTES,
    OperationCodec,
    codec_of,
    encoded_notice,
    is_deep,
    parse_foreign_json,
    parse_json,
    take_frame,
    too_deep,
)
from agentlightning.store.http.failures import failure_of
from agentlightning.store.http.service import Caller, StoreService
from agentlightning.store.http.tokens import check_subscription
from agentlightning.store.operations import Operation, operations_of
from agentlightning.types import Notice, PaginatedResult
from agentlightning.utils.deadline import within
from agentlightning.utils.json_values import is_encodable
from agentlightning.utils.server_launcher import is_loopback

logger = logging.getLogger(__name__)

MOST_WAITING = 1024
"""Calls and subscriptions of one connection that wait; further ones are refused."""
MOST_BACKLOG_BYTES = 128 * 1024
"""Notices that are written for a subscriber before it reads; the others stay where all subscribers have them."""
PACE_SECONDS = 0.0004
"""For each subscription of the server, between two of the moments at which one is told of changes."""
STALL_SECONDS = 10.0
"""How long a subscriber may read nothing before it is told of a gap, in the place of what it missed."""
MOST_ITEMS_AT_ONCE = 50
"""Of a result that is encoded in the event loop; a longer one is encoded in a thread."""
MOST_CALLS = 256
"""Calls of one connection at work at a time, not counting those that wait; further ones are read when some are done."""
BEGUN_AT_ONCE = 8
"""Calls of a frame that are begun in one round of the loop: the first are answered while the next are at work."""
READS_AT_ONCE = 4
"""Calls of one connection that read, and are at work at a time."""
_BAD_FRAME = 1007
_POLICY_VIOLATION = 1008
_MOST_REASON_LETTERS = 100


async def serve_live(service: StoreService, scope: Any, receive: Receive, send: Send) -> None:
    """Serve one WebSocket from its handshake to its end."""
    request = Request(scope, receive)
    await receive()  # the announcement of the connection
    try:
        service.callers.check(scope)
        caller = service.caller(request.header(b"authorization"))
    except AgentLightningError as error:
        await _deny(request, send, error)
        return
    await send({"type": "websocket.accept"})
    service.live_connections += 1
    try:
        await _LiveConnection(service, caller, request, send).serve()
    finally:
        service.live_connections -= 1


async def _deny(request: Request, send: Send, error: AgentLightningError) -> None:
    """Refuse the handshake, with the reason where the server can send one."""
    if "websocket.http.response" not in request.scope.get("extensions", {}):
        await send({"type": "websocket.close", "reason": str(error)})
        return

    async def send_denial(message: Message) -> None:
        await send({**message, "type": f"websocket.{message['type']}"})

    await failure_of(error).response().send(send_denial)
    # uvicorn takes a refusal for unfinished business, and says so in its log; this tells it that the client is done.
    raise ClientDisconnected


class _LiveConnection:
    """One client's channel."""

    def __init__(self, service: StoreService, caller: Caller, request: Request, send: Send) -> None:
        client = request.scope.get("client") or ("", 0)
        self._service = service
        self._caller = caller
        self._receive = request.receive
        self._send = send
        self._is_compact = ("compact", "1") in request.query
        self._compresses = self._is_compact and not is_loopback(client[0])
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._has_room = asyncio.Event()
        self._unsent: list[bytes] = []
        self._unsent_bytes = 0
        self._has_unsent = asyncio.Event()
        self._is_sent = asyncio.Event()
        self._outbox = Outbox(request.scope)
        self._reads = asyncio.Semaphore(READS_AT_ONCE)
        self._has_ended = False
        self._waiting = 0
        self._paced_at = 0.0

    async def serve(self) -> None:
        writing = asyncio.create_task(self._write(), name="agl-live-writer")
        try:
            left = None if self._caller.expires_at is None else max(self._caller.expires_at - time.time(), 0.0)
            await asyncio.wait_for(self._read(), left)
        except (asyncio.TimeoutError, InvalidToken):
            await self._close(_POLICY_VIOLATION, "The token has expired.")
        except AgentLightningError as error:
            await self._close(_BAD_FRAME, str(error))
        finally:
            tasks = [*self._tasks.values(), writing]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _close(self, code: int, reason: str) -> None:
        logger.info("A live connection was closed: %s", reason)
        with suppress(RuntimeError):  # it is closed already
            await self._send({"type": "websocket.close", "code": code, "reason": reason[:_MOST_REASON_LETTERS]})

    # ------------------------------------------------------------------ reading

    async def _read(self) -> None:
        limit = self._caller.max_bytes
        while (received := await self._receive())["type"] == "websocket.receive":
            if self._caller.expires_at is not None and time.time() >= self._caller.expires_at:
                raise InvalidToken("The token has expired.")
            frame = received.get("bytes") or received.get("text") or b""
            if isinstance(frame, bytes) and frame.startswith(GZIP_MAGIC):
                frame = await decompress(frame, limit + MOST_FRAME_BYTES)
            frame = frame if isinstance(frame, bytes) else frame.encode()
            content = await self._service.bodies.parse(frame, parse_json if self._is_compact else parse_foreign_json)
            messages = content if isinstance(content, list) else [content]
            may_be_deep = is_deep(frame, content)
            for first in range(0, len(messages), BEGUN_AT_ONCE):
                for message in messages[first : first + BEGUN_AT_ONCE]:
                    self._begin(message, may_be_large=len(frame) > limit, may_be_deep=may_be_deep)
                await asyncio.sleep(0)  # lets the calls begin, and so show what they cost
                while not self._has_ended and (
                    len(self._tasks) - self._waiting >= MOST_CALLS or self._unread_bytes > SHARE_BYTES
                ):
                    self._has_room.clear()
                    await self._has_room.wait()

    def _begin(self, message: object, *, may_be_large: bool, may_be_deep: bool) -> None:
        if not isinstance(message, dict):
            raise InvalidValue("A message of the live channel must be a JSON object.")
        if "cancel" in message:
            number = message["cancel"]
            if not isinstance(number, int):
                raise InvalidValue(f"'cancel' must be the id of a message, a number; it is {number!r}.")
            if (task := self._tasks.get(number)) is not None:
                task.cancel()
            return
        number = message.get("id")
        if not isinstance(number, int):
            raise InvalidValue(f"A message needs an 'id', a number; it is {number!r}.")
        if number in self._tasks:
            return  # sent twice; the first one is answered
        if may_be_deep and not is_encodable(message.get("args")):
            self._tell_failure(number, too_deep())
            return
        if may_be_large and len(orjson.dumps(message)) > self._caller.max_bytes:
            self._tell_failure(number, too_large(self._caller.max_bytes))
            return
        if "subscribe" in message:
            work, waits = self._follow(number, message), True
        else:
            name, arguments = message.get("op"), message.get("args")
            op = operations_of(LightningStore).get(name) if isinstance(name, str) else None
            waits = op is not None and isinstance(arguments, dict) and op.may_wait(arguments)
            work = self._call(number, op, message, waits=waits)
        if waits and self._waiting >= MOST_WAITING:
            work.close()
            self._tell_failure(number, StoreUnavailable(f"{MOST_WAITING} calls of this connection wait already."))
            return
        self._waiting += waits
        task = self._tasks[number] = asyncio.create_task(work)
        task.add_done_callback(lambda _: self._end(number, waits))

    # ------------------------------------------------------------------ calls and subscriptions

    async def _call(self, number: int, op: Operation | None, message: dict[str, object], *, waits: bool) -> None:
        try:
            if op is None:
                raise InvalidQuery(f"There is no store operation '{message.get('op')}'.")
            codec, arguments = codec_of(op.name), message.get("args", {})
            call = self._caller.call_of(codec)
            if op.mutates:
                await self._tell_result(number, codec, await call(arguments))
            elif waits:
                result = await call(arguments)
                async with self._reads:
                    await self._until_unread(SHARE_BYTES)
                    await self._tell_result(number, codec, result)
            else:
                async with self._reads:
                    await self._until_unread(SHARE_BYTES)
                    await self._tell_read(number, codec, partial(call, arguments), kind_of(op.name, arguments))
        except Exception as error:  # noqa: BLE001 # the boundary: whatever happened, the client is told
            self._tell_failure(number, error)

    async def _tell_read(
        self, number: int, codec: OperationCodec, call: Callable[[], Awaitable[Any]], kind: str
    ) -> None:
        """Tell what a call reads; a large answer has its room until the client has read it, or has had time to."""
        answers = self._service.answers
        async with answers.room_for(kind) if codec.op.is_query else nullcontext():
            size = await self._tell_result(number, codec, await call())
            if codec.op.is_query:
                answers.count(kind, size)
            if size > SHARE_BYTES:
                with suppress(TimeoutError):
                    await within(patience_seconds(size), self._until_unread(SHARE_BYTES))

    async def _tell_result(self, number: int, codec: OperationCodec, result: Any) -> int:
        """Its size as JSON."""
        encode = codec.encode_brief if self._is_compact else codec.encode_result
        is_long = isinstance(result, (PaginatedResult, list)) and len(result) > MOST_ITEMS_AT_ONCE
        body = await asyncio.to_thread(encode, result) if is_long else encode(result)
        self._tell(b'{"id":%d,"result":%b}' % (number, body))
        return len(body)

    async def _follow(self, number: int, message: dict[str, object]) -> None:
        subscription: Any = None
        self._service.subscriptions += 1
        try:
            check_subscription(self._caller.scope)
            kinds, after = _subscription_of(message)
            subscription = self._service.store.subscribe(kinds, after=after)
            self._tell(b'{"id":%d,"cursor":%d}' % (number, subscription.cursor))
            while True:
                async for notice in subscription:
                    await self._pace()
                    self._tell_notice(number, notice)
                    if self._unread_bytes > MOST_BACKLOG_BYTES and not await self._is_read_in_time():
                        break
                else:
                    return
                await subscription.aclose()
                subscription = self._service.store.subscribe(kinds)
                self._tell_notice(number, Notice("gap", subscription.cursor))
        except Exception as error:  # noqa: BLE001 # the boundary: whatever happened, the client is told
            self._tell_failure(number, error)
        finally:
            self._service.subscriptions -= 1
            if subscription is not None:
                await subscription.aclose()

    async def _pace(self) -> None:
        """Let changes gather for a moment, the longer the more follow them: each is not worth a frame for everyone.

        Then wait for a turn, for what thousands of subscribers are told at once would hold up every other request. It
        lasts until the caller awaits something.
        """
        now, seconds = time.monotonic(), self._service.subscriptions * PACE_SECONDS
        if now - self._paced_at > seconds:
            await asyncio.sleep(seconds)
            await self._service.turns.acquire()
            asyncio.get_running_loop().call_soon(self._service.turns.release)
            self._paced_at = time.monotonic()

    async def _is_read_in_time(self) -> bool:
        """Wait until the client has read what was told to it; False if it took so long that it is to miss the rest."""
        began = time.monotonic()
        await self._until_unread(MOST_BACKLOG_BYTES)
        return time.monotonic() - began < STALL_SECONDS

    async def _until_unread(self, most_bytes: int) -> None:
        """Wait until the client has read all but so much of what was told to it."""
        while self._unread_bytes > most_bytes:
            self._is_sent.clear()
            await self._is_sent.wait()

    def _end(self, number: int, waited: bool) -> None:
        self._tasks.pop(number, None)
        self._waiting -= waited
        self._has_room.set()

    # ------------------------------------------------------------------ writing

    def _tell(self, message: bytes) -> None:
        self._unsent.append(message)
        self._unsent_bytes += len(message)
        self._has_unsent.set()

    def _tell_notice(self, number: int, notice: Notice) -> None:
        self._tell(b'{"id":%d,"notice":%b}' % (number, encoded_notice(notice)))

    def _tell_failure(self, number: int, error: Exception) -> None:
        self._tell(orjson.dumps({"id": number, "error": failure_of(error)}, default=str))

    @property
    def _unread_bytes(self) -> int:
        """What was told to the client and has not left this process."""
        return self._unsent_bytes + self._outbox.unsent_bytes()

    async def _write(self) -> None:
        """Send what is ready, as few frames as possible; a client that does not read it is disconnected."""
        try:
            while await self._has_unsent.wait():
                self._has_unsent.clear()
                while self._unsent:
                    await self._write_frame(take_frame(self._unsent))
        except Disconnected as error:
            logger.info("A live connection was closed: %s", error)
            await self._outbox.abort()
        finally:
            self._has_ended = True
            self._has_room.set()

    async def _write_frame(self, frame: bytes) -> None:
        if self._compresses and len(frame) > COMPRESS_FROM_BYTES:
            frame = compressed(frame)
        content = {"bytes": frame} if self._is_compact else {"text": frame.decode()}
        await self._send({"type": "websocket.send", **content})
        self._unsent_bytes = sum(map(len, self._unsent))
        if self._outbox.unsent_bytes() > SMALL_BYTES:
            await self._service.answers.until_read(self._outbox.unsent_bytes)
        self._is_sent.set()
        self._has_room.set()


def _subscription_of(message: Mapping[str, object]) -> tuple[list[Any] | None, int | None]:
    """The kinds and the cursor that a subscription asks for."""
    kinds, after = message["subscribe"], message.get("after")
    if kinds is not None and not (isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds)):
        raise InvalidQuery(f"'subscribe' must be a list of kinds, or null for all; it is {kinds!r}.")
    if after is not None and (isinstance(after, bool) or not isinstance(after, int)):
        raise InvalidQuery(f"'after' must be a cursor, a number; it is {after!r}.")
    return kinds, after
