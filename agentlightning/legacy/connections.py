"""Connections of a legacy client: one pooled session for synchronous code, one for each event loop.

A session of an event loop is kept open by an asynchronous generator. `asyncio.run` closes the generators of its loop,
so the session ends with its loop even if nobody calls `aclose`, and scripts that never heard of it stay clean.
"""

import asyncio
import threading
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field

import aiohttp
import requests

from agentlightning.errors import StoreUnavailable
from agentlightning.utils.once import fork_handlers

__all__ = ["Answer", "Connections", "Outgoing"]


@dataclass(frozen=True)
class Outgoing:
    """A request to be sent."""

    method: str
    url: str
    headers: Mapping[str, str]
    timeout_seconds: float
    body: bytes | None = None
    about: Sequence[str] = ()
    """The ids of the rollouts whose results it carries."""


@dataclass(frozen=True)
class Answer:
    """What came back."""

    status: int
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    """By lower-case name."""

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300


class Connections:
    """Sends requests; whatever keeps an answer from coming is raised as `StoreUnavailable`."""

    def __init__(self) -> None:
        self._opening = threading.Lock()  # protects the fields below
        self._session: requests.Session | None = None
        self._sessions_by_loop: dict[asyncio.AbstractEventLoop, _LoopSession] = {}
        self._is_closed = False

    def send(self, request: Outgoing) -> Answer:
        """Send a request and wait for its answer."""
        session = self._opened()
        try:
            response = session.request(
                request.method,
                request.url,
                data=request.body,
                headers=dict(request.headers),
                timeout=request.timeout_seconds,
            )
        except (requests.RequestException, ValueError) as error:
            raise _unanswered(request, error) from error
        return Answer(response.status_code, response.content, _lower_case(response.headers))

    async def send_async(self, request: Outgoing) -> Answer:
        """Send a request on the running loop's connections."""
        session = await self._opened_here()
        limit = aiohttp.ClientTimeout(total=request.timeout_seconds)
        try:
            async with session.request(
                request.method, request.url, data=request.body, headers=request.headers, timeout=limit
            ) as response:
                return Answer(response.status, await response.read(), _lower_case(response.headers))
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError) as error:
            raise _unanswered(request, error) from error

    def close(self) -> None:
        """Close what can be closed from here; sessions of other loops that are at rest end with their loops."""
        with self._opening:
            self._is_closed = True
            session, self._session = self._session, None
            by_loop, self._sessions_by_loop = self._sessions_by_loop, {}
        if session is not None:
            session.close()
        for loop, loop_session in by_loop.items():
            if loop.is_running():
                asyncio.run_coroutine_threadsafe(loop_session.close(), loop)

    async def aclose(self) -> None:
        """Close everything; the running loop's session is closed when this returns."""
        with self._opening:
            mine = self._sessions_by_loop.pop(asyncio.get_running_loop(), None)
        if mine is not None:
            await mine.close()
        self.close()

    # ------------------------------------------------------------------ opening

    def _opened(self) -> requests.Session:
        with self._opening:
            self._refuse_if_closed()
            if self._session is None:
                self._session = requests.Session()
                fork_handlers().add(self, _leave_behind)
            return self._session

    async def _opened_here(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        with self._opening:
            self._refuse_if_closed()
            for ended in [known for known in self._sessions_by_loop if known.is_closed()]:
                del self._sessions_by_loop[ended]
            loop_session = self._sessions_by_loop.setdefault(loop, _LoopSession())
        return await loop_session.opened()

    def _refuse_if_closed(self) -> None:
        if self._is_closed:
            raise StoreUnavailable("This client is closed; make a new one.")


class _LoopSession:
    """The session of one event loop."""

    def __init__(self) -> None:
        self._life: AsyncGenerator[aiohttp.ClientSession, None] | None = None
        self._session: aiohttp.ClientSession | None = None

    async def opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._life = _session_life()
            self._session = await self._life.__anext__()  # does not suspend, so nobody opens a second one meanwhile
        return self._session

    async def close(self) -> None:
        if self._life is not None:
            await self._life.aclose()


async def _session_life() -> AsyncGenerator[aiohttp.ClientSession, None]:
    session = aiohttp.ClientSession()
    try:
        yield session
    finally:
        await session.close()


def _lower_case(headers: Mapping[str, str]) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


def _unanswered(request: Outgoing, error: Exception) -> StoreUnavailable:
    reason = str(error) or type(error).__name__
    return StoreUnavailable(f"{request.method} {request.url} got no answer: {reason}")


def _leave_behind(connections: Connections) -> None:
    """In a forked child: the parent goes on using its sockets, so the child opens its own."""
    connections._opening = threading.Lock()
    connections._session = None
    connections._sessions_by_loop = {}
