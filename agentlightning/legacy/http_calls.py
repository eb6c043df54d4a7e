"""Every HTTP call a program makes, seen in the libraries that make it: http.client (and so urllib, urllib3 and
requests), aiohttp, httpx and httpx2.

Each hop of a redirect is a call of its own, and so is each attempt that a library makes again.
"""

import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from agentlightning.instrumentation.patch import Foreign, Original, Patch, PatchedCall
from agentlightning.instrumentation.steps import guarded


@dataclass(eq=False)
class HttpCall:
    """One request and what became of it; it grows until the program has read the response."""

    method: str
    url: str
    keeps_bodies: bool = False
    started_ns: int = field(default_factory=time.time_ns)
    last_seen_ns: int = field(default_factory=time.time_ns)
    """When something of it was last sent or read."""
    request_headers: list[tuple[str, str]] = field(default_factory=list)
    request_chunks: list[bytes] = field(default_factory=list)
    status_code: int = 0
    """0 while, or if, there is no response."""
    response_headers: list[tuple[str, str]] = field(default_factory=list)
    response_chunks: list[bytes] = field(default_factory=list)
    error: str | None = None
    has_sent_head: bool = False
    is_sending: bool = False
    """Sending may open the connection first, which may send something of its own to a proxy."""

    def send(self, data: Foreign) -> None:
        """A part of the body is sent."""
        self.last_seen_ns = time.time_ns()
        if self.keeps_bodies and isinstance(data, (bytes, bytearray, memoryview)):
            self.request_chunks.append(bytes(data))

    def answer(self, status_code: int, headers: Foreign) -> None:
        """The head of the response has come."""
        self.last_seen_ns = time.time_ns()
        self.status_code = status_code
        self.response_headers = _pairs(headers)

    def read(self, data: Foreign) -> None:
        """The program has read a part of the response's body."""
        self.last_seen_ns = time.time_ns()
        if self.keeps_bodies and data:
            self.response_chunks.append(bytes(data))

    def fail(self, error: BaseException) -> None:
        self.last_seen_ns = time.time_ns()
        self.error = f"{type(error).__name__}: {error}"


Begin = Callable[[str, str], HttpCall | None]
"""Begins the record of a call, by its method and address; None if nobody wants to know."""


def http_patches(begin: Begin) -> tuple[Patch, ...]:
    """One patch for each library, none of which is imported for it."""
    return (HttpClientPatch(begin), AiohttpPatch(begin), HttpxPatch(begin), Httpx2Patch(begin))


class _HttpPatch(Patch):
    def __init__(self, begin: Begin) -> None:
        super().__init__()
        self._begin = begin

    def begin(self, method: str, url: str, headers: Any = ()) -> HttpCall | None:
        """The record of a call that is made here."""
        call: HttpCall | None = None
        with guarded(self.name):
            call = self._begin(method, url)
            if call is not None:
                call.request_headers = _pairs(headers)
        return call


def _pairs(headers: Foreign) -> list[tuple[str, str]]:
    """Headers in any of the forms that libraries have."""
    items = headers.items() if hasattr(headers, "items") else headers
    return [(_text(name), _text(value)) for name, value in items]


def _text(value: Foreign) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)


# ---------------------------------------------------------------------- http.client, urllib, urllib3, requests


