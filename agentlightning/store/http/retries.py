"""How long a client goes on asking: which failures pass, and how an outage is ridden out.

A request that failed in passing is sent again after each of the retry delays, once the server answers its health check.
A server that cannot be reached is waited for, up to `outage_seconds` from the first failure; with an outage of 0 the
health check is tried after each of its delays and then given up.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import aiohttp

from agentlightning.errors import IncompatibleStore, StoreUnavailable
from agentlightning.store.http.websocket import ConnectionLost

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

DEFAULT_RETRY_DELAYS = (1.0, 2.0, 5.0)
DEFAULT_HEALTH_RETRY_DELAYS = (0.1, 0.2, 0.5)
DEFAULT_OUTAGE_SECONDS = 60.0
WAITED_SECONDS = 0.1
"""An attempt that reached the server and lasted longer than this had begun to wait there."""
_REQUEST_TIMEOUT = 408
_SERVER_ERRORS = 500


class Garbled(ConnectionError):
    """An answer that cannot be read; told to the retry loop, never raised to a user."""


_PASSING = (
    aiohttp.ServerDisconnectedError,
    aiohttp.ClientOSError,
    aiohttp.ClientPayloadError,
    asyncio.TimeoutError,
    ConnectionLost,
    Garbled,
    StoreUnavailable,
)


def is_passing(error: BaseException) -> bool:
    """Whether the same request may succeed a little later."""
    if isinstance(error, IncompatibleStore):
        return False
    if isinstance(error, aiohttp.ClientResponseError):
        return error.status == _REQUEST_TIMEOUT or error.status >= _SERVER_ERRORS
    return isinstance(error, _PASSING)


@dataclass(frozen=True)
class RetryPolicy:
    """The patience of one client."""

    retry_delays: Sequence[float] = DEFAULT_RETRY_DELAYS
    health_retry_delays: Sequence[float] = DEFAULT_HEALTH_RETRY_DELAYS
    outage_seconds: float = DEFAULT_OUTAGE_SECONDS

    def within(self, seconds: float) -> "RetryPolicy":
        """The same, for a call that should be over by then."""
        return replace(self, outage_seconds=min(seconds, self.outage_seconds))

    async def persist(
        self,
        attempt: Callable[[], Awaitable[ResultT]],
        is_healthy: Callable[[], Awaitable[bool]],
        *,
        waits: bool = False,
    ) -> ResultT:
        """Attempt until it succeeds, fails for good, or patience ends.

        An attempt that `waits` and had waited for a while was no failure: patience begins anew with its end.
        """
        outage_ends: float | None = None
        delays = iter(self.retry_delays)
        while True:
            began = time.monotonic()
            try:
                return await attempt()
            except Exception as error:
                if not is_passing(error):
                    raise
                had_arrived = not isinstance(error, (aiohttp.ClientConnectorError, asyncio.TimeoutError))
                if waits and had_arrived and time.monotonic() - began > WAITED_SECONDS:
                    outage_ends, delays = None, iter(self.retry_delays)
                if outage_ends is None:
                    outage_ends = time.monotonic() + self.outage_seconds
                delay = next(delays, None)
                is_there = isinstance(error, (StoreUnavailable, aiohttp.ClientResponseError))  # and in trouble
                if delay is None and not is_there and time.monotonic() < outage_ends:
                    delay = max(self.retry_delays, default=None)
                if delay is None or not await self._recovers(is_healthy, outage_ends):
                    raise _given_up(error) from error
                logger.debug("Asking the store again in %s s after: %r", delay, error)
                await asyncio.sleep(delay)

    async def _recovers(self, is_healthy: Callable[[], Awaitable[bool]], outage_ends: float) -> bool:
        """Whether the server answers before patience ends."""
        delays = iter(self.health_retry_delays)
        longest = max(self.health_retry_delays, default=0.0)
        while not await is_healthy():
            delay = next(delays, None)
            if delay is None:
                if longest == 0.0 or time.monotonic() + longest > outage_ends:
                    return False
                delay = longest
            await asyncio.sleep(delay)
        return True


def _given_up(error: Exception) -> Exception:
    """What a user is told when patience has ended."""
    if isinstance(error, StoreUnavailable):
        return StoreUnavailable(str(error))
    if isinstance(error, aiohttp.ClientResponseError):
        return aiohttp.ClientResponseError(error.request_info, (), status=error.status, message=error.message)
    return StoreUnavailable(f"The store does not answer ({type(error).__name__}: {error}); is the server running?")
