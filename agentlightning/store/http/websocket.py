"""The live channel, client side: one WebSocket that carries the calls and subscriptions of one event loop.

Calls made in the same round of the loop share a frame. A channel lives as long as its connection: when that is lost,
every call in flight fails with `ConnectionLost`, and the client decides what to send again. `serve_live` describes the
messages.
"""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import aiohttp
import orjson

from agentlightning.asgi.compression import COMPRESS_FROM_BYTES, GZIP_MAGIC, compressed, decompressed
from agentlightning.store.http.codec import OperationCodec, as_notice, parse_json, take_frame
from agentlightning.store.http.failures import ConnectionLost, FailureReply, exception_of
from agentlightning.types import Notice

PING_SECONDS = 20.0
MOST_UNREAD_NOTICES = 10_000
_MOST_ANSWER_BYTES = 1 << 31
_CLOSE_SECONDS = 2.0
NoticeQueue = asyncio.Queue[Notice | Exception]


class LiveChannel:
    """One open WebSocket."""

    def __init__(self, socket: "aiohttp.ClientWebSocketResponse[bool]", url: str, *, compresses: bool) -> None:
        self._socket = socket
        self._url = url
        self._compresses = compresses
        self._loop = asyncio.get_running_loop()
        self._number = 0
        self._last_heard = 0.0
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._notices: dict[int, NoticeQueue] = {}
        self._unsent: list[bytes] = []
        self._sending: asyncio.Task[None] | None = None
        self._socket_closing: asyncio.Task[None] | None = None
        self._reading = asyncio.create_task(self._read(), name="agl-live-reader")
        self.is_open = True

    @classmethod
    async def open(
        cls, session: aiohttp.ClientSession, url: str, *, timeout_seconds: float, compresses: bool
    ) -> "LiveChannel":
        """Connect; raises what aiohttp raises."""
        connecting = session.ws_connect(
            url, params={"compact": "1"}, heartbeat=PING_SECONDS, max_msg_size=_MOST_ANSWER_BYTES
        )
        return cls(await asyncio.wait_for(connecting, timeout_seconds), url, compresses=compresses)

    async def close(self) -> None:
        """Close the connection; what is in flight fails."""
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        with suppress(aiohttp.ClientError, ConnectionError, asyncio.TimeoutError):
            await asyncio.wait_for(self._socket.close(), _CLOSE_SECONDS)

    # ------------------------------------------------------------------ calls

    async def call(
        self, codec: OperationCodec, arguments: Mapping[str, Any], encoded: bytes, *, timeout_seconds: float | None
    ) -> Any:
        """Run an operation on the server; `asyncio.TimeoutError` if no answer comes in time.

        `encoded` is the arguments as JSON.
        """
        number, answer = self._post(b'"op":"%b","args":%b' % (codec.op.name.encode(), encoded))
        # Cheaper than `asyncio.wait_for`, by half of what a call costs here.
        sent = self._loop.time()
        clock = None if timeout_seconds is None else self._loop.call_later(timeout_seconds, self._give_up, answer, sent)
        try:
            given = await answer
        except asyncio.CancelledError:
            self._enqueue(b'{"cancel":%d}' % number)
            raise
        finally:
            self._answers.pop(number, None)
            if clock is not None:
                clock.cancel()
        return codec.decode_brief(given, arguments)

    def _give_up(self, answer: "asyncio.Future[Any]", sent: float) -> None:
        """No answer came in time; a connection over which nothing came since may be dead, and is used no longer."""
        if answer.done():
            return
        answer.set_exception(asyncio.TimeoutError("The store did not answer in time."))
        if self._last_heard < sent:
            self._lose()
            self._socket_closing = self._loop.create_task(self.close(), name="agl-live-closer")

    async def subscribe(self, kinds: list[str] | None, after: int | None) -> "LiveSubscription":
        """Follow the store's changes."""
        number, answer = self._post(b'"subscribe":%b,"after":%b' % (orjson.dumps(kinds), orjson.dumps(after)))
        queue: NoticeQueue = asyncio.Queue()
        self._notices[number] = queue
        try:
            return LiveSubscription(self, number, await answer, queue)
        except BaseException:
            self.unsubscribe(number)
            raise
        finally:
            self._answers.pop(number, None)

    def unsubscribe(self, number: int) -> None:
        if self._notices.pop(number, None) is not None:
            self._enqueue(b'{"cancel":%d}' % number)

    def unsubscribe_soon(self, number: int) -> None:
        """The same, from any thread."""
        if number in self._notices:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self.unsubscribe, number)

    # ------------------------------------------------------------------ sending

    def _post(self, content: bytes) -> tuple[int, asyncio.Future[Any]]:
        if not self.is_open:
            raise ConnectionLost("The live connection is closed.")
        self._number += 1
        answer = self._answers[self._number] = self._loop.create_future()
        self._enqueue(b'{"id":%d,%b}' % (self._number, content))
        return self._number, answer

    def _enqueue(self, message: bytes) -> None:
        if self.is_open:
            self._unsent.append(message)
            if self._sending is None:
                self._sending = self._loop.create_task(self._send(), name="agl-live-sender")

    async def _send(self) -> None:
        """Send what has gathered; runs at the end of the round in which the first message was given."""
        try:
            while self._unsent:
                frame = take_frame(self._unsent)
                if self._compresses and len(frame) > COMPRESS_FROM_BYTES:
                    frame = compressed(frame)
                await self._socket.send_bytes(frame)
        except (aiohttp.ClientError, ConnectionError):
            self._lose()
        finally:
            self._sending = None

    # ------------------------------------------------------------------ reading

    async def _read(self) -> None:
        try:
            async for message in self._socket:
                if message.type not in (aiohttp.WSMsgType.BINARY, aiohttp.WSMsgType.TEXT):
                    break
                self._take(message.data)
        except (aiohttp.ClientError, ConnectionError, ValueError):
            pass  # a broken connection or a garbled frame ends the channel; the calls are told below
        finally:
            self._lose()

    def _take(self, frame: bytes | str) -> None:
        self._last_heard = self._loop.time()
        if isinstance(frame, bytes) and frame.startswith(GZIP_MAGIC):
            frame = decompressed(frame, _MOST_ANSWER_BYTES)
        for message in parse_json(frame):
            number = message["id"]
            if "notice" in message:
                self._take_notice(number, as_notice(message["notice"]))
            elif "error" in message:
                told = message["error"]
                failure = FailureReply(told["status"], told["error_type"], told["detail"])
                self._fail(number, exception_of(failure, "GET", self._url))
            elif (answer := self._answers.get(number)) is not None and not answer.done():
                answer.set_result(message["cursor"] if "cursor" in message else message["result"])

    def _take_notice(self, number: int, notice: Notice) -> None:
        """Keep a notice for its reader; one that reads too slowly must ask for the rest again."""
        queue = self._notices.get(number)
        if queue is None:
            return
        queue.put_nowait(notice)
        if queue.qsize() >= MOST_UNREAD_NOTICES:
            self.unsubscribe(number)
            queue.put_nowait(ConnectionLost("The notices were not read; they are asked for again."))

    def _fail(self, number: int, error: Exception) -> None:
        answer = self._answers.get(number)
        if answer is not None and not answer.done():
            answer.set_exception(error)
        elif (queue := self._notices.get(number)) is not None:
            queue.put_nowait(error)

    def _lose(self) -> None:
        """The connection is gone: everything in flight fails."""
        self.is_open = False
        for number in {*self._answers, *self._notices}:
            self._fail(number, ConnectionLost("The connection to the store was lost."))


class LiveSubscription:
    """Notices of one channel; ends with `ConnectionLost`."""

    def __init__(self, channel: LiveChannel, number: int, cursor: int, queue: NoticeQueue) -> None:
        self.cursor = cursor
        """Where the subscription began."""
        self._channel = channel
        self._number = number
        self._queue = queue

    async def next(self) -> Notice:
        following = await self._queue.get()
        if isinstance(following, Exception):
            raise following
        return following

    def close(self) -> None:
        self._channel.unsubscribe(self._number)

    def __del__(self) -> None:
        """A subscription that was dropped ends on the server too; the collector may run in any thread."""
        self._channel.unsubscribe_soon(self._number)
