"""Backends that break, lie, drip and hang: the caller gets a proper error or a retry, and the span tells the truth."""

import asyncio
import threading
from typing import Any

import openai
import pytest

from tests.llm_proxy.openai_suite import USER
from tests.llm_proxy.proxied import MODEL, Proxied, entry, proxied
from tests.stub_model.raw import (
    DONE,
    EVENT_STREAM,
    FINE,
    STREAM_HEAD,
    Connection,
    chunk,
    completion,
    drop,
    event,
    head,
    reset,
    sent,
    streamed,
    then_hang,
    until,
    whole,
)
from tests.stub_model.script import Handler, Request
from tests.stub_model.server import StubModel, serving

PAGE = b"<html><head><title>It works!</title></head></html>"
JSON_HEAD = head(200, "content-type: application/json", "content-length: 500")


def model_of(number: int) -> str:
    """Each case has a backend of its own, since those that fail are put out of use."""
    return f"model-{number}"


def cases(server: StubModel, count: int, **params: Any) -> list[Any]:
    return [entry(server.url, model=model_of(number), **params) for number in range(count)]


def ask(door: Proxied, *, stream: bool = False, model: str = MODEL) -> str:
    """What the model says to a client that does not try again."""
    client = door.openai()
    if not stream:
        return client.chat.completions.create(model=model, messages=USER).choices[0].message.content or ""
    chunks = client.chat.completions.create(model=model, messages=USER, stream=True)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def listen(door: Proxied, said: list[str], model: str) -> None:
    """Keep what is said in a stream, up to an error."""
    for told in door.openai().chat.completions.create(model=model, messages=USER, stream=True):
        said.append(told.choices[0].delta.content or "")  # noqa: PERF401  # a comprehension would lose it


def check_idle(door: Proxied) -> None:
    """Nothing of a call is left behind."""
    until(lambda: door.proxy.status()["calls"]["in_flight"] == 0)
    until(lambda: all(backend["in_flight"] == 0 for backend in door.proxy.status()["backends"]))


WHOLE: list[tuple[str, Handler, int, str]] = [
    ("hang before headers", then_hang(), 503, "did not begin to answer within 0.3 s"),
    ("hang within headers", then_hang(b"HTTP/1.1 200 OK\r\ncontent-"), 503, "did not begin to answer"),
    ("hang within body", then_hang(JSON_HEAD, b'{"id":'), 502, "fell silent for 0.3 s"),
    ("close before any byte", drop, 503, "closed the connection"),
    ("reset before any byte", reset, 503, "closed the connection"),
    ("close within headers", sent(b"HTTP/1.1 200 OK\r\ncont"), 503, "closed the connection"),
    ("close within body", sent(JSON_HEAD, b'{"id":'), 502, "broke off"),
    ("not HTTP", sent(b"SSH-2.0-OpenSSH_9.6\r\n\r\n"), 503, "did not answer as HTTP demands"),
    ("broken chunks", sent(head(200, "transfer-encoding: chunked") + b"zz\r\n{}\r\n"), 503, "as HTTP demands"),
    ("content length too long", sent(head(200, "content-length: 9999"), completion()), 502, "broke off"),
    ("garbage", whole(b"\x00\xff\xfe nonsense"), 502, "not a JSON object"),
    ("half a document", whole(completion()[:40]), 502, "not a JSON object"),
    ("a list", whole(b"[1, 2]"), 502, "not a JSON object"),
    ("a page", whole(PAGE, kind="text/html"), 502, "not a JSON object"),
    ("a page with an error", whole(PAGE, 404, kind="text/html"), 404, "It works!"),
    ("an empty body", whole(b""), 502, "not a JSON object"),
    ("an empty error", whole(b"", 500), 500, "did not say why"),
    ("a redirect", whole(b"", 302, "location: http://127.0.0.1:9/"), 503, "redirects elsewhere"),
]


def test_answer_that_is_none() -> None:
    acts = [act for _, act, _, _ in WHOLE]
    with serving(*acts) as server, proxied(*cases(server, len(WHOLE), timeout=0.3)) as door:
        for number, (case, _, status, words) in enumerate(WHOLE):
            with pytest.raises(openai.APIStatusError, match=words) as caught:
                ask(door, model=model_of(number))
            assert caught.value.status_code == status, case
        calls = door.calls()
        check_idle(door)

    for call, (case, _, status, words) in zip(calls, WHOLE, strict=True):
        assert (call.outcome, call.status, call.tries) == ("failed", status, 1), case
        assert call.span.status.status_code == "ERROR"
        assert words in (call.error or "")


