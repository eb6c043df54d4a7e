"""What goes through the proxy and what the store holds of it: bytes, token ids, cancelled calls, and training data."""

import gc
import json
from typing import Any

import openai
import pytest
import requests

from agentlightning.llm_proxy import gateway
from agentlightning.llm_proxy.answers import StreamRelay
from agentlightning.llm_proxy.proxied_call import ProxiedCall
from tests.llm_proxy.openai_suite import USER
from tests.llm_proxy.proxied import HERE, MODEL, Proxied, entry, proxied
from tests.stub_model.raw import DONE, STREAM_HEAD, chunk, event, streamed, then_hang, until, whole
from tests.stub_model.script import Script
from tests.stub_model.server import StubModel, serving

TRACE, PARENT = "ab" * 16, "cd" * 8
ODD_REQUEST = b'{ "model" :"stub-model",\n"messages": [{"role":"user","content":"\\u00e9 \xc3\xa9"}],"seed":1e0 }'
ODD_ANSWER = b'{"choices" : [ {"index":0,"message":{"role":"assistant","content":"\\u00e9"}} ],\n "x":1.0e2}'
WITHOUT_IDS: Any = {"callbacks": []}


def post(door: Proxied, body: bytes, **options: Any) -> requests.Response:
    return requests.post(f"{door.endpoint}/v1/chat/completions", data=body, timeout=10.0, **options)


# ---------------------------------------------------------------------- bytes


def test_request_and_answer_are_passed_on_as_they_are() -> None:
    with serving(whole(ODD_ANSWER)) as server, proxied(entry(server.url), **WITHOUT_IDS) as door:
        answer = post(door, ODD_REQUEST)
        call = door.only_call()

        assert (answer.content, server.requests[0].content) == (ODD_ANSWER, ODD_REQUEST)
        assert (call.request_body, call.response_body) == (ODD_REQUEST.decode(), ODD_ANSWER.decode())
        assert f"{HERE}.received_body" not in call.raw.attributes


def test_stream_is_passed_on_as_it_is() -> None:
    stream = b": note\nid: 7\nretry: 10\n" + event("fi") + b"event: x\n" + event("ne", "stop") + b"\r\n" + DONE
    body = ODD_REQUEST.replace(b"{", b'{"stream": true,', 1)
    with serving(streamed(stream[:31], stream[31:])) as server, proxied(entry(server.url), **WITHOUT_IDS) as door:
        answer = post(door, body)

        assert (answer.content, server.requests[0].content) == (stream, body)
        assert answer.headers["content-type"] == "text/event-stream"
        assert door.only_call().response_body == stream.decode()


def test_answer_without_ids_is_passed_on_as_it_is_where_they_were_asked_for() -> None:
    with serving(whole(ODD_ANSWER)) as server, proxied(entry(server.url)) as door:
        answer = post(door, ODD_REQUEST)

        assert answer.content == ODD_ANSWER
        assert server.requests[0].body["return_token_ids"] is True
        assert door.only_call().get(f"{HERE}.token_ids") == "not given"


# ---------------------------------------------------------------------- spans


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_spans_of_a_call(stub_model: StubModel, stream: bool) -> None:
    stub_model.script = Script(["Hello there"])
    listed = {**entry(stub_model.url), "version": "step-7"}
    with proxied(listed) as door:
        client = door.openai(base_url=f"{door.endpoint}/agent/critic/v1")
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        told: Any = client.chat.completions.create(model=MODEL, messages=USER, stream=stream, extra_headers=headers)
        if stream:
            list(told)
        call = door.only_call()
        span, raw = call.span, call.raw

    assert (span.name, raw.name) == ("litellm_request", "raw_gen_ai_request")
    assert span.sequence_id == raw.sequence_id
    assert (span.trace_id, raw.trace_id) == (TRACE, TRACE)
    assert (span.parent_id, raw.parent_id) == (PARENT, span.span_id)
    assert (span.rollout_id, span.attempt_id) == (door.rollout.rollout_id, door.rollout.attempt.attempt_id)
    assert call.get("agent.name") == "critic"
    assert call.get("agentlightning.weights_version") == "step-7"
    assert (call.get("gen_ai.usage.prompt_tokens"), call.get("gen_ai.usage.completion_tokens")) == (5, 3)
    assert json.loads(call.get("prompt_token_ids")) == list(stub_model.requests[0].prompt_token_ids)
    assert len(json.loads(call.get("response_token_ids"))) == len(json.loads(call.get("logprobs.content"))) == 3
    assert call.get(f"{HERE}.token_ids") == "given"
    assert span.start_time is not None
    assert span.end_time is not None
    took = span.end_time - span.start_time
    assert 0 <= took < 10
    first = call.get("gen_ai.streaming.time_to_first_token")
    assert 0 < first <= took + 0.01 if stream else first is None


# ---------------------------------------------------------------------- callers who leave


def test_cancelled_stream_is_recorded_with_what_was_sent() -> None:
    begun = [
        event("one", token_ids=[1]).replace(b'"choices"', b'"prompt_token_ids": [7, 8], "choices"'),
        event(" two", token_ids=[2]),
    ]
    with serving(then_hang(STREAM_HEAD, *map(chunk, begun))) as server, proxied(entry(server.url)) as door:
        with door.openai().chat.completions.create(model=MODEL, messages=USER, stream=True) as chunks:
            said = [next(chunks).choices[0].delta.content for _ in range(2)]
        until(lambda: server.open_connections == 0, seconds=5.0)
        call = door.only_call()

        assert said == ["one", " two"]
        assert (call.outcome, call.status, call.get("agentlightning.response.is_cut")) == ("cancelled", 499, True)
        assert call.get("gen_ai.completion.0.content") == "one two"
        assert (call.get("prompt_token_ids"), call.get("response_token_ids")) == ("[7,8]", "[1,2]")
        assert call.get(f"{HERE}.token_ids") == "given"
        assert call.span.status.status_code == "UNSET"


def test_proxy_that_stops_in_the_middle_of_a_stream_tells_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway, "STOP_SECONDS", 0.5)
    with serving(then_hang(STREAM_HEAD, chunk(event("one")))) as server, proxied(entry(server.url)) as door:
        chunks = door.openai().chat.completions.create(model=MODEL, messages=USER, stream=True)
        next(chunks)
        door.proxy.stop()
        with pytest.raises(openai.APIError):
            list(chunks)
        door.proxy.start()

        assert (door.only_call().outcome, door.only_call().get("gen_ai.completion.0.content")) == ("failed", "one")


def test_streamed_call_is_freed_without_the_collector(stub_model: StubModel) -> None:
    """What it received may be large, and the collector may come late."""

    def alive() -> int:
        return sum(type(thing) in (ProxiedCall, StreamRelay) for thing in gc.get_objects())

    with proxied(entry(stub_model.url)) as door:
        client = door.openai()
        list(client.chat.completions.create(model=MODEL, messages=USER, stream=True))
        door.calls()
        gc.collect()
        before = alive()
        gc.disable()
        try:
            list(client.chat.completions.create(model=MODEL, messages=USER, stream=True))
            until(lambda: door.proxy.status()["calls"]["in_flight"] == 0)
            door.calls()
            until(lambda: alive() <= before)
        finally:
            gc.enable()
