"""A client's connection in one event loop: the live channel or, where a server takes no WebSocket, plain HTTP.

Which of the two it is, is decided when the client connects. A live channel that was lost is opened again. Over plain
HTTP each call is a request to its route, what waits becomes long polls, and changes are asked for once a second. Calls
that are too large for a frame are requests in either case.
"""

import asyncio
import itertools
import logging
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp
import yarl

from agentlightning.asgi.compression import COMPRESS_FROM_BYTES, THREAD_FROM_BYTES, compressed
from agentlightning.errors import InvalidToken, InvalidValue, StoreUnavailable
from agentlightning.store.http.codec import MOST_FRAME_BYTES, OperationCodec, as_notice, parse_json
from agentlightning.store.http.failures import (
    ConnectionLost,
    FailureReply,
    exception_of,
    is_outage,
    is_passing,
)
from agentlightning.store.http.routes import LIVE_PATH, NOTICES_PATH, path_of, result_of
from agentlightning.store.http.websocket import LiveChannel, LiveSubscription
from agentlightning.types import Notice
from agentlightning.utils.retries import RetryPolicy, retry
from agentlightning.utils.server_launcher import is_loopback

logger = logging.getLogger(__name__)

Transport = Literal["auto", "http", "ws"]

LONG_POLL_SECONDS = 20.0
"""How long one request waits over plain HTTP."""
POLL_SECONDS = 1.0
"""Between two questions for changes over plain HTTP."""
_OUTAGE_WARNING_SECONDS = 3.0
_ERRORS_FROM, _SERVER_ERRORS_FROM = 400, 500
_MOST_DETAIL_LETTERS = 500


@dataclass(frozen=True)
class Address:
    """Where a store server is and how to speak to it."""

    url: str
    token: str | None = field(repr=False)
    request_timeout: float
    connection_timeout: float
    transport: Transport
    health_delays: Sequence[float]
    """Seconds between health checks of a server that is away."""


