"""A client's connections in one event loop: an HTTP session, the live channel once it is worth having, subscriptions.

The first calls travel by HTTP, which needs nothing set up; a client that keeps calling, waits or subscribes opens the
live channel. Where a WebSocket cannot be had, everything goes on by HTTP, and what waits becomes long polls.
"""

import asyncio
import itertools
import logging
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp
import yarl

from agentlightning.asgi.compression import COMPRESS_FROM_BYTES, THREAD_FROM_BYTES, compressed
from agentlightning.errors import InvalidToken, InvalidValue, StoreUnavailable
from agentlightning.store.http.codec import MOST_FRAME_BYTES, OperationCodec, as_notice, parse_json
from agentlightning.store.http.failures import FailureReply, exception_of
from agentlightning.store.http.retries import Garbled, RetryPolicy, is_passing
from agentlightning.store.http.routes import LIVE_PATH, NOTICES_PATH, path_of, result_of
from agentlightning.store.http.websocket import LiveChannel, LiveSubscription
from agentlightning.types import Notice
from agentlightning.utils.server_launcher import is_loopback

logger = logging.getLogger(__name__)

Transport = Literal["auto", "http", "ws"]

LIVE_AFTER_CALLS = 16
"""Calls of one loop by HTTP before the live channel is opened."""
NO_LIVE_SECONDS = 60.0
"""How long after a refused WebSocket no other is tried."""
TELL_SECONDS = 3.0
"""How long a server may be away before the user is told that calls wait for it."""
POLL_SECONDS = 20.0
"""How long one request waits for notices where there is no live channel."""
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


class ClientConnection:
    """The connections of one client in one loop."""

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
        self._calls = 0
        self._channel: LiveChannel | None = None
        self._opening = asyncio.Lock()  # protects `_channel`: one handshake at a time
        self._no_live_before = 0.0
        self._away_since: float | None = None
        self._is_told = False
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

    # ------------------------------------------------------------------ one call

    async def call(self, codec: OperationCodec, arguments: Mapping[str, object], *, wait: float | None = 0.0) -> Any:
        """Send an operation once, by whichever way is open; `wait` is how long it may take by itself, None for ever."""
        if self._keeper is None:
            self._keeper = self._keep()
            await self._keeper.__anext__()
        if self._beginnings:
            await asyncio.wait(tuple(self._beginnings))
        self._calls += 1
        channel = await self.live(wanted=wait != 0.0 or self._calls > LIVE_AFTER_CALLS)
        timeout = None if wait is None else wait + self.address.request_timeout
        if channel is not None:
            encoded = codec.encode_arguments(arguments)
            if len(encoded) < MOST_FRAME_BYTES:  # a larger one would hold up the others
                return await channel.call(codec, arguments, encoded, timeout_seconds=timeout)
            await asyncio.sleep(0)  # it is encoded once more, which takes a while again
        return await self._request(codec, dict(arguments), timeout)

    def hold_until(self, beginning: "asyncio.Future[None]") -> None:
        """Let further calls wait until a subscription tried to begin, so that it is told of what they change."""
        self._beginnings.add(beginning)
        beginning.add_done_callback(self._beginnings.discard)

    async def live(self, *, wanted: bool = True) -> LiveChannel | None:
        """The live channel, opened if that is wanted and possible."""
        channel = self._channel
        if channel is not None and channel.is_open:
            return channel
        if self.address.transport == "http" or not (wanted or self.address.transport == "ws"):
            return None
        async with self._opening:
            if self._channel is None or not self._channel.is_open:
                self._channel = await self._open_live()
            return self._channel

    async def _open_live(self) -> LiveChannel | None:
        if time.monotonic() < self._no_live_before:
            return None
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
                raise InvalidToken("The store server refuses this token; give a valid one.") from error
            if self.address.transport == "ws":
                raise
            logger.info("The store server takes no WebSocket (%s); calls go on by HTTP.", error.status)
            self._no_live_before = time.monotonic() + NO_LIVE_SECONDS
            return None
        except aiohttp.ClientConnectionError:
            self._check_open()
            raise

    # ------------------------------------------------------------------ HTTP

    async def _request(self, codec: OperationCodec, arguments: dict[str, object], timeout: float | None) -> object:
        route, given = codec.op.route, dict(arguments)
        path = path_of(route.path, arguments)
        headers = {} if codec.op.echoes is None else {"Prefer": "return=minimal"}
        body: bytes | None = None
        if route.verb == "POST":
            if route.body is not None:
                body = codec.encode_argument(route.body, arguments.pop(route.body))
            else:
                body, arguments = codec.encode_arguments(arguments), {}
            headers["Content-Type"] = "application/json"
            if len(body) > COMPRESS_FROM_BYTES:
                is_large = len(body) > THREAD_FROM_BYTES
                body = await asyncio.to_thread(compressed, body) if is_large else compressed(body)
                headers["Content-Encoding"] = "gzip"
        query = [(name, _as_text(value)) for name, value in arguments.items() if value is not None]
        parsed = await self._send(route.verb, path, query, timeout=timeout, data=body, headers=headers)
        return codec.decode_brief(result_of(codec.op.name, parsed), given)

    async def poll_notices(self, query: Sequence[tuple[str, str]]) -> Any:
        """Changes behind a cursor, for which the server waits a while."""
        return await self._send("GET", NOTICES_PATH, query, timeout=POLL_SECONDS + self.address.request_timeout)

    async def _send(
        self, verb: str, path: str, query: Sequence[tuple[str, str]], *, timeout: float | None, **options: Any
    ) -> object:
        """The JSON of an answer; an answer that reports a failure is raised as what it reports."""
        url = yarl.URL(self.address.url + path, encoded=True)
        if timeout is not None and timeout > self.address.request_timeout:
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
            raise Garbled(str(error)) from error

    def _check_open(self) -> None:
        if self.session.closed:
            raise StoreUnavailable(f"The client of {self.address.url} was closed during this call.")

    async def is_healthy(self) -> bool:
        """Whether the server answers its health check, if only to refuse it; one that stays away is logged once."""
        self._check_open()
        try:
            limit = aiohttp.ClientTimeout(total=self.address.connection_timeout)
            async with self.session.get(f"{self.address.url}/health", timeout=limit) as response:
                is_there = response.status < _SERVER_ERRORS_FROM
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError):
            is_there = False
        if is_there:
            self._away_since, self._is_told = None, False
            return True
        now = time.monotonic()
        self._away_since = now if self._away_since is None else self._away_since
        if now - self._away_since >= TELL_SECONDS and not self._is_told:
            self._is_told = True
            logger.warning("The store at %s does not answer, and calls wait for it; is it running?", self.address.url)
        return False


