"""What goes through the proxy and what the store holds of it: bytes, token ids, cancelled calls, and training data."""

import asyncio
import json
import socket
from typing import Any

import openai
import pytest
import requests

from agentlightning.adapter import LlmProxyTraceToTriplet, TraceToMessages, TraceToTrajectory
from agentlightning.llm_proxy import service
from agentlightning.store import SqliteLightningStore
from tests.llm_proxy.fixtures import CLAUDE
from tests.llm_proxy.openai_suite import CHAT_TOOLS, USER, WEATHER
from tests.llm_proxy.proxied import HERE, MODEL, Proxied, entry, proxied
from tests.stub_model.raw import DONE, STREAM_HEAD, chunk, event, streamed, then_hang, until, whole
from tests.stub_model.script import Answer, Script
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


def test_provider_key_reaches_the_backend_alone(stub_model: StubModel) -> None:
    stub_model.api_key = "sk-very-secret-0123456789"
    with proxied(entry(stub_model.url, api_key=stub_model.api_key)) as door:
        door.openai(api_key="agent's own").chat.completions.create(model=MODEL, messages=USER)
        spans = door.spans()

    assert stub_model.requests[0].headers["authorization"] == f"Bearer {stub_model.api_key}"
    assert "agent's own" not in str(stub_model.requests[0].headers)
    assert stub_model.api_key not in "".join(span.model_dump_json() for span in spans)


def test_provider_key_in_an_error_is_hidden() -> None:
    key = "sk-very-secret-0123456789"
    refusal = whole(json.dumps({"error": {"message": f"Incorrect API key: {key}"}}).encode(), 401)
    with serving(refusal) as server, proxied(entry(server.url, api_key=key)) as door:
        answer = post(door, ODD_REQUEST)
        spans = door.spans()

        assert answer.status_code == 401
        assert key not in answer.text
        assert key not in "".join(span.model_dump_json() for span in spans)


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


def test_calls_are_in_a_durable_store_with_all_they_said(stub_model: StubModel, tmp_path: Any) -> None:
    path = tmp_path / "rollouts.db"
    store = SqliteLightningStore(path)
    with proxied(entry(stub_model.url), store=store) as door:
        client = door.openai()
        for number in range(5):
            client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": f"number {number}"}])
        calls = door.calls()
    asyncio.run(store.close())

    assert [call.get("gen_ai.completion.0.content") for call in calls] == [f"number {number}" for number in range(5)]
    assert len({call.span.sequence_id for call in calls}) == 5


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_conversation_becomes_one_sequence(stub_model: StubModel, stream: bool) -> None:
    stub_model.script = Script([Answer("I look.", (WEATHER,)), "It rains."])
    with proxied(entry(stub_model.url)) as door:
        client = door.openai()
        first = _turn(client, USER, stream=stream)
        result = {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "rain"}
        _turn(client, [*USER, first, result], stream=stream)
        spans = door.spans()
    asked = stub_model.requests

    triplets = LlmProxyTraceToTriplet().adapt(spans)
    assert [triplet.prompt["token_ids"] for triplet in triplets] == [list(one.prompt_token_ids) for one in asked]
    (sequence,) = TraceToTrajectory().adapt(spans).sequences
    said = [tuple(triplet.response["token_ids"]) for triplet in triplets]
    assert sequence.token_ids == (*asked[1].prompt_token_ids, *said[1])
    masked = [token for token, counts in zip(sequence.token_ids, sequence.loss_mask, strict=True) if counts]
    assert tuple(masked) == (*said[0], *said[1])
    assert len(sequence.calls) == 2
    conversation = TraceToMessages().adapt(spans)[-1]["messages"]
    assert [message["role"] for message in conversation] == ["user", "assistant", "tool", "assistant"]
    assert conversation[-1]["content"] == "It rains."


def _turn(client: Any, messages: Any, *, stream: bool) -> dict[str, Any]:
    ask = {"model": MODEL, "messages": messages, "tools": CHAT_TOOLS}
    if stream:
        with client.chat.completions.stream(**ask) as chunks:
            message = chunks.get_final_completion().choices[0].message
    else:
        message = client.chat.completions.create(**ask).choices[0].message
    return {name: value for name, value in message.to_dict().items() if value is not None and name != "parsed"}


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


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_caller_who_leaves_before_the_first_byte(stream: bool) -> None:
    with serving(then_hang()) as server, proxied(entry(server.url)) as door:
        with pytest.raises(openai.APITimeoutError):
            door.openai(timeout=0.5).chat.completions.create(model=MODEL, messages=USER, stream=stream)
        until(lambda: server.open_connections == 0, seconds=5.0)
        call = door.only_call()

        assert (call.outcome, call.status, call.response_body) == ("cancelled", 499, "")


def test_anthropic_caller_who_leaves_in_the_middle(door: Proxied, stub_model: StubModel) -> None:
    stub_model.script = Script([Answer("one" + " more" * 200, pause_seconds=0.05)])

    with door.anthropic().messages.stream(model=CLAUDE, max_tokens=9, messages=USER) as stream:
        assert next(iter(stream.text_stream)) == "one"

    call = door.only_call()
    assert call.outcome == "cancelled"
    assert call.get("gen_ai.completion.0.content").startswith("one")


def test_caller_whose_connection_is_reset(door: Proxied, stub_model: StubModel) -> None:
    stub_model.script = Script([Answer("late", latency_seconds=30.0)])
    body = json.dumps({"model": MODEL, "messages": USER}).encode()
    with _connected(door) as caller:
        caller.sendall(_request(door, body))
        until(lambda: stub_model.requests)
        caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")

    until(lambda: door.proxy.status()["calls"]["in_flight"] == 0, seconds=5.0)
    assert door.only_call().outcome == "cancelled"


def test_proxy_that_stops_in_the_middle_of_a_stream_tells_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "STOP_SECONDS", 2.0)
    with serving(then_hang(STREAM_HEAD, chunk(event("one")))) as server, proxied(entry(server.url)) as door:
        chunks = door.openai().chat.completions.create(model=MODEL, messages=USER, stream=True)
        next(chunks)
        door.proxy.stop()
        with pytest.raises(openai.APIError):
            list(chunks)
        door.proxy.start()

        assert (door.only_call().outcome, door.only_call().get("gen_ai.completion.0.content")) == ("failed", "one")


def _connected(door: Proxied) -> socket.socket:
    return socket.create_connection(("127.0.0.1", door.proxy.port), timeout=10.0)


def _request(door: Proxied, body: bytes) -> bytes:
    path = door.endpoint.partition(f":{door.proxy.port}")[2]
    head = f"POST {path}/v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body
