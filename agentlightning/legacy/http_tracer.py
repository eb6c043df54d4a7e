"""HttpTracer: one span for each HTTP call a program makes, whatever it calls. Deprecated: `OtelTracer` sees what the
calls of models and tools mean.

A function can be run in a child process, so that the libraries of this process stay as they are and a call that hangs
can be ended.
"""

import asyncio
import contextlib
import contextvars
import inspect
import multiprocessing
import pickle
import time
import traceback
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import SpanKind, Status, StatusCode

from agentlightning.errors import TracingError
from agentlightning.instrumentation.registry import Instrumentation
from agentlightning.legacy.http_calls import HttpCall, http_patches
from agentlightning.tracer.binding import Binding, Recorder, current_binding, is_unobserved, observations, observe
from agentlightning.tracer.dummy import DummyTracer
from agentlightning.tracer.spans import core_fields_of, nanoseconds
from agentlightning.types import Span, SpanCoreFields
from agentlightning.utils.child_process import end_process, leave_with_parent
from agentlightning.utils.deprecation import deprecated
from agentlightning.utils.json_values import JsonObject
from agentlightning.utils.loop_thread import run_in_loop
from agentlightning.utils.once import once

_T = TypeVar("_T")

OWN_HEADER: Final = "x-agentlightning-client"
"""Sent as `true` by our own clients."""
_FIRST_ERROR_STATUS: Final = 400
_NANOSECONDS_IN_MILLISECOND: Final = 1_000_000
_ZLIB_OR_GZIP: Final = 32 + zlib.MAX_WBITS

_Entry = HttpCall | SpanCoreFields
"""What a trace holds: a call, or something that was emitted."""


class HttpTracer(DummyTracer):
    """Records HTTP(S) calls made with requests, urllib, urllib3, http.client, aiohttp, httpx and httpx2, and what is
    emitted. Deprecated.

    A call belongs to the trace of the task or thread that makes it; in a bare thread, to the only trace that is open.
    """

    def __init__(
        self,
        include_headers: bool = False,
        include_body: bool = False,
        include_agentlightning_requests: bool = False,
        subprocess_mode: bool = True,
        subprocess_timeout: float = 3600.0,
    ) -> None:
        """Nothing is recorded yet.

        Args:
            include_headers: Write headers to the spans, with whatever secrets they hold.
            include_body: Write bodies to the spans, as text; as far as the program reads them.
            include_agentlightning_requests: Record requests of our own clients too.
            subprocess_mode: Have `trace_run` and `trace_run_async` run the function in a child process.
            subprocess_timeout: Seconds after which the child process is ended.
        """
        deprecated("HttpTracer is deprecated; OtelTracer records the calls of models and tools, not only their HTTP.")
        super().__init__()
        self.include_headers = include_headers
        self.include_body = include_body
        self.include_agentlightning_requests = include_agentlightning_requests
        self.subprocess_mode = subprocess_mode
        self.subprocess_timeout = subprocess_timeout

    # ------------------------------------------------------------------ traces

    @asynccontextmanager
    async def trace_context(self, name: str | None = None, **kwargs: object) -> "AsyncIterator[_HttpTrace]":
        """Record what happens inside. Other arguments are accepted for the sake of callers of other tracers, and
        ignored: the spans go to no store."""
        with self._trace_context_sync(name) as trace:
            yield trace

    @contextmanager
    def _trace_context_sync(self, name: str | None = None, **kwargs: object) -> "Iterator[_HttpTrace]":
        trace = _HttpTrace(self, name)
        binding = Binding(self, trace)
        try:
            with observe(binding):
                _clients().acquire()
                try:
                    self._remember(binding)
                    yield trace
                finally:
                    _clients().release()
        finally:
            self._call_listeners(trace.as_stored)

    def _keep(self, span: ReadableSpan) -> None:
        trace_here = _trace_here()
        if trace_here is not None:
            trace_here.record_call(core_fields_of(span))

    # ------------------------------------------------------------------ functions

    def trace_run(self, func: Callable[..., _T], *args: object, **kwargs: object) -> _T:
        """Call a function and record what it does; with `subprocess_mode`, in a child process.

        What the child's function returns or raises is returned or raised here, and its trace is kept either way. It is
        started as `multiprocessing` is set to start processes: unless that is by forking, the function must be one that
        can be imported. TracingError if it takes longer than `subprocess_timeout`, if the process dies, or if what it
        returns cannot be pickled.
        """
        if not self.subprocess_mode:
            return super().trace_run(func, *args, **kwargs)
        result: _T = _ChildRun(self, func, args, kwargs).result()
        return result

    async def trace_run_async(self, func: Callable[..., Awaitable[_T]], *args: object, **kwargs: object) -> _T:
        """As `trace_run`, for a coroutine function; cancelling it kills the child process."""
        if not self.subprocess_mode:
            return await super().trace_run_async(func, *args, **kwargs)
        child = _ChildRun(self, func, args, kwargs)
        try:
            result: _T = await asyncio.to_thread(child.result)
            return result
        except asyncio.CancelledError:
            child.process.kill()
            raise


