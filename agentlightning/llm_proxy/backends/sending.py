"""One try: a request to one backend over the fleet's connections, and what came of it.

Nothing is retried here and nothing is raised for a backend that fails: the outcome is a value, in words that hold no
secrets. Bodies are bytes that are never looked into.
"""

import asyncio
import functools
import weakref
from dataclasses import dataclass
from typing import Any, Final, Literal

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.client_reqrep import ClientRequest
from aiohttp.connector import Connection
from aiohttp.http import HttpProcessingError
from aiohttp.payload import BytesPayload
from aiohttp.tracing import Trace
from multidict import CIMultiDict

from agentlightning.llm_proxy.backends.answer import Reply
from agentlightning.llm_proxy.backends.asking import Outgoing
from agentlightning.llm_proxy.backends.backend import Backend
from agentlightning.llm_proxy.backends.errors import BackendBroken
from agentlightning.llm_proxy.backends.lane import CONNECT_SECONDS, Lane

__all__ = ["Failure", "Sender"]

KEEP_ALIVE_SECONDS: Final = 15.0
_DECODED_HEADERS: Final = ("content-encoding", "content-length")

FailureKind = Literal["refused", "stale", "dropped", "silent", "garbled"]


@dataclass(frozen=True)
class Failure:
    """A try without an answer."""

    words: str
    """What happened, in the form of "did this"."""
    kind: FailureKind
    """refused: nothing was sent; stale: a kept connection had been closed; the others may have been worked on."""

    @property
    def is_curable(self) -> bool:
        """Whether the backend is well again once it can be reached."""
        return self.kind in ("refused", "dropped")


class _Bytes(BytesPayload):
    """A body that may be large, and learns whether it went over a connection that had been used before."""

    was_kept = False

    def __init__(self, value: bytes) -> None:
        # Past the constructor of BytesPayload, which warns of large bodies that were not read from a file.
        super(BytesPayload, self).__init__(value, content_type="application/json")
        self._size = len(value)


class _Protocol(ResponseHandler):
    """One connection, whose reader is told when the rest of a body is not HTTP.

    aiohttp's own parser forgets that for broken chunks: the reader would wait for ever, for its time-out ends with the
    connection.
    """

    def set_exception(self, exc: BaseException, *causes: BaseException) -> None:
        payload = self._payload
        super().set_exception(exc, *causes)
        if isinstance(exc, HttpProcessingError) and payload is not None and not payload.is_eof():
            payload.set_exception(aiohttp.ClientPayloadError(exc.message))


class _Connector(aiohttp.TCPConnector):
    """Connections that say whether they are new."""

    def __init__(self) -> None:
        super().__init__(limit=0, limit_per_host=0, keepalive_timeout=KEEP_ALIVE_SECONDS)
        self._factory = functools.partial(_Protocol, loop=self._loop)  # type: ignore[assignment]  # partial is invariant
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    async def connect(self, req: ClientRequest, traces: list[Trace], timeout: aiohttp.ClientTimeout) -> Connection:
        connection = await super().connect(req, traces, timeout)
        protocol = connection.protocol
        if protocol in self._known:
            if isinstance(req.body, _Bytes):
                req.body.was_kept = True
        else:
            self._known.add(protocol)
        return connection


class _HttpBody:
    """The body of an answer that comes over HTTP."""

    __slots__ = ("_backend", "_open", "_response")

    def __init__(self, response: aiohttp.ClientResponse, backend: Backend, open_bodies: "set[_HttpBody]") -> None:
        self._response = response
        self._backend = backend
        self._open = open_bodies
        open_bodies.add(self)

    async def next(self) -> bytes:
        try:
            part = await self._response.content.readany()
        except asyncio.TimeoutError:
            words = f"fell silent for {self._backend.timeout:g} s in the middle of an answer"
        except (aiohttp.ClientError, OSError) as error:
            words = f"broke off in the middle of an answer ({_words_of(error)})"
            # For a connection that we closed aiohttp raises one object for ever, whose traceback would keep our frames.
            error.__traceback__ = None
        else:
            if not part:
                self._open.discard(self)
            return part
        self.cut()
        raise BackendBroken(f"Backend '{self._backend.name}' {words}.")

    async def close(self) -> None:
        self.cut()

    def cut(self) -> None:
        """Close the connection; whoever is reading from it is told."""
        self._open.discard(self)
        self._response.close()


class Sender:
    """The connections of one fleet, made with the first call."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None
        self._bodies: set[_HttpBody] = set()
        """Of answers that have not come to their end."""
        self._is_closed = False

    @property
    def session(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=_Connector(),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
                trust_env=False,
            )
        return self._session

    async def close(self) -> None:
        self._is_closed = True
        for body in tuple(self._bodies):
            body.cut()
        if self._session is not None:
            await self._session.close()

    async def send(self, lane: Lane, backend: Backend, outgoing: Outgoing) -> Reply | Failure:
        """Send, and wait for the head of the answer."""
        if self._is_closed:
            return Failure("was not asked, since the proxy is closing", "refused")
        headers = lane.headers
        if outgoing.headers:
            headers = CIMultiDict(outgoing.headers)
            headers.update(lane.headers)
        body = _Bytes(outgoing.body)
        try:
            response = await self.session.post(
                outgoing.url or lane.url_of(backend, outgoing.dialect),
                data=body,
                headers=headers,
                timeout=lane.timeout,
                allow_redirects=False,
            )
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            return _failure_of(error, backend, was_kept=body.was_kept)
        reply_headers = {name.lower(): value for name, value in response.headers.items()}
        if "content-encoding" in reply_headers:  # aiohttp has undone it
            for name in _DECODED_HEADERS:
                reply_headers.pop(name, None)
        return Reply(
            response.status, reply_headers, _HttpBody(response, backend, self._bodies), reason=response.reason or ""
        )


def _failure_of(error: Exception, backend: Backend, *, was_kept: bool) -> Failure:
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return Failure(f"did not take the connection within {CONNECT_SECONDS:g} s", "refused")
    if isinstance(error, aiohttp.ClientConnectorError):
        return Failure(f"cannot be reached ({_words_of(error.os_error)})", "refused")
    if isinstance(error, asyncio.TimeoutError):
        return Failure(f"did not begin to answer within {backend.timeout:g} s", "silent")
    if isinstance(error, (aiohttp.ServerDisconnectedError, OSError)):
        return Failure(
            f"closed the connection before answering ({_words_of(error)})", "stale" if was_kept else "dropped"
        )
    return Failure(f"did not answer as HTTP demands ({_words_of(error)})", "garbled")


def _words_of(error: BaseException) -> str:
    """The error in one line; never its repr, which for some shows the headers of the request."""
    words = str(error).partition("\n")[0] if not isinstance(error, aiohttp.ClientResponseError) else error.message
    return f"{type(error).__name__}: {words}" if words else type(error).__name__