BARE_ERROR = b'data: {"object": "error", "message": "out of luck", "type": "ServerError", "code": 500}\n\n'
STREAMS: list[tuple[str, Handler, str]] = [
    ("close after an event", sent(STREAM_HEAD, chunk(event("fi"))), "broke off"),
    ("hang after an event", then_hang(STREAM_HEAD, chunk(event("fi"))), "fell silent for 0.3 s"),
    ("end without the end", streamed(event("fi")), "before its answer was complete"),
    ("half an event", streamed(event("fi"), event("ne")[:30]), "before its answer was complete"),
    ("half a character", streamed(event("fi"), event("n\u00e9").partition(b"\xc3")[0] + b"\xc3"), "complete"),
    ("not JSON", streamed(event("fi"), b"data: {nonsense\n\n"), "not JSON"),
    ("no object", streamed(event("fi"), b"data: 17\n\n"), "no object"),
    ("a page within", streamed(event("fi"), b"data: " + PAGE + b"\n\n"), "not JSON"),
    ("an error", streamed(event("fi"), b'data: {"error": {"message": "out of luck", "code": 500}}\n\n'), "out of luck"),
    ("an error as the event", streamed(event("fi"), BARE_ERROR, DONE), "out of luck"),
    ("an error at once", streamed(event("fi") + b'data: {"error": {"message": "out of luck"}}\n\n'), "out of luck"),
]


WAYS: Any = pytest.mark.parametrize(
    "options", [{"callbacks": ["return_token_ids", "logprobs"]}, {"callbacks": []}], ids=["ids", "bytes"]
)


@WAYS
def test_stream_that_breaks(options: Any) -> None:
    acts = [act for _, act, _ in STREAMS]
    with serving(*acts) as server, proxied(*cases(server, len(STREAMS), timeout=0.3), **options) as door:
        for number, (case, _, words) in enumerate(STREAMS):
            said: list[str] = []
            with pytest.raises(openai.APIError, match=words):
                listen(door, said, model_of(number))
            assert said == ["fi"], case
        calls = door.calls()
        check_idle(door)

    for call, (case, _, words) in zip(calls, STREAMS, strict=True):
        assert (call.outcome, call.tries, call.span.status.status_code) == ("failed", 1, "ERROR"), case
        assert words in (call.error or "")
        assert '"fi"' in call.response_body
        assert call.get("gen_ai.completion.0.content") == "fi"


def test_stream_whose_chunks_break() -> None:
    has_begun = threading.Event()

    async def act(request: Request, connection: Connection) -> None:
        await connection.send(STREAM_HEAD, chunk(event("fi")))
        await asyncio.to_thread(has_begun.wait, 10.0)
        await connection.send(b"zz\r\nnonsense")
        connection.end()

    with serving(act) as server, proxied(entry(server.url)) as door:
        chunks = iter(door.openai(timeout=2.0).chat.completions.create(model=MODEL, messages=USER, stream=True))
        next(chunks)
        has_begun.set()
        with pytest.raises(openai.APIError, match="broke off"):
            next(chunks)

        assert door.only_call().outcome == "failed"


# ---------------------------------------------------------------------- streams that are odd and right


def split(stream: bytes) -> Handler:
    """A stream of which every byte comes by itself."""
    return streamed(*(stream[place : place + 1] for place in range(len(stream))))