@once
def _clients() -> Instrumentation:
    """One per process, as the libraries it changes are; in use while a trace is open."""
    return Instrumentation(http_patches(_begin_call))


def _begin_call(method: str, url: str) -> HttpCall | None:
    trace_here = _trace_here()
    if trace_here is None:
        return None
    call = HttpCall(method, url, trace_here.keeps_bodies)
    trace_here.record_call(call)
    return call


def _trace_here() -> "_HttpTrace | None":
    """The trace of this context, or the only one of the process in a bare thread; None if it is another tracer's."""
    if is_unobserved():
        return None
    binding = current_binding() or observations().sole_binding()
    return binding.recorder if binding is not None and isinstance(binding.recorder, _HttpTrace) else None


# ---------------------------------------------------------------------- traces


class _HttpTrace(Recorder):
    """What one trace saw, in the order it began.

    A call is written down when it begins, and its span made when the trace is read: a response may be read long after
    it came.
    """

    def __init__(self, options: HttpTracer, name: str | None) -> None:
        super().__init__(name)
        self._options = options
        self._ids = RandomIdGenerator()
        self._trace_id = self._ids.generate_trace_id()
        self._entries: list[tuple[int, _Entry]] = []  # with the id of the span

    @property
    def keeps_bodies(self) -> bool:
        return self._options.include_body

    def record_call(self, call: _Entry) -> None:
        self._entries.append((self._ids.generate_span_id(), call))

    def entries(self) -> list[_Entry]:
        """Everything the trace holds, to be carried to another process."""
        return [entry for _, entry in self._entries]

    def spans(self) -> list[ReadableSpan]:
        """One for each call, and for each thing emitted, in the order they began; all of one trace id."""
        return [self._span_of(span_id, entry) for span_id, entry in list(self._entries) if self._shows(entry)]

    def as_stored(self) -> list[Span]:
        """The spans as a store would have them, numbered from 1."""
        return [Span.from_opentelemetry(span, "", "", number) for number, span in enumerate(self.spans(), start=1)]

    def _shows(self, entry: _Entry) -> bool:
        if self._options.include_agentlightning_requests or isinstance(entry, SpanCoreFields):
            return True
        return _headers(entry.request_headers).get(OWN_HEADER, "").lower() != "true"

    def _span_of(self, span_id: int, entry: _Entry) -> ReadableSpan:
        sampled = trace.TraceFlags(trace.TraceFlags.SAMPLED)
        context = trace.SpanContext(self._trace_id, span_id, is_remote=False, trace_flags=sampled)
        if isinstance(entry, SpanCoreFields):
            name, kind, attributes = entry.name, SpanKind.INTERNAL, entry.attributes
            status = Status(StatusCode[entry.status.status_code], entry.status.description)
            times = nanoseconds(entry.start_time), nanoseconds(entry.end_time)
        else:
            name, kind, attributes = f"HTTP {entry.method} {entry.url}", SpanKind.CLIENT, self._attributes_of(entry)
            refused = f"HTTP {entry.status_code}" if entry.status_code >= _FIRST_ERROR_STATUS else None
            fault = entry.error or refused
            status = Status(StatusCode.UNSET) if fault is None else Status(StatusCode.ERROR, fault)
            times = entry.started_ns, entry.last_seen_ns
        return ReadableSpan(
            name=name,
            context=context,
            resource=Resource.get_empty(),
            kind=kind,
            attributes=attributes,
            status=status,
            start_time=times[0],
            end_time=times[1],
        )

    def _attributes_of(self, call: HttpCall) -> JsonObject:
        address = urlsplit(call.url)
        attributes: JsonObject = {
            "http.method": call.method,
            "http.url": call.url,
            "http.target": address.path or "/",
            "http.host": address.netloc,
            "http.duration_ms": (call.last_seen_ns - call.started_ns) / _NANOSECONDS_IN_MILLISECOND,
        }
        if call.status_code > 0:
            attributes["http.status_code"] = call.status_code
        for kind, pairs, chunks in (
            ("request", call.request_headers, call.request_chunks),
            ("response", call.response_headers, call.response_chunks),
        ):
            headers = _headers(pairs)
            if self._options.include_headers:
                attributes |= {f"http.{kind}.header.{name}": value for name, value in headers.items()}
            if self._options.include_body and chunks:
                attributes[f"http.{kind}.body"] = _body(b"".join(chunks), headers)
        return attributes


def _headers(pairs: list[tuple[str, str]]) -> dict[str, str]:
    """By name in small letters; the values of one that occurs several times are joined."""
    headers: dict[str, str] = {}
    for name, value in pairs:
        key = name.lower()
        headers[key] = f"{headers[key]}, {value}" if key in headers else value
    return headers


def _body(data: bytes, headers: dict[str, str]) -> str:
    """A body as text, without the transfer's framing and compression; bytes that are no text are shown as escapes."""
    if "chunked" in headers.get("transfer-encoding", "").lower():
        data = _without_frames(data)
    if headers.get("content-encoding", "").lower() in ("gzip", "x-gzip", "deflate"):
        data = _inflated(data)
    return data.decode("utf-8", errors="backslashreplace")


