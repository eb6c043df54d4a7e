"""HttpTracer: HTTP calls of real libraries to a real server become spans."""

import asyncio
import http.client
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import aiohttp
import httpx2
import psutil
import pytest
import requests
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind, StatusCode

from agentlightning.emitter import emit_message
from agentlightning.errors import TracingError
from agentlightning.instrumentation.imports import is_installed
from agentlightning.tracer.base import get_active_tracer
from agentlightning.tracer.http import HttpTracer

FREE_PORT = 0


class Answers(BaseHTTPRequestHandler):
    """Says what it was told; some paths have answers of their own."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path == "/moved":
            self.send_response(302)
            self.send_header("location", "/there?x=1")
            self.send_header("content-length", "0")
            self.end_headers()
        elif self.path == "/stream":
            self.send_response(200)
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            for part in (b"one ", b"two ", b"three"):
                self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
            self.wfile.write(b"0\r\n\r\n")
        elif self.path == "/cut":
            self.close_connection = True
        elif self.path == "/slow":
            time.sleep(30)
        else:
            self._say(404 if self.path == "/missing" else 200, b"hello")

    def do_POST(self) -> None:
        if self.headers.get("transfer-encoding") == "chunked":
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            body = self.rfile.read(int(self.headers["content-length"]))
        self._say(201, b"got " + body)

    def _say(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.send_header("x-answer", "yes")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", FREE_PORT), Answers)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def make(**options: Any) -> HttpTracer:
    with pytest.warns(DeprecationWarning, match="HttpTracer is deprecated"):
        return HttpTracer(**{"subprocess_mode": False, **options})


# ---------------------------------------------------------------------- the libraries


def with_requests(method: str, url: str, **options: Any) -> bytes:
    return requests.request(method, url, timeout=10, **options).content


def with_http_client(method: str, url: str, data: Any = None, headers: Any = None) -> bytes:
    host, _, path = url.removeprefix("http://").partition("/")
    connection = http.client.HTTPConnection(host, timeout=10)
    try:
        connection.request(method, f"/{path}", body=data, headers=headers or {})
        return connection.getresponse().read()
    finally:
        connection.close()


def with_httpx2(method: str, url: str, data: Any = None, headers: Any = None) -> bytes:
    with httpx2.Client(follow_redirects=True) as client:
        return bytes(client.request(method, url, content=data, headers=headers).content)


def with_httpx(method: str, url: str, data: Any = None, headers: Any = None) -> bytes:
    httpx = pytest.importorskip("httpx")
    with httpx.Client(follow_redirects=True) as client:
        return bytes(client.request(method, url, content=data, headers=headers).content)


def with_httpx2_async(method: str, url: str, data: Any = None, headers: Any = None) -> bytes:
    async def call() -> bytes:
        async with httpx2.AsyncClient(follow_redirects=True) as client:
            return bytes((await client.request(method, url, content=data, headers=headers)).content)

    return asyncio.run(call())


def with_aiohttp(method: str, url: str, data: Any = None, headers: Any = None) -> bytes:
    async def call() -> bytes:
        async with (
            aiohttp.ClientSession() as session,
            session.request(method, url, data=data, headers=headers) as answer,
        ):
            return await answer.read()

    return asyncio.run(call())


LIBRARIES: dict[str, Callable[..., bytes]] = {
    name.removeprefix("with_"): function for name, function in globals().items() if name.startswith("with_")
}


@pytest.fixture(params=LIBRARIES)
def call(request: pytest.FixtureRequest) -> Callable[..., bytes]:
    if request.param == "httpx" and not is_installed("httpx"):
        pytest.skip("httpx is not installed here")
    return LIBRARIES[request.param]


def traced(tracer: HttpTracer, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[ReadableSpan]:
    tracer.trace_run(function, *args, **kwargs)
    return tracer.get_last_trace()


def test_a_call_is_one_span(call: Callable[..., bytes], url: str) -> None:
    (span,) = traced(make(), call, "GET", f"{url}/there?x=1")

    assert (span.name, span.kind) == (f"HTTP GET {url}/there?x=1", SpanKind.CLIENT)
    duration = span.attributes["http.duration_ms"]
    assert span.attributes == {
        "http.method": "GET",
        "http.url": f"{url}/there?x=1",
        "http.target": "/there",
        "http.host": url.removeprefix("http://"),
        "http.status_code": 200,
        "http.duration_ms": duration,
    }
    assert duration == (span.end_time - span.start_time) / 1e6 > 0
    assert span.status.status_code is StatusCode.UNSET


def test_headers_and_bodies_are_shown_on_request(call: Callable[..., bytes], url: str) -> None:
    tracer = make(include_headers=True, include_body=True)

    (span,) = traced(tracer, call, "POST", f"{url}/p", data=b"a body", headers={"X-Said": "Well"})

    assert span.attributes["http.request.header.x-said"] == "Well"
    assert span.attributes["http.request.header.content-length"] == "6"
    assert span.attributes["http.response.header.x-answer"] == "yes"
    assert span.attributes["http.request.body"] == "a body"
    assert span.attributes["http.response.body"] == "got a body"


def test_a_refusal_is_an_error(url: str) -> None:
    (span,) = traced(make(), with_requests, "GET", f"{url}/missing")
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, "HTTP 404")


def test_a_call_without_an_answer_is_an_error_and_is_raised(call: Callable[..., bytes], url: str) -> None:
    tracer = make()

    with pytest.raises(Exception):  # noqa: B017, PT011 # each library has its own
        tracer.trace_run(call, "GET", f"{url}/cut")

    spans = tracer.get_last_trace()  # some libraries try again
    assert {(span.name, span.status.status_code) for span in spans} == {(f"HTTP GET {url}/cut", StatusCode.ERROR)}
    assert all("http.status_code" not in span.attributes for span in spans)


@pytest.mark.parametrize("library", ["requests", "httpx2", "httpx2_async", "aiohttp"])
def test_each_hop_of_a_redirect_is_a_call(library: str, url: str) -> None:
    spans = traced(make(include_headers=True), LIBRARIES[library], "GET", f"{url}/moved")

    assert [span.name for span in spans] == [f"HTTP GET {url}/moved", f"HTTP GET {url}/there?x=1"]
    assert [span.attributes["http.status_code"] for span in spans] == [302, 200]
    assert len({span.context.trace_id for span in spans}) == 1
    assert len({span.context.span_id for span in spans}) == 2


def test_a_chunked_body_is_shown_without_its_frames(call: Callable[..., bytes], url: str) -> None:
    (span,) = traced(make(include_body=True), call, "GET", f"{url}/stream")

    assert span.attributes["http.response.body"] == "one two three"


def parts() -> Iterator[bytes]:
    yield b"one "
    yield b"two"


def test_a_body_that_is_sent_in_parts_is_shown_whole(url: str) -> None:
    (span,) = traced(make(include_body=True), with_requests, "POST", f"{url}/p", data=parts())

    assert span.attributes["http.request.body"] == "one two"


def test_requests_of_our_own_clients_are_left_out(call: Callable[..., bytes], url: str) -> None:
    own = {"headers": {"X-AgentLightning-Client": "True"}}

    assert traced(make(), call, "GET", url + "/", **own) == []
    assert len(traced(make(include_agentlightning_requests=True), call, "GET", url + "/", **own)) == 1


# ---------------------------------------------------------------------- traces


async def test_other_arguments_of_a_trace_are_ignored(url: str) -> None:
    tracer = make()

    async with tracer.trace_context("a name", store=object(), rollout_id="ro-1", more=1):
        await asyncio.to_thread(with_requests, "GET", url)

    assert [span.attributes["http.status_code"] for span in tracer.get_last_trace()] == [200]
    assert get_active_tracer() is None


async def test_traces_at_the_same_time_keep_apart(url: str) -> None:
    tracer = make()

    async def run(number: int) -> list[str]:
        async with tracer.trace_context():
            async with aiohttp.ClientSession() as session, session.get(f"{url}/{number}") as answer:
                await answer.read()
            await asyncio.to_thread(with_requests, "GET", f"{url}/{number}")
            async with httpx2.AsyncClient() as client:
                await client.get(f"{url}/{number}")
        return [span.attributes["http.target"] for span in tracer.get_last_trace()]

    seen = await asyncio.gather(*(run(number) for number in range(3)))

    assert seen == [[f"/{number}"] * 3 for number in range(3)]


def test_a_bare_thread_belongs_to_the_only_trace(url: str) -> None:
    tracer = make()

    with tracer._trace_context_sync():
        thread = threading.Thread(target=with_requests, args=("GET", url))
        thread.start()
        thread.join()

    assert len(tracer.get_last_trace()) == 1


async def test_a_session_that_was_there_before_is_seen_and_left_as_it_was(url: str) -> None:
    tracer = make()

    async with aiohttp.ClientSession() as session:
        async with tracer.trace_context(), session.get(url) as answer:
            await answer.read()
        assert session.trace_configs == []
        async with session.get(url) as answer:
            await answer.read()

    assert len(tracer.get_last_trace()) == 1


def test_the_libraries_are_left_as_they_were(url: str) -> None:
    owners = {
        http.client.HTTPConnection: ("putrequest", "putheader", "send", "getresponse"),
        aiohttp.ClientSession: ("_request",),
        httpx2.HTTPTransport: ("handle_request",),
        httpx2.AsyncHTTPTransport: ("handle_async_request",),
    }
    before = [vars(owner)[name] for owner, names in owners.items() for name in names]

    traced(make(), with_requests, "GET", url)

    assert [vars(owner)[name] for owner, names in owners.items() for name in names] == before


def test_what_is_emitted_is_recorded_in_the_same_trace(url: str) -> None:
    tracer = make()

    with tracer._trace_context_sync():
        emit_message("hello")
        with_requests("GET", url)

    message, call = tracer.get_last_trace()
    assert message.name == "agentlightning.message"
    assert message.context.trace_id == call.context.trace_id


# ---------------------------------------------------------------------- in a child process


def fetch(url: str) -> tuple[int, str]:
    return os.getpid(), with_requests("GET", url).decode()


async def fetch_async(url: str) -> tuple[int, bytes]:
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        return os.getpid(), await answer.read()


def fetch_and_fail(url: str, error: BaseException) -> None:
    with_requests("GET", url)
    raise error


class Stubborn(Exception):
    """Pickles, but cannot be made again."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__("stubborn")


