"""Callers who send what they should not, or nothing, or too much, or read too slowly."""

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil
import pytest
import requests

from agentlightning.llm_proxy import gateway, proxied_call
from agentlightning.llm_proxy.answers import MOST_ANSWER_VALUES
from agentlightning.llm_proxy.backends import backend_pool, connection
from tests.llm_proxy.openai_suite import USER
from tests.llm_proxy.proxied import MODEL, Proxied, entry, proxied
from tests.stub_model.raw import DONE, LAST_CHUNK, STREAM_HEAD, Connection, chunk, event, response, sent, until
from tests.stub_model.script import Answer, Request, Script
from tests.stub_model.server import StubModel, serving

BODY = json.dumps({"model": MODEL, "messages": USER}).encode()
CHAT = "/v1/chat/completions"
MEGABYTE = 1024**2


@contextmanager
def connected(door: Proxied) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", door.proxy.port), timeout=10.0) as caller:
        yield caller


def request(path: str, body: bytes = BODY, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: localhost", f"content-length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode("latin-1") + body


def path_of(door: Proxied) -> str:
    """The path of the attempt."""
    return door.endpoint.partition(f":{door.proxy.port}")[2]


def read_all(caller: socket.socket) -> bytes:
    parts = []
    while part := caller.recv(65536):
        parts.append(part)
    return b"".join(parts)


def check_serves(door: Proxied) -> None:
    """The proxy is well afterwards."""
    assert door.openai().chat.completions.create(model=MODEL, messages=USER).choices[0].message.content


# ---------------------------------------------------------------------- requests that are none


PATHS = [CHAT, "/v1/messages", "/v1/responses", "/v1/embeddings", "/v1/completions"]
REFUSED = [
    (b"", 400, "not JSON"),
    (b"{nonsense", 400, "not JSON"),
    (b"\xff\xfe\x00", 400, "not JSON"),
    (b"[" * 100_000, 400, "not JSON"),
    (b"[1]", 400, "must be a JSON object"),
    (b'{"messages": []}', 400, "names no model"),
    (b'{"model": 7}', 400, "names no model"),
    (b'{"model": "other", "messages": []}', 404, "other"),
    *(
        (
            f'{{"model": "{MODEL}", "messages": {opening * levels}""{closing * levels}}}'.encode(),
            400,
            "within each",
        )
        for levels in (250, 900, 1020)
        for opening, closing in (("[", "]"), ('{"a":', "}"))
    ),
]


@pytest.mark.parametrize("path", PATHS)
def test_request_that_is_refused(door: Proxied, path: str) -> None:
    for body, status, message in REFUSED:
        answer = requests.post(door.endpoint + path, data=body, timeout=10.0)

        assert (answer.status_code, answer.headers["content-type"]) == (status, "application/json")
        assert answer.headers["x-should-retry"] == "false"
        assert message in answer.json()["error"]["message"]
        assert ("type" in answer.json()) == (path == "/v1/messages")

    seen = [(call.outcome, call.status, call.tries) for call in door.calls()]
    assert seen == [("refused", status, 0) for _, status, _ in REFUSED]
    check_serves(door)


def test_request_that_is_not_too_deep_is_no_fault_of_the_proxy(door: Proxied) -> None:
    for field in ("metadata", "tools", "messages"):
        for levels in (1, 100, 215):
            nested = '{"a":' * levels + "1" + "}" * levels
            body = f'{{"model": "{MODEL}", "messages": [], "max_tokens": 5, "{field}": [{nested}]}}'
            answers = [requests.post(door.endpoint + path, data=body, timeout=10.0) for path in (CHAT, "/v1/messages")]

            assert 500 not in [answer.status_code for answer in answers]
    assert len(door.calls()) == 18


def test_unknown_path_and_wrong_method(door: Proxied) -> None:
    for path in ("/", "/v1", "/v1/chat", "/v1/images", "/rollout/a/attempt", "/v1/chat/completions/x"):
        for method in ("GET", "POST", "DELETE"):
            answer = requests.request(method, door.proxy.endpoint + path, timeout=10.0)

            assert answer.status_code == 404
            assert answer.json()["error"]["message"].startswith("There is nothing at")
    for method in ("GET", "PUT", "DELETE", "PATCH", "OPTIONS"):
        answer = requests.request(method, door.endpoint + CHAT, timeout=10.0)

        assert (answer.status_code, method in answer.json()["error"]["message"]) == (405, True)


def test_absurdly_long_path(door: Proxied) -> None:
    with connected(door) as caller:
        with suppress(OSError):  # refused before it was read
            caller.sendall(f"POST /{'x' * 5 * MEGABYTE} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode()[:MEGABYTE])
            caller.shutdown(socket.SHUT_WR)
        answer = _read_until_reset(caller)

    assert answer == b"" or answer.startswith((b"HTTP/1.1 400", b"HTTP/1.1 414", b"HTTP/1.1 431"))
    check_serves(door)


def _read_until_reset(caller: socket.socket) -> bytes:
    try:
        return read_all(caller)
    except ConnectionError:
        return b""


# ---------------------------------------------------------------------- ids


def test_ids_may_hold_anything_that_is_percent_encoded(stub_model: StubModel, caplog: pytest.LogCaptureFixture) -> None:
    rollout_ids = ["a/b", "a b", "50%", "%41", "\u00e9\u4e2d", "a?b#c", "..", "a\r\nx-evil: 1"]
    with proxied(entry(stub_model.url)) as door:
        for rollout_id in rollout_ids:
            prefix = f"/rollout/{_quoted(rollout_id)}/attempt/{_quoted('1/1')}/agent/{_quoted('the/critic')}"
            with connected(door) as caller:
                caller.sendall(request(prefix + CHAT, BODY, "connection: close"))
                answer = read_all(caller)

            assert answer.startswith(b"HTTP/1.1 200")
            assert b"x-evil" not in answer.partition(b"\r\n\r\n")[0]
        until(lambda: sum(door.proxy.status()["calls"]["lost"].values()) == len(rollout_ids))
    lost = [record.args for record in caplog.records if "is not recorded" in record.msg]
    assert [args[:2] for args in lost if isinstance(args, tuple)] == [(one, "1/1") for one in rollout_ids]


def _quoted(text: str) -> str:
    return "".join(f"%{byte:02x}" for byte in text.encode())


# ---------------------------------------------------------------------- bodies


@pytest.mark.parametrize("is_chunked", [False, True], ids=["length", "chunks"])
def test_body_that_is_too_large(stub_model: StubModel, is_chunked: bool) -> None:
    with proxied(entry(stub_model.url), max_request_bytes=MEGABYTE) as door:
        body = b"x" * (3 * MEGABYTE)
        answer = requests.post(door.endpoint + CHAT, data=iter([body]) if is_chunked else body, timeout=10.0)

        assert answer.status_code == 413
        assert "larger than 1048576 bytes" in answer.json()["error"]["message"]
        assert door.calls() == []
        check_serves(door)


def test_announced_body_that_is_too_large_is_refused_before_it_comes(door: Proxied) -> None:
    with connected(door) as caller:
        caller.sendall(f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {10**12}\r\n\r\n".encode())
        answer = caller.recv(65536)

    assert answer.startswith(b"HTTP/1.1 413")


def test_caller_who_leaves_before_his_request_is_whole(door: Proxied, stub_model: StubModel) -> None:
    with connected(door) as caller:
        caller.sendall(request(path_of(door) + CHAT)[:-5])
    check_serves(door)

    assert len(stub_model.requests) == len(door.calls()) == 1


def test_caller_whose_connection_is_reset(door: Proxied, stub_model: StubModel) -> None:
    stub_model.script = Script([Answer("late", latency_seconds=30.0)])
    with connected(door) as caller:
        caller.sendall(request(path_of(door) + CHAT))
        until(lambda: stub_model.requests)
        caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")

    until(lambda: door.proxy.status()["calls"]["in_flight"] == 0, seconds=5.0)
    assert door.only_call().outcome == "cancelled"


def test_stop_does_not_wait_for_ever_for_a_body_that_never_comes(
    stub_model: StubModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway, "STOP_SECONDS", 0.5)
    with proxied(entry(stub_model.url)) as door, connected(door) as caller:
        caller.sendall(request(path_of(door) + CHAT)[:-5])
        check_serves(door)
        door.proxy.stop()
        door.proxy.start()
        check_serves(door)


# ---------------------------------------------------------------------- order and speed


def test_slow_reader_holds_the_backend_back() -> None:
    """A stream of 200 MB to a caller who does not read: what is under way stays small, and the backend waits."""
    sent_bytes = 0
    part = chunk(event("x" * 65_000))

    async def act(request: Request, connection: Connection) -> None:
        nonlocal sent_bytes
        await connection.send(STREAM_HEAD)
        for _ in range(3000):
            await connection.send(part)
            sent_bytes += len(part)

    with serving(act) as server, proxied(entry(server.url)) as door:
        memory = psutil.Process(os.getpid()).memory_info
        before = memory().rss
        with connected(door) as caller:
            caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
            body = BODY.replace(b"{", b'{"stream": true, ', 1)
            caller.sendall(request(path_of(door) + CHAT, body))
            _wait_until_still(lambda: sent_bytes)
            grown = memory().rss - before

        until(lambda: server.open_connections == 0, seconds=5.0)
        assert door.only_call().outcome == "cancelled"
    assert sent_bytes < 40 * MEGABYTE
    assert grown < 100 * MEGABYTE


# ---------------------------------------------------------------------- answers that are too large


STREAMED = BODY.replace(b"{", b'{"stream": true, ', 1)
TOO_MANY_BYTES = b'{"choices": [], "padding": "' + b"x" * MEGABYTE + b'"}'
TOO_MANY_VALUES = b'{"choices": [' + b"0," * MOST_ANSWER_VALUES + b"0]}"


@pytest.mark.parametrize(
    ("answer", "limit"), [(TOO_MANY_BYTES, MEGABYTE), (TOO_MANY_VALUES, 32 * MEGABYTE)], ids=["bytes", "values"]
)
def test_answer_that_is_too_large_is_an_error(answer: bytes, limit: int) -> None:
    with serving(sent(response(answer))) as model, proxied(entry(model.url), max_response_bytes=limit) as door:
        refused = requests.post(door.endpoint + CHAT, data=BODY, timeout=30.0)

        assert (refused.status_code, "more than" in refused.json()["error"]["message"]) == (502, True)
        model.script = Script(["fine"])
        check_serves(door)
        assert [call.outcome for call in door.calls()] == ["failed", "answered"]


def test_large_answer_is_parsed_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    parse, threads = proxied_call.read_answer, list[threading.Thread]()

    def noted(body: bytes) -> Any:
        threads.append(threading.current_thread())
        return parse(body)

    monkeypatch.setattr(proxied_call, "read_answer", noted)
    with serving(sent(response(TOO_MANY_BYTES))) as model, proxied(entry(model.url)) as door:
        assert requests.post(door.endpoint + CHAT, data=BODY, timeout=30.0).status_code == 200
        model.script = Script(["fine"])
        check_serves(door)

    assert len(set(threads)) == 2


def test_stream_that_is_too_long_ends_with_an_error() -> None:
    parts = [chunk(event("x" * 100_000)) for _ in range(20)]
    with (
        serving(sent(STREAM_HEAD, *parts, hangs=True)) as server,
        proxied(entry(server.url), max_response_bytes=MEGABYTE) as door,
    ):
        answer = requests.post(door.endpoint + CHAT, data=STREAMED, timeout=30.0).content

        assert len(answer) < MEGABYTE + 200_000
        assert b"more than 1048576 bytes" in answer[-1000:]
        until(lambda: server.open_connections == 0)
        assert door.only_call().outcome == "failed"


def test_large_answers_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller who does not read keeps a large answer in memory: the next one waits in its middle, but is not lost."""
    monkeypatch.setattr(backend_pool, "MOST_LARGE_ANSWERS", 1)
    monkeypatch.setattr(connection, "LARGE_ANSWER_BYTES", MEGABYTE)
    parts = [chunk(event("x" * 65_000)) for _ in range(160)]
    stream = sent(STREAM_HEAD, *parts, chunk(event(None, "stop")), chunk(DONE), LAST_CHUNK)
    with (
        serving(stream) as server,
        proxied(entry(server.url)) as door,
        connected(door) as idle,
        connected(door) as eager,
    ):
        for caller in (idle, eager):
            caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
            caller.sendall(request(path_of(door) + CHAT, STREAMED, "connection: close"))
            left = 2 * MEGABYTE if caller is idle else 1  # so that the idle one has its room before the other begins
            while left > 0:
                left -= len(caller.recv(left))
        eager.settimeout(0.5)
        with pytest.raises(TimeoutError):
            read_all(eager)
        eager.settimeout(30.0)

        assert [b"[DONE]" in read_all(caller)[-200:] for caller in (idle, eager)] == [True, True]


def _wait_until_still(value: Any) -> None:
    """Wait until a number has stopped to change for half a second."""
    last, since = value(), time.monotonic()
    ends = since + 20.0
    while time.monotonic() - since < 0.5 or last == 0:
        assert time.monotonic() < ends, "it goes on and on"
        time.sleep(0.02)
        if value() != last:
            last, since = value(), time.monotonic()