async def _failure(response: aiohttp.ClientResponse) -> FailureReply:
    text = await response.text(errors="replace")
    try:
        reported = parse_json(text)
        return FailureReply(response.status, str(reported["error_type"]), reported["detail"])
    except (InvalidValue, TypeError, KeyError):
        return FailureReply(response.status, response.reason or "Error", text[:_MOST_DETAIL_LETTERS])


def _as_text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


class RemoteSubscription(AsyncIterator[Notice]):
    """Notices for ever, over as many connections as it takes: those since it was made, or behind the cursor `after`."""

    def __init__(
        self, connection: ClientConnection, policy: RetryPolicy, kinds: Sequence[str], after: int | None
    ) -> None:
        self.cursor = after
        self._connection = connection
        self._policy = policy
        self._kinds = list(kinds)
        self._live: LiveSubscription | None = None
        self._polled: deque[Notice] = deque()
        self._is_tried: asyncio.Future[None] = connection.loop.create_future()
        # Begun at once: changes made after the call are told, however late the first one is asked for.
        self._beginning: asyncio.Task[None] | None = asyncio.create_task(self._begin())
        self._beginning.add_done_callback(lambda _: self._let_go())
        if after is None:
            connection.hold_until(self._is_tried)

    async def __anext__(self) -> Notice:
        if self._beginning is not None:
            await asyncio.shield(self._beginning)  # whose reader may lose patience without losing its place
            self._beginning = None
        while True:
            if self._polled:
                notice = self._polled.popleft()
            elif self._live is None:
                await self._begin()
                continue
            else:
                try:
                    notice = await self._live.next()
                except Exception as error:
                    if not is_passing(error):
                        raise
                    self._live = None
                    continue
            self.cursor = notice.cursor
            return notice

    async def aclose(self) -> None:
        """End the subscription."""
        if self._beginning is not None:
            self._beginning.cancel()
            await asyncio.gather(self._beginning, return_exceptions=True)
        if self._live is not None:
            self._live.close()
            self._live = None

    async def _begin(self) -> None:
        """Subscribe, or poll once where there is no live channel."""
        await self._policy.persist(self._attempt, self._connection.is_healthy)

    async def _attempt(self) -> None:
        try:
            channel = await self._connection.live()
            if channel is not None:
                self._live = await channel.subscribe(self._kinds, self.cursor)
                self.cursor = self._live.cursor
                return
            query = [("kinds", kind) for kind in self._kinds]
            if self.cursor is not None:
                query += [("after", str(self.cursor)), ("wait", str(POLL_SECONDS))]
            told = await self._connection.poll_notices(query)
            self._polled.extend(map(as_notice, told["notices"]))
            self.cursor = told["cursor"]
        finally:
            self._let_go()  # also if it failed: others must not wait for as long as this one tries

    def _let_go(self) -> None:
        if not self._is_tried.done():
            self._is_tried.set_result(None)