def _without_frames(data: bytes) -> bytes:
    """The content of HTTP chunks; as it is, where a library has taken it out of them before."""
    content, rest = [], data
    while rest:
        head, separator, rest = rest.partition(b"\r\n")
        try:
            size = int(head.split(b";")[0], 16)
        except ValueError:
            return data
        if not separator:
            return data
        if size == 0:
            break
        content.append(rest[:size])
        rest = rest[size + 2 :]
    return b"".join(content)


def _inflated(data: bytes) -> bytes:
    """What was compressed; as it is, where a library has inflated it before."""
    for window_bits in (_ZLIB_OR_GZIP, -zlib.MAX_WBITS):
        try:
            return zlib.decompressobj(window_bits).decompress(data)
        except zlib.error:
            continue
    return data


# ---------------------------------------------------------------------- child processes


@dataclass
class _Outcome:
    """What the child sends back."""

    value: Any = None
    error: BaseException | None = None
    traceback: str = ""
    """Of the error, as the child saw it."""
    entries: list[_Entry] = field(default_factory=list)


class _InChildProcess(Exception):
    """The cause of an error that was raised in a child process: where it came from there."""


class _ChildRun:
    """One call of a function in a process of its own; started at once."""

    def __init__(self, tracer: HttpTracer, func: Callable[..., Any], args: tuple[Any, ...], kwargs: JsonObject) -> None:
        self.name = getattr(func, "__name__", type(func).__name__)
        self._trace = _HttpTrace(tracer, self.name)
        self._tracer = tracer
        tracer._remember(Binding(tracer, self._trace))
        self._deadline = time.monotonic() + tracer.subprocess_timeout
        context = multiprocessing.get_context()
        self._receiver, sender = context.Pipe(duplex=False)
        self.process = context.Process(
            target=_work, args=(tracer, func, args, kwargs, sender), name=f"AgentLightning-HttpTracer-{self.name}"
        )
        try:
            self.process.start()
        finally:
            sender.close()  # so that the end of the child is the end of the pipe

    def result(self) -> Any:
        """Wait for the child, no longer than the tracer allows; what its function returned, or raise what it raised."""
        try:
            outcome = self._received()
        finally:
            end_process(self.process)
            self._receiver.close()
        for entry in outcome.entries:
            self._trace.record_call(entry)
        self._tracer._call_listeners(self._trace.as_stored)
        if outcome.error is not None:
            raise outcome.error from _InChildProcess(f"\n{outcome.traceback}")
        return outcome.value

    def _received(self) -> _Outcome:
        if not self._receiver.poll(max(self._deadline - time.monotonic(), 0.0)):
            raise TracingError(
                f"'{self.name}' took longer than {self._tracer.subprocess_timeout:g} s in its child process, which was "
                "ended; "
                "give HttpTracer a longer subprocess_timeout, or subprocess_mode=False."
            )
        try:
            outcome: _Outcome = pickle.loads(self._receiver.recv_bytes())
        except EOFError:
            self.process.join()
            raise TracingError(
                f"The child process of '{self.name}' ended with exit code {self.process.exitcode} and gave no result."
            ) from None
        self.process.join(max(self._deadline - time.monotonic(), 0.0))
        return outcome


# ---------------------------------------------------------------------- in the child


def _work(
    tracer: HttpTracer, func: Callable[..., object], args: tuple[object, ...], kwargs: JsonObject, sender: Connection
) -> None:
    leave_with_parent()
    # A forked child inherits the context of its parent, where another trace may be open.
    outcome = contextvars.Context().run(_traced, tracer, func, args, kwargs)
    with contextlib.suppress(BrokenPipeError):  # the parent has given up on us
        sender.send_bytes(_pickled(outcome))
    sender.close()


def _traced(tracer: HttpTracer, func: Callable[..., object], args: tuple[object, ...], kwargs: JsonObject) -> _Outcome:
    outcome = _Outcome()
    with tracer._trace_context_sync(getattr(func, "__name__", None)) as trace:
        try:
            outcome.value = func(*args, **kwargs)
            if inspect.isawaitable(outcome.value):
                outcome.value = run_in_loop(outcome.value, "agl-http-tracer")
        except BaseException as error:  # noqa: BLE001 # the parent raises it
            outcome.error, outcome.traceback = error, traceback.format_exc()
    outcome.entries = trace.entries()
    return outcome


def _pickled(outcome: _Outcome) -> bytes:
    """The outcome, or one that says why it cannot be sent; its trace comes along either way."""
    try:
        data = pickle.dumps(outcome)
        pickle.loads(data)  # some exceptions pickle, and cannot be made again
        return data
    except Exception as reason:  # noqa: BLE001 # pickling runs the code of whatever is pickled
        what = f"returned {outcome.value!r}" if outcome.error is None else f"raised {outcome.error!r}"
        said = TracingError(f"The function {what} in its child process, which cannot be sent back: {reason}.")
        return pickle.dumps(_Outcome(error=said, traceback=outcome.traceback, entries=outcome.entries))
