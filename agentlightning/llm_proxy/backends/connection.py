"""One HTTP request to one backend, and the response with its body as it arrives.

Nothing is retried here and nothing is raised for a backend that fails before its response begins: the outcome is a
value, with a message that holds no secrets. Bodies are bytes that are never looked into. A response holds its place in
the backend's limits and a connection until its body has come to an end or it is closed.
"""

import asyncio
import contextlib
import functools
import sys
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Final, Literal, NamedTuple

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.client_reqrep import ClientRequest
from aiohttp.connector import Connection
from aiohttp.http import HttpProcessingError
from aiohttp.payload import BytesPayload
from aiohttp.tracing import Trace
from multidict import CIMultiDict

from agentlightning.asgi.bodies import Room
from agentlightning.llm_proxy.backends.backend import Backend, BackendBroken
from agentlightning.llm_proxy.backends.backend_call import BackendCall, PreparedRequest
from agentlightning.llm_proxy.backends.backend_state import BackendState

CONNECT_SECONDS: Final = 10.0
KEEP_ALIVE_SECONDS: Final = 15.0
_SERVER_ERRORS: Final = 500


class ResponseHead(NamedTuple):
    """A response that has begun."""

    status: int
    headers: Mapping[str, str]
    """Names in lower case."""
    chunks: AsyncIterator[bytes]
    """The body as it arrives, never empty parts; BackendBroken if it does not come to its end."""
    close: Callable[[], Awaitable[None]]
    """Give up the rest of the body, and the connection with it; also while a chunk is awaited."""
    reason: str = ""


LARGE_ANSWER_BYTES: Final = 8 * 1024**2
"""Above what a long stream with log-probabilities takes."""
MOST_LARGE_ANSWERS: Final = 2
"""Of one proxy, in memory at a time until they are recorded; further ones wait for their turn."""


class SendFailure(NamedTuple):
    """A request without a response."""

    message: str
    kind: Literal["refused", "stale", "dropped", "silent", "garbled"]
    """refused: nothing was sent; stale: a kept connection had been closed; the others may have been worked on."""