TEXT = "Stra\u00dfe \U0001f600"
PROPER = event("Stra\u00dfe ") + event("\U0001f600") + event(None, "stop") + DONE
LARGE = "x" * 5_000_000
ODD: list[tuple[str, Handler, str]] = [
    ("every byte by itself", split(PROPER), TEXT),
    ("carriage returns", streamed(PROPER.replace(b"\n", b"\r\n")), TEXT),
    ("carriage returns, every byte by itself", split(PROPER.replace(b"\n", b"\r\n")), TEXT),
    ("comments between", streamed(b": hello\n\n", event("fine"), b": ping\n\n", event(None, "stop"), DONE), "fine"),
    ("no blank line at the end", streamed(event("fine"), event(None, "stop"), DONE.rstrip()), "fine"),
    ("no last word", streamed(event("fine"), event(None, "stop")), "fine"),
    ("neither", streamed(event("fine"), event(None, "stop").rstrip()), "fine"),
    ("an event of 5 MB", streamed(event(LARGE), event(None, "stop"), DONE), LARGE),
    ("no chunks", sent(head(200, f"content-type: {EVENT_STREAM}; charset=utf-8"), PROPER), TEXT),
    ("silence behind the end", then_hang(STREAM_HEAD, chunk(PROPER)), TEXT),
    ("a break behind the end", sent(STREAM_HEAD, chunk(PROPER)), TEXT),
    ("words behind the end", streamed(PROPER, b"data: nonsense\n\n"), TEXT),
    ("one chunk for all", streamed(PROPER), TEXT),
    ("data in two lines", streamed(PROPER.replace(b', "choices"', b',\ndata: "choices"')), TEXT),
]


@WAYS
def test_odd_stream_is_read(options: Any) -> None:
    acts = [act for _, act, _ in ODD]
    with serving(*acts) as server, proxied(*cases(server, len(ODD)), **options) as door:
        for number, (case, _, text) in enumerate(ODD):
            assert ask(door, stream=True, model=model_of(number)) == text, case
        calls = door.calls()
        check_idle(door)

    for call, (case, _, text) in zip(calls, ODD, strict=True):
        assert (call.outcome, call.status, call.error) == ("answered", 200, None), case
        assert call.get("gen_ai.completion.0.content") == text


def test_stream_of_another_content_type_is_an_error() -> None:
    with serving(whole(completion())) as server, proxied(entry(server.url)) as door:
        with pytest.raises(openai.InternalServerError, match="asked for a stream and answered with"):
            ask(door, stream=True)

        assert (door.only_call().outcome, door.only_call().response_body) == ("failed", completion().decode())


def test_odd_answers_are_read() -> None:
    async def in_drops(request: Request, connection: Connection) -> None:
        body = completion()
        await connection.send(head(200, f"content-length: {len(body)}"), *(body[n : n + 1] for n in range(len(body))))

    kinds = ["text/plain", "application/octet-stream", "text/html; charset=utf-8"]
    no_text = whole(completion(), 200, "x-request-id: \xe9\xff\u00e2\u0082\u00ac")
    acts = [*(whole(completion(), kind=kind) for kind in kinds), no_text, in_drops]
    with serving(*acts) as server, proxied(entry(server.url, timeout=5.0)) as door:
        assert [ask(door) for _ in acts] == ["fine"] * len(acts)


# ---------------------------------------------------------------------- retries


def test_failure_before_the_answer_is_retried() -> None:
    garbage = sent(b"nonsense\r\n\r\n")
    failing = [drop, reset, garbage, whole(b"{}", 500), whole(b"{}", 429, "retry-after-ms: 1")]
    with serving(*failing) as bad, serving(FINE) as good:
        listed = cases(bad, len(failing), weight=1e9) + cases(good, len(failing), weight=1e-9)
        with proxied(*listed, num_retries=1) as door:
            assert [ask(door, stream=True, model=model_of(number)) for number in range(5)] == ["fine"] * 5
            calls = door.calls()

        assert [(call.outcome, call.status, call.tries) for call in calls] == [("answered", 200, 2)] * 5
        assert all(good.url in call.get("agentlightning.proxy.backend") for call in calls)
        assert (len(bad.requests), len(good.requests)) == (5, 5)


def test_stream_leaves_its_connection_to_the_next_call() -> None:
    with serving(FINE) as server, proxied(entry(server.url)) as door:
        assert [ask(door, stream=True) for _ in range(5)] == ["fine"] * 5

        assert server.connections == 1


def test_fields_that_a_backend_refuses_are_taken_back() -> None:
    refusal = whole(b'{"error": {"message": "Unrecognized request argument supplied: return_token_ids"}}', 400)
    with serving(refusal, whole(completion())) as server, proxied(entry(server.url)) as door:
        assert [ask(door), ask(door)] == ["fine", "fine"]
        calls = door.calls()

        assert [asked.body.get("return_token_ids") for asked in server.requests] == [True, None, None]
        assert [call.tries for call in calls] == [2, 1]
        assert [call.get("agentlightning.proxy.token_ids") for call in calls] == ["not given", "not asked"]


# ---------------------------------------------------------------------- limits