@contextmanager
def no_child_is_left() -> Iterator[None]:
    yield
    assert multiprocessing.active_children() == []


def test_a_function_runs_in_a_child_process(url: str) -> None:
    tracer = make(subprocess_mode=True, include_body=True)

    with no_child_is_left():
        process, body = tracer.trace_run(fetch, url)

    (span,) = tracer.get_last_trace()
    assert (body, span.attributes["http.response.body"]) == ("hello", "hello")
    assert process != os.getpid()


async def test_a_coroutine_function_runs_in_a_child_process(url: str) -> None:
    tracer = make(subprocess_mode=True)

    with no_child_is_left():
        process, body = await tracer.trace_run_async(fetch_async, url=url)

    assert (process != os.getpid(), body, len(tracer.get_last_trace())) == (True, b"hello", 1)


def test_what_a_child_raises_is_raised_here_and_its_trace_is_kept(url: str) -> None:
    tracer = make(subprocess_mode=True)

    with no_child_is_left(), pytest.raises(KeyError, match="no") as raised:
        tracer.trace_run(fetch_and_fail, url, KeyError("no"))

    assert "fetch_and_fail" in str(raised.value.__cause__)
    assert [span.name for span in tracer.get_last_trace()] == [f"HTTP GET {url}/"]


def test_an_error_that_cannot_be_sent_is_told(url: str) -> None:
    tracer = make(subprocess_mode=True)

    with pytest.raises(TracingError, match="cannot be sent back"):
        tracer.trace_run(fetch_and_fail, url, Stubborn(1, 2))

    assert len(tracer.get_last_trace()) == 1


def test_a_child_that_takes_too_long_is_ended(url: str) -> None:
    tracer = make(subprocess_mode=True, subprocess_timeout=0.3)

    with no_child_is_left(), pytest.raises(TracingError, match=r"'fetch' took longer than 0\.3 s"):
        tracer.trace_run(fetch, f"{url}/slow")

    assert tracer.get_last_trace() == []


async def test_a_cancelled_run_ends_its_child(url: str) -> None:
    tracer = make(subprocess_mode=True)

    running = asyncio.create_task(tracer.trace_run_async(fetch_async, f"{url}/slow"))
    while not multiprocessing.active_children():
        await asyncio.sleep(0.01)
    (child,) = multiprocessing.active_children()
    running.cancel()

    with pytest.raises(asyncio.CancelledError):
        await running
    deadline = time.monotonic() + 30
    while psutil.pid_exists(child.pid or 0) and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    assert not psutil.pid_exists(child.pid or 0)


def test_a_child_that_dies_is_told() -> None:
    with pytest.raises(TracingError, match="exit code 3 and gave no result"):
        make(subprocess_mode=True).trace_run(os._exit, 3)