class HttpClientPatch(_HttpPatch):
    """http.client, on whose connections urllib, urllib3 and requests build."""

    name = "http.client"
    module = "http.client"

    def __init__(self, begin: Begin) -> None:
        super().__init__(begin)
        self._calls: weakref.WeakKeyDictionary[Foreign, HttpCall] = weakref.WeakKeyDictionary()  # by connection

    def change(self, module: ModuleType) -> None:
        connection = module.HTTPConnection
        self.replace(connection, "endheaders", self._endheaders)
        self.replace(connection, "send", self._send)
        self.replace(connection, "getresponse", self._getresponse)

    def _endheaders(self, original: Original, connection: Foreign, *args: object, **kwargs: object) -> Foreign:
        """The head of a request is complete, in the connection's buffer; it is sent now."""
        self._calls.pop(connection, None)
        call: HttpCall | None = None
        with guarded(self.name):
            head, *lines = [line.decode("latin-1") for line in connection._buffer]
            method, target, *_ = head.split(" ")
            headers = [(name, value.strip()) for name, _, value in (line.partition(":") for line in lines)]
            call = self.begin(method, _full_url(connection, target), headers)
        if call is not None:
            self._calls[connection] = call
        return _failing(call, original, connection, *args, **kwargs)

    def _send(self, original: Original, connection: Foreign, data: Foreign) -> Foreign:
        call = self._calls.get(connection)
        if call is None or call.is_sending:
            return original(connection, data)
        call.is_sending = True
        try:
            sent = _failing(call, original, connection, data)
        finally:
            call.is_sending = False
        if call.has_sent_head:
            call.send(data)
        call.has_sent_head = True
        return sent

    def _getresponse(self, original: Original, connection: Foreign, *args: object, **kwargs: object) -> Foreign:
        call = self._calls.pop(connection, None)
        response = _failing(call, original, connection, *args, **kwargs)
        if call is not None:
            with guarded(self.name):
                call.answer(response.status, response.getheaders())
                if response.fp is not None:
                    response.fp = _ReadFile(response.fp, call)
        return response


def _failing(call: HttpCall | None, function: Foreign, *args: object, **kwargs: object) -> Foreign:
    """Call a function of the library, and note what it raises."""
    try:
        return function(*args, **kwargs)
    except BaseException as error:
        if call is not None:
            call.fail(error)
        raise


def _full_url(connection: Foreign, target: str) -> str:
    if target.startswith(("http://", "https://")):  # a proxy is told the whole address
        return target
    default_port = connection.default_port
    host = getattr(connection, "_tunnel_host", None) or connection.host
    port = (getattr(connection, "_tunnel_port", None) or connection.port) if host else None
    scheme = "https" if default_port == 443 else "http"
    shown = f"[{host}]" if ":" in str(host) else host
    return f"{scheme}://{shown}{'' if port in (None, default_port) else f':{port}'}{target}"


class _ReadFile:
    """The file from which a response is read; what is read is told to the call."""

    def __init__(self, file: Foreign, call: HttpCall) -> None:
        self._file = file
        self._call = call

    def readinto(self, buffer: Foreign) -> Foreign:
        count = _failing(self._call, self._file.readinto, buffer)
        self._call.read(memoryview(buffer)[: count or 0])
        return count

    def __getattr__(self, name: str) -> Foreign:
        found = getattr(self._file, name)
        if name not in ("read", "read1", "readline"):
            return found

        def read(*args: object) -> Foreign:
            data = _failing(self._call, found, *args)
            self._call.read(data)
            return data

        return read


# ---------------------------------------------------------------------- httpx, httpx2


class HttpxPatch(_HttpPatch):
    """httpx, in the transports that reach a network; what a program answers itself is no HTTP call."""

    name = "httpx"
    module = "httpx"

    def change(self, module: ModuleType) -> None:
        if module.__name__ != self.module:  # httpx2 can stand in for httpx: then it is seen under its own name
            return
        self._read_stream = _stream_kind(module)
        self._not_read = module.RequestNotRead
        self.surround(module.HTTPTransport, "handle_request", self._handle)
        self.surround(module.AsyncHTTPTransport, "handle_async_request", self._handle)

    @contextmanager
    def _handle(self, _original: object, transport: Foreign, request: Foreign) -> Iterator[PatchedCall]:
        call, made = self._begun(request), PatchedCall((transport, request))
        try:
            yield made
        except BaseException as error:
            if call is not None:
                call.fail(error)
            raise
        if call is not None:
            with guarded(self.name):
                call.answer(made.result.status_code, made.result.headers.multi_items())
                made.result.stream = self._read_stream(made.result.stream, call.read)

    def _begun(self, request: Foreign) -> HttpCall | None:
        call = self.begin(request.method, str(request.url), request.headers.multi_items())
        if call is not None:
            with suppress(self._not_read):  # a body that is made while it is sent is not kept
                call.send(request.content)
        return call


