"""A client's connections in one event loop: an HTTP session, and the live channel once it is worth having.

The first calls travel by HTTP, which needs nothing set up; a client that keeps calling, waits or subscribes opens the
live channel. Where a WebSocket cannot be had, everything goes on by HTTP, and what waits becomes long polls.
"""

import asyncio
import itertools
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp
import yarl

from agentlightning.asgi.compression import COMPRESS_FROM_BYTES, compressed
from agentlightning.errors import InvalidToken, InvalidValue
from agentlightning.store.http.codec import MOST_FRAME_BYTES, OperationCodec, parse_json
from agentlightning.store.http.failures import Failure, exception_of
from agentlightning.store.http.retries import Garbled
from agentlightning.store.http.routes import LIVE_PATH, path_of, result_of
from agentlightning.store.http.websocket import LiveChannel
from agentlightning.utils.server_launcher import is_loopback

__all__ = ["Address", "ClientConnection", "Transport"]

logger = logging.getLogger(__name__)

Transport = Literal["auto", "http", "ws"]

LIVE_AFTER_CALLS = 16
"""Calls of one loop by HTTP before the live channel is opened."""
NO_LIVE_SECONDS = 60.0
"""How long after a refused WebSocket no other is tried."""
_ERRORS_FROM = 400
_SERVER_ERRORS_FROM = 500


@dataclass(frozen=True)
class Address:
    """Where a store server is and how to speak to it."""

    url: str
    token: str | None = field(repr=False)
    request_timeout: float
    connection_timeout: float
    transport: Transport

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.token is None else {"Authorization": f"Bearer {self.token}"}

    @property
    def is_near(self) -> bool:
        """Whether it is on this machine, where compressing costs more than it saves."""
        return is_loopback(yarl.URL(self.url).host or "")


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
            headers=address.headers,
            connector=aiohttp.TCPConnector(limit=0),  # long polls must not keep other calls waiting
        )
        self._prefix = secrets.token_hex(16)
        self._numbers = itertools.count(1)
        self._calls = 0
        self._channel: LiveChannel | None = None
        self._opening = asyncio.Lock()  # protects `_channel`: one handshake at a time
        self._no_live_before = 0.0
        self._beginnings: set[asyncio.Future[None]] = set()
        self._keeper: AsyncGenerator[None, None] | None = None

    async def close_with_loop(self) -> None:
        """Have the connections closed when the loop ends, for a loop that ends before the client is closed.

        A loop closes the asynchronous generators that are still open when it shuts down; this is one.
        """
        if self._keeper is None:
            self._keeper = self._keep()
            await self._keeper.__anext__()

    async def _keep(self) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            await self._disconnect()

    async def close(self) -> None:
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            await keeper.aclose()
        await self._disconnect()

    async def _disconnect(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()
        await self.session.close()

    def new_id(self) -> str:
        """An id under which no other call of anybody is given anything."""
        return f"{self._prefix}-{next(self._numbers)}"

    # ------------------------------------------------------------------ one call

    async def call(self, codec: OperationCodec, arguments: Mapping[str, Any], *, wait: float | None = 0.0) -> Any:
        """Send an operation once, by whichever way is open; `wait` is how long it may take by itself, None for ever."""
        if self._keeper is None:
            await self.close_with_loop()
        if self._beginnings:
            await asyncio.wait(tuple(self._beginnings))
        self._calls += 1
        channel = await self.live(wanted=wait != 0.0 or self._calls > LIVE_AFTER_CALLS)
        timeout = None if wait is None else wait + self.address.request_timeout
        if channel is not None:
            encoded = codec.encode_arguments(arguments)
            if len(encoded) < MOST_FRAME_BYTES:  # a larger one would hold up the others
                return await channel.call(codec, arguments, encoded, timeout_seconds=timeout)
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
        try:
            return await LiveChannel.open(
                self.session,
                self.address.url + LIVE_PATH,
                timeout_seconds=self.address.connection_timeout,
                compresses=not self.address.is_near,
            )
        except aiohttp.WSServerHandshakeError as error:
            if error.status == InvalidToken.http_status:
                raise InvalidToken("The store server refuses this token; give a valid one.") from error
            if self.address.transport == "ws":
                raise
            logger.info("The store server takes no WebSocket (%s); calls go on by HTTP.", error.status)
            self._no_live_before = time.monotonic() + NO_LIVE_SECONDS
            return None

    # ------------------------------------------------------------------ HTTP

    async def _request(self, codec: OperationCodec, arguments: dict[str, Any], timeout: float | None) -> Any:
        route, given = codec.op.route, dict(arguments)
        path = path_of(route.path, arguments)
        headers = {} if codec.op.echoes is None else {"Prefer": "return=minimal"}
        options: dict[str, Any] = {"headers": headers}
        if timeout is not None and timeout > self.address.request_timeout:
            options["timeout"] = aiohttp.ClientTimeout(total=timeout, connect=self.address.connection_timeout)
        if route.verb == "GET":
            url = self._url(path, arguments)
            sending = self.session.get(url, **options)
        else:
            body = codec.encode_argument(route.body, arguments.pop(route.body)) if route.body is not None else None
            url = self._url(path, arguments if route.body is not None else {})
            body = codec.encode_arguments(arguments) if body is None else body
            headers["Content-Type"] = "application/json"
            if len(body) > COMPRESS_FROM_BYTES:
                body, headers["Content-Encoding"] = compressed(body), "gzip"
            sending = self.session.post(url, data=body, **options)
        async with sending as response:
            parsed = await _parsed(response)
        return codec.decode_brief(result_of(codec.op.name, parsed), given)

    def _url(self, path: str, query: Mapping[str, Any]) -> yarl.URL:
        url = yarl.URL(self.address.url + path, encoded=True)
        given = {name: _as_text(value) for name, value in query.items() if value is not None}
        return url.with_query(given) if given else url

    async def get(self, path: str, query: Sequence[tuple[str, str]], *, timeout: float) -> Any:
        """A route that is no operation."""
        limit = aiohttp.ClientTimeout(total=timeout, connect=self.address.connection_timeout)
        url = yarl.URL(self.address.url + path).with_query(list(query))
        async with self.session.get(url, timeout=limit) as response:
            return await _parsed(response)

    async def is_healthy(self) -> bool:
        """Whether the server answers its health check, if only to refuse it."""
        try:
            limit = aiohttp.ClientTimeout(total=self.address.connection_timeout)
            async with self.session.get(f"{self.address.url}/health", timeout=limit) as response:
                return response.status < _SERVER_ERRORS_FROM
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError):
            return False


async def _parsed(response: aiohttp.ClientResponse) -> Any:
    """The JSON of an answer; an answer that reports a failure is raised as what it reports."""
    if response.status >= _ERRORS_FROM:
        raise exception_of(await _failure(response), response.request_info)
    try:
        return parse_json(await response.read())
    except InvalidValue as error:
        raise Garbled(str(error)) from error


async def _failure(response: aiohttp.ClientResponse) -> Failure:
    text = await response.text(errors="replace")
    try:
        told = parse_json(text)
        return Failure(response.status, str(told["error_type"]), told["detail"])
    except (InvalidValue, TypeError, KeyError):
        return Failure(response.status, response.reason or "Error", text[:500])


def _as_text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