class BackendResponse:
    """The response to one call; whoever gets it closes it."""

    def __init__(
        self,
        head: ResponseHead,
        state: BackendState,
        *,
        backend: Backend,
        call: BackendCall,
        large_answers: Room,
    ) -> None:
        self.status = head.status
        self.headers = head.headers
        self.backend = backend
        """Under the requested model name."""
        self.call = call
        self._head = head
        self._state = state
        self._is_over = False
        self._large_answers = large_answers
        self._memory = contextlib.AsyncExitStack()

    async def read(self, limit: int | None = None) -> bytes:
        """The rest of the body; BackendBroken above `limit` bytes."""
        parts: list[bytes] = []
        size = 0
        async for part in self.chunks():
            parts.append(part)
            size += len(part)
            if limit is not None and size > limit:
                await self.close()
                message = f"Backend '{self.backend.name}' answered with more than {limit} bytes, which is the limit."
                raise BackendBroken(message, tries=self.call.tries)
        return b"".join(parts)

    async def chunks(self) -> AsyncIterator[bytes]:
        """The rest of the body as it arrives; BackendBroken if it does not come to its end.

        A large one waits in the middle until few others are kept in memory.
        """
        left = LARGE_ANSWER_BYTES
        try:
            while not self._is_over:
                yield (part := await self._head.chunks.__anext__())
                left -= len(part)
                if left <= 0:
                    left = sys.maxsize
                    await self._memory.enter_async_context(self._large_answers.taken(1))
        except StopAsyncIteration:
            if not self._is_over and self.status < _SERVER_ERRORS:
                self._state.breaker.complete()
            self._end()
        except BackendBroken as error:
            error.tries = [*self.call.tries]
            if not self._is_over:  # else it was closed under the reader
                self._state.fail(str(error))
            self._end()
            raise

    def use_tokens(self, count: int) -> None:
        """Count tokens for the backend's limit of tokens per minute."""
        self._state.admission.use_tokens(count)

    async def close(self) -> None:
        """Give back the place and the connection; a body left half-read takes its connection with it."""
        if not self._is_over:
            self._end()
            await self._head.close()

    async def __aenter__(self) -> "BackendResponse":
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._memory.aclose()
        await self.close()

    def _end(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._state.admission.release()


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
    """Connections that know whether they are new."""

    def __init__(self) -> None:
        super().__init__(limit=0, limit_per_host=0, keepalive_timeout=KEEP_ALIVE_SECONDS)
        self._factory = functools.partial(_Protocol, loop=self._loop)  # type: ignore[assignment]  # partial is invariant
        self._known: weakref.WeakSet[object] = weakref.WeakSet()

    async def connect(self, req: ClientRequest, traces: list[Trace], timeout: aiohttp.ClientTimeout) -> Connection:
        connection = await super().connect(req, traces, timeout)
        if isinstance(req.body, _Bytes):
            req.body.was_kept = connection.protocol in self._known
        self._known.add(connection.protocol)
        return connection


class HttpSender:
    """The connections of one pool, made with the first call."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None
        self._open: set[aiohttp.ClientResponse] = set()
        """Responses that have not come to their end."""
        self._is_closed = False

    def _connected(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=_Connector(), cookie_jar=aiohttp.DummyCookieJar(), trust_env=False
            )
        return self._session

    async def close(self) -> None:
        self._is_closed = True
        for response in self._open:
            response.close()  # whoever reads from it gets an error
        if self._session is not None:
            await self._session.close()

    async def send(self, backend: Backend, request: PreparedRequest) -> ResponseHead | SendFailure:
        """Send, and wait for the head of the response."""
        if self._is_closed:
            return SendFailure("was not called, since the proxy is closing", "refused")
        headers: CIMultiDict[str] = CIMultiDict(request.headers)
        headers.update({"Accept-Encoding": "identity", **backend.headers})
        body = _Bytes(request.body)
        try:
            response = await self._connected().post(
                request.url,
                data=body,
                headers=headers,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=backend.timeout),
                allow_redirects=False,
            )
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            return _failure_of(error, backend, was_kept=body.was_kept)
        response_headers = {name.lower(): value for name, value in response.headers.items()}
        if response_headers.pop("content-encoding", None) is not None:  # aiohttp has undone it
            response_headers.pop("content-length", None)
        self._open.add(response)

        async def close() -> None:
            self._open.discard(response)
            response.close()

        chunks = self._chunks(response, backend)
        return ResponseHead(response.status, response_headers, chunks, close, response.reason or "")

    async def _chunks(self, response: aiohttp.ClientResponse, backend: Backend) -> AsyncIterator[bytes]:
        try:
            while part := await response.content.readany():
                yield part
        except asyncio.TimeoutError:
            message = f"fell silent for {backend.timeout:g} s in the middle of an answer"
        except (aiohttp.ClientError, OSError) as error:
            message = f"broke off in the middle of an answer ({_described(error)})"
            # For a connection that we closed aiohttp raises one object for ever, whose traceback would keep our frames.
            error.__traceback__ = None
        else:
            self._open.discard(response)
            return
        self._open.discard(response)
        response.close()
        raise BackendBroken(f"Backend '{backend.name}' {message}.")


def _failure_of(error: Exception, backend: Backend, *, was_kept: bool) -> SendFailure:
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return SendFailure(f"did not take the connection within {CONNECT_SECONDS:g} s", "refused")
    if isinstance(error, aiohttp.ClientConnectorError):
        return SendFailure(f"cannot be reached ({_described(error.os_error)})", "refused")
    if isinstance(error, asyncio.TimeoutError):
        return SendFailure(f"did not begin to answer within {backend.timeout:g} s", "silent")
    if isinstance(error, (aiohttp.ServerDisconnectedError, OSError)):
        message = f"closed the connection before answering ({_described(error)})"
        return SendFailure(message, "stale" if was_kept else "dropped")
    return SendFailure(f"did not answer as HTTP demands ({_described(error)})", "garbled")


def _described(error: BaseException) -> str:
    """The error in one line; never its repr, which for some shows the headers of the request."""
    text = str(error).partition("\n")[0] if not isinstance(error, aiohttp.ClientResponseError) else error.message
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