class Httpx2Patch(HttpxPatch):
    """httpx2, which has the interface of httpx."""

    name = "httpx2"
    module = "httpx2"


def _stream_kind(module: Foreign) -> type:
    """A kind of stream that tells what is read from another one."""

    class ReadStream(module.SyncByteStream, module.AsyncByteStream):  # type: ignore[misc] # known at run time only
        def __init__(self, stream: Foreign, tell: Callable[[bytes], None]) -> None:
            self._stream, self._tell = stream, tell

        def __iter__(self) -> Iterator[bytes]:
            for part in self._stream:
                self._tell(part)
                yield part

        def close(self) -> None:
            self._stream.close()

        async def __aiter__(self) -> AsyncIterator[bytes]:
            async for part in self._stream:
                self._tell(part)
                yield part

        async def aclose(self) -> None:
            await self._stream.aclose()

    return ReadStream


# ---------------------------------------------------------------------- aiohttp


class AiohttpPatch(_HttpPatch):
    """aiohttp, through its own signals, which every session gets with its next request."""

    name = "aiohttp"
    module = "aiohttp"

    def change(self, module: ModuleType) -> None:
        self._config = self._signals(module)
        self._sessions: weakref.WeakSet[Foreign] = weakref.WeakSet()
        self.when_undone(self._leave_sessions)
        self.replace(module.ClientSession, "_request", self._request)

    async def _request(self, original: Original, session: Foreign, *args: object, **kwargs: object) -> Foreign:
        if session not in self._sessions:
            with guarded(self.name):
                session.trace_configs.append(self._config)
                self._sessions.add(session)
        return await original(session, *args, **kwargs)

    def _leave_sessions(self) -> None:
        for session in list(self._sessions):
            with suppress(ValueError):  # the program took it away
                session.trace_configs.remove(self._config)

    def _signals(self, module: Foreign) -> Foreign:
        config = module.TraceConfig()
        for signal, receiver in (
            (config.on_request_start, self._on_start),
            (config.on_request_headers_sent, self._on_headers),
            (config.on_request_chunk_sent, self._noting(lambda call, params: call.send(params.chunk))),
            (config.on_request_redirect, self._on_redirect),
            (config.on_request_end, self._noting(_answer)),
            (config.on_response_chunk_received, self._noting(lambda call, params: call.read(params.chunk))),
            (config.on_request_exception, self._noting(lambda call, params: call.fail(params.exception))),
        ):
            signal.append(receiver)
        config.freeze()
        return config

    async def _on_start(self, _session: Foreign, context: Foreign, params: Foreign) -> None:
        context.is_redirected = False
        context.call = self.begin(params.method, str(params.url), params.headers)

    async def _on_headers(self, _session: Foreign, context: Foreign, params: Foreign) -> None:
        if context.is_redirected and context.call is not None:
            context.is_redirected = False
            context.call = self.begin(params.method, str(params.url))
        if context.call is not None:  # of a request that is made again, these are the last
            context.call.method, context.call.url = params.method, str(params.url)
            context.call.request_headers = _pairs(params.headers)
            context.call.request_chunks.clear()

    async def _on_redirect(self, session: Foreign, context: Foreign, params: Foreign) -> None:
        context.is_redirected = True
        await self._noting(_answer)(session, context, params)

    def _noting(
        self, note: Callable[[HttpCall, Foreign], None]
    ) -> Callable[[object, Foreign, Foreign], Awaitable[None]]:
        """A receiver that notes something about the call, if it is recorded."""

        async def receive(_session: Foreign, context: Foreign, params: Foreign) -> None:
            if context.call is not None:
                with guarded(self.name):
                    note(context.call, params)

        return receive


def _answer(call: HttpCall, params: Foreign) -> None:
    call.answer(params.response.status, params.response.headers)