class ClientConnection:
    """The connection of one client in one loop."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self.loop = asyncio.get_running_loop()
        self.session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(
                total=address.request_timeout,
                connect=address.connection_timeout,
                sock_connect=address.connection_timeout,
                sock_read=address.request_timeout,
            ),
            headers=None if address.token is None else {"Authorization": f"Bearer {address.token}"},
            connector=aiohttp.TCPConnector(limit=0),  # long polls must not keep other calls waiting
        )
        self._prefix = secrets.token_hex(16)
        self._slots = itertools.count(1)
        self._free_slots: list[Iterator[str]] = []
        self._is_plain = address.transport == "http"
        self._channel: LiveChannel | None = None
        self._opening = asyncio.Lock()  # protects `_channel`: one handshake at a time
        self._away_since: float | None = None
        self._has_warned = False
        self._beginnings: set[asyncio.Future[None]] = set()
        self._keeper: AsyncGenerator[None, None] | None = None

    async def _keep(self) -> AsyncGenerator[None, None]:
        """Close the connections when the loop ends before the client is closed.

        A loop closes the asynchronous generators that are still open when it shuts down; this is one.
        """
        try:
            yield
        finally:
            await self._disconnect()

    async def close(self) -> None:
        if self._keeper is not None:
            await self._keeper.aclose()
        await self._disconnect()

    async def _disconnect(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()
        await self.session.close()

    @contextmanager
    def claim_slot(self) -> Iterator[Iterator[str]]:
        """Ids of claims in a slot that no other call of anybody uses meanwhile; each has a higher counter."""
        if not self._free_slots:
            slot = f"{self._prefix}-{next(self._slots)}"
            self._free_slots.append(f"{slot}:{number}" for number in itertools.count(1))
        claim_ids = self._free_slots.pop()
        try:
            yield claim_ids
        finally:
            self._free_slots.append(claim_ids)

    # ------------------------------------------------------------------ connecting

    async def connected(self) -> LiveChannel | None:
        """The live channel, opened if there is none; None over plain HTTP."""
        if self._keeper is None:
            self._keeper = self._keep()
            await self._keeper.__anext__()
        if not self._is_ready:
            async with self._opening:
                if not self._is_ready:
                    self._channel = await self._open()
        return self._channel

    @property
    def _is_ready(self) -> bool:
        return self._is_plain or (self._channel is not None and self._channel.is_open)

    async def _open(self) -> LiveChannel | None:
        self._check_open()
        url = self.address.url
        try:
            return await LiveChannel.open(
                self.session,
                url + LIVE_PATH,
                timeout_seconds=self.address.connection_timeout,
                compresses=not is_loopback(yarl.URL(url).host or ""),  # here it costs more than it saves
            )
        except aiohttp.WSServerHandshakeError as error:
            if error.status == InvalidToken.http_status:
                await self.send("GET", LIVE_PATH, ())  # raises the reason, which does not come with a handshake
                raise InvalidToken("The store server refuses this token; give a valid one.") from error
            if self.address.transport == "ws" or not await self.is_healthy():
                raise
            logger.info("The store server takes no WebSocket (%s); calls go by HTTP.", error.status)
            self._is_plain = True
            return None
        except aiohttp.ClientConnectionError:
            self._check_open()
            raise

    # ------------------------------------------------------------------ one call

    async def call(self, codec: OperationCodec, arguments: Mapping[str, object], *, wait: float = 0.0) -> Any:
        """Send an operation once; `wait` is how long it may take by itself."""
        if self._beginnings:
            await asyncio.wait(tuple(self._beginnings))
        channel, timeout = await self.connected(), wait + self.address.request_timeout
        if channel is None:
            return await self._request(codec, dict(arguments), timeout)
        encoded = codec.encode_arguments(arguments)
        if len(encoded) < MOST_FRAME_BYTES:  # a larger one would hold up the others
            return await channel.call(codec, arguments, encoded, timeout_seconds=timeout)
        await asyncio.sleep(0)  # it may be encoded once more, which takes a while again
        return await self._request(codec, dict(arguments), timeout, encoded)

    async def call_patiently(
        self,
        codec: OperationCodec,
        arguments: dict[str, Any],
        argument: str,
        deadline: float,
        claim_ids: Iterator[str] | None = None,
    ) -> Any:
        """Call an operation that waits, until a deadline: over plain HTTP in parts, each a claim of its own.

        Args:
            argument: The one that says for how long.
        """
        while True:
            left = wait = max(deadline - time.monotonic(), 0.0)
            if await self.connected() is None:
                wait = min(left, LONG_POLL_SECONDS)
            arguments[argument] = wait
            began = time.monotonic()
            result = await self.call(codec, arguments, wait=wait)
            # An answer before its time is all there is to wait for.
            if wait == left or time.monotonic() - began < wait or (claim_ids is not None and result):
                return result
            if claim_ids is not None:
                arguments["claim_id"] = next(claim_ids)

    # ------------------------------------------------------------------ HTTP

    async def _request(
        self, codec: OperationCodec, arguments: dict[str, object], timeout: float, encoded: bytes | None = None
    ) -> object:
        route, given = codec.op.route, dict(arguments)
        path = path_of(route.path, arguments)
        headers = {} if codec.op.echoes is None else {"Prefer": "return=minimal"}
        body: bytes | None = None
        if route.verb == "POST":
            if route.body is not None:
                body = codec.encode_argument(route.body, arguments.pop(route.body))
            elif encoded is not None and len(arguments) == len(given):  # none of them stands in the path
                body, arguments = encoded, {}
            else:
                body, arguments = codec.encode_arguments(arguments), {}
            headers["Content-Type"] = "application/json"
            if len(body) > COMPRESS_FROM_BYTES:
                is_large = len(body) > THREAD_FROM_BYTES
                body = await asyncio.to_thread(compressed, body) if is_large else compressed(body)
                headers["Content-Encoding"] = "gzip"
        query = [
            (name, str(value).lower() if isinstance(value, bool) else str(value))
            for name, value in arguments.items()
            if value is not None
        ]
        parsed = await self.send(route.verb, path, query, timeout=timeout, data=body, headers=headers)
        return codec.decode_brief(result_of(codec.op.name, parsed), given)

    async def send(
        self, verb: str, path: str, query: Sequence[tuple[str, str]], *, timeout: float = 0.0, **options: Any
    ) -> Any:
        """The JSON of an answer; an answer that reports a failure is raised as what it reports."""
        url = yarl.URL(self.address.url + path, encoded=True)
        if timeout > self.address.request_timeout:
            options["timeout"] = aiohttp.ClientTimeout(total=timeout, connect=self.address.connection_timeout)
        request = self.session.get if verb == "GET" else self.session.post
        self._check_open()
        try:
            async with request(url.with_query(list(query)) if query else url, **options) as response:
                if response.status >= _ERRORS_FROM:
                    raise exception_of(await _failure(response), verb, str(response.url))
                body = await response.read()
        except aiohttp.ClientConnectionError:
            self._check_open()
            raise
        try:
            return parse_json(body)
        except InvalidValue as error:
            raise ConnectionLost(str(error)) from error

    def _check_open(self) -> None:
        if self.session.closed:
            raise StoreUnavailable(f"The client of {self.address.url} was closed during this call.")

    async def recovers(self, seconds: float) -> bool:
        """Wait until the server answers its health check; False if that outlasts the delays and so many seconds."""
        delays = self.address.health_delays
        policy = RetryPolicy(delays=delays, is_passing=is_outage, is_outage=is_outage, outage_seconds=seconds)
        try:
            await retry(self._check_health, policy)
        except ConnectionLost:
            return False
        return True

    async def _check_health(self) -> None:
        if not await self.is_healthy():
            raise ConnectionLost("The server does not answer its health check.")

    async def is_healthy(self) -> bool:
        """Whether the server answers its health check, if only to refuse it; one that stays away is logged once."""
        self._check_open()
        try:
            limit = aiohttp.ClientTimeout(total=self.address.connection_timeout)
            async with self.session.get(f"{self.address.url}/health", timeout=limit) as response:
                is_there = response.status < _SERVER_ERRORS_FROM
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError):
            is_there = False
        now = time.monotonic()
        if is_there:
            self._away_since, self._has_warned = None, False
        elif self._away_since is None:
            self._away_since = now
        elif now - self._away_since >= _OUTAGE_WARNING_SECONDS and not self._has_warned:
            self._has_warned = True
            logger.warning("The store at %s does not answer, and calls wait for it; is it running?", self.address.url)
        return is_there

    # ------------------------------------------------------------------ changes

    async def subscribe(self, kinds: list[str], after: int | None) -> "LiveSubscription | PolledNotices":
        """Follow changes behind a cursor, or from now on."""
        channel = await self.connected()
        if channel is not None:
            return await channel.subscribe(kinds, after)
        notices = PolledNotices(self, kinds, after)
        await notices.poll()
        return notices

    def hold_until(self, beginning: "asyncio.Future[None]") -> None:
        """Let further calls wait until a subscription tried to begin, so that it is told of what they change."""
        self._beginnings.add(beginning)
        beginning.add_done_callback(self._beginnings.discard)


async def _failure(response: aiohttp.ClientResponse) -> FailureReply:
    text = await response.text(errors="replace")
    try:
        reported = parse_json(text)
        return FailureReply(response.status, str(reported["error_type"]), reported["detail"])
    except (InvalidValue, TypeError, KeyError):
        return FailureReply(response.status, response.reason or "Error", text[:_MOST_DETAIL_LETTERS])


class PolledNotices:
    """Changes over plain HTTP."""

    def __init__(self, connection: ClientConnection, kinds: Sequence[str], cursor: int | None) -> None:
        self.cursor = cursor
        self._connection = connection
        self._kinds = [("kinds", kind) for kind in kinds]
        self._notices: deque[Notice] = deque()

    async def poll(self) -> None:
        after = [] if self.cursor is None else [("after", str(self.cursor))]
        answer = await self._connection.send("GET", NOTICES_PATH, [*self._kinds, *after])
        self._notices.extend(map(as_notice, answer["notices"]))
        self.cursor = answer["cursor"]

    async def next(self) -> Notice:
        while not self._notices:
            await asyncio.sleep(POLL_SECONDS)
            await self.poll()
        return self._notices.popleft()

    def close(self) -> None:
        """There is nothing to end on the server."""


class RemoteSubscription(AsyncIterator[Notice]):
    """Notices for ever, over as many connections as it takes: those since it was made, or behind the cursor `after`."""

    def __init__(
        self,
        connection: ClientConnection,
        persist: Callable[[Callable[[], Awaitable[None]]], Awaitable[None]],
        kinds: Sequence[str],
        after: int | None,
    ) -> None:
        self.cursor = after
        self._connection = connection
        self._persist = persist
        self._kinds = list(kinds)
        self._source: LiveSubscription | PolledNotices | None = None
        self._is_tried: asyncio.Future[None] = connection.loop.create_future()
        # Begun at once: changes made after the call are told, however late the first one is asked for.
        self._beginning: asyncio.Task[None] | None = asyncio.create_task(self._begin())
        self._beginning.add_done_callback(lambda _: self._release())
        if after is None:
            connection.hold_until(self._is_tried)

    async def __anext__(self) -> Notice:
        if self._beginning is not None:
            await asyncio.shield(self._beginning)  # whose reader may lose patience without losing its place
            self._beginning = None
        while True:
            if self._source is None:
                await self._begin()
                continue
            try:
                notice = await self._source.next()
            except Exception as error:
                if not is_passing(error):
                    raise
                self._source = None
            else:
                self.cursor = notice.cursor
                return notice

    async def aclose(self) -> None:
        """End the subscription."""
        if self._beginning is not None:
            self._beginning.cancel()
            await asyncio.gather(self._beginning, return_exceptions=True)
        if self._source is not None:
            self._source.close()
            self._source = None

    async def _begin(self) -> None:
        await self._persist(self._subscribe)

    async def _subscribe(self) -> None:
        try:
            self._source = await self._connection.subscribe(self._kinds, self.cursor)
            self.cursor = self._source.cursor
        finally:
            self._release()  # also if it failed: others must not wait for as long as this one tries

    def _release(self) -> None:
        if not self._is_tried.done():
            self._is_tried.set_result(None)
