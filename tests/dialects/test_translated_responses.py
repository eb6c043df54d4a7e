"""Answers in another dialect: whole and streamed they say the same, to the real SDKs and by the event."""

import json
from typing import Any

import openai
import pytest
from anthropic.types import Message
from hypothesis import example, given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion
from openai.types.responses import Response
from pydantic import TypeAdapter

from agentlightning.dialects.base import InvalidResponse, StreamTranslation
from agentlightning.dialects.failures import BackendStreamError
from agentlightning.dialects.sse import DONE, InvalidStream, ServerSentEvent, SseParser
from tests.dialects.sdks import anthropic_client, openai_client, sent, translation
from tests.stub_model.chat import CHAT
from tests.stub_model.dialect import Dialect
from tests.stub_model.messages import MESSAGES
from tests.stub_model.responses import RESPONSES
from tests.stub_model.script import Answer, Choice, Reply, Request
from tests.stub_model.words import ToolCall, pieces_of

SPEAKERS: tuple[str, ...] = ("chat", "messages", "responses")
PAIRS = [(client, backend) for client in SPEAKERS for backend in SPEAKERS if client != backend]
CYCLE: list[tuple[str, str]] = [("chat", "messages"), ("messages", "responses"), ("responses", "chat")]
"""Every dialect once as the client's and once as the backend's."""
CALLS = (ToolCall("weather", '{"city":"Zürich","days":[1,2]}', "call_1"), ToolCall("now", "{}", "call_2"))
RICH = Answer("Let me look.", CALLS, thought="Hmm, weather.")
ANSWERS = {
    "rich": RICH,
    "text": Answer("Hello there"),
    "call": Answer(tool_calls=CALLS[:1]),
    "cut": Answer("Once upon", cut_after_events=0),
    "empty": Answer(),
}
REQUESTS: dict[str, dict[str, Any]] = {
    "chat": {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
    "messages": {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]},
    "responses": {"model": "m", "input": "hi"},
}
TYPES: dict[str, Any] = {"chat": ChatCompletion, "messages": Message, "responses": Response}


BACKENDS: dict[str, Dialect] = {"chat": CHAT, "messages": MESSAGES, "responses": RESPONSES}
PROMPT_TOKENS, CACHED_TOKENS = 20, 5


def reply_of(backend: str, answer: Answer) -> Reply:
    """The answer as a backend with all its extras gives it; `cut_after_events` stands for the token limit."""
    body = {**REQUESTS[backend], "return_token_ids": backend == "chat", "stream_options": {"include_usage": True}}
    request = Request("/", {}, json.dumps(body).encode(), prompt_token_ids=tuple(range(PROMPT_TOKENS)))
    pieces = tuple(pieces_of(answer.text, answer.tool_calls, answer.thought))
    ending = "stop" if answer.cut_after_events is None else "length"
    ids = tuple(str(call.id) for call in answer.tool_calls)
    choice = Choice(0, pieces, ids, "tool_calls" if ids and ending == "stop" else ending)
    return Reply("chatcmpl-1", 1700000000, request, (choice,), cached_tokens=CACHED_TOKENS)


def whole(backend: str, answer: Answer) -> dict[str, Any]:
    return BACKENDS[backend].write(reply_of(backend, answer))


def events(backend: str, answer: Answer) -> list[dict[str, Any]]:
    stream = SseParser().feed(b"".join(BACKENDS[backend].stream(reply_of(backend, answer))))
    return [json.loads(event.data) for event in stream if event != DONE]


def request_of(client: str) -> dict[str, Any]:
    request = {**REQUESTS[client], "stream": True}
    return {**request, "stream_options": {"include_usage": True}} if client == "chat" else request


def told(client: str, backend: str, answer: Answer) -> list[ServerSentEvent]:
    stream = translation(client, backend).stream(request_of(client))
    return [*(out for event in events(backend, answer) for out in stream.add(event)), *stream.finish()]


def accumulated(client: str, stream: bytes) -> Any:
    """What the real SDK puts together from a stream."""
    if client == "messages":
        with anthropic_client(stream) as sdk, sdk.messages.stream(**REQUESTS[client]) as manager:
            return manager.get_final_message()
    with openai_client(stream) as sdk:
        if client == "responses":
            return accumulated_response(sdk)
        try:
            with sdk.chat.completions.stream(**REQUESTS[client]) as chat:
                return chat.get_final_completion()
        except openai.LengthFinishReasonError as cut:  # as the SDK reports an answer that the limit ended
            return cut.completion


def accumulated_response(sdk: openai.OpenAI) -> Any:
    """The last event's response, after its items were seen to be what the events before it made of them."""
    with sdk.responses.stream(**REQUESTS["responses"]) as stream:
        given = list(stream)
    done = [event.item for event in given if event.type == "response.output_item.done"]
    response = given[-1].response
    assert comparable([item.to_dict() for item in done]) == comparable([item.to_dict() for item in response.output])
    for place, item in enumerate(done):
        said = "".join(
            event.delta
            for event in given
            if event.type.endswith(".delta") and getattr(event, "output_index", None) == place
        )
        whole_text = item.arguments if item.type == "function_call" else "".join(map(text_of, item.content))
        assert said == whole_text
    return response


def text_of(part: Any) -> str:
    return str(part.refusal if part.type == "refusal" else part.text)


def essence(client: str, answer: dict[str, Any]) -> dict[str, Any]:
    """What matters of an answer: all but the times, and what an accumulator adds by itself."""
    if client == "chat":
        choice = answer["choices"][0]
        message = choice["message"]
        calls = [
            (call["id"], call["function"]["name"], call["function"]["arguments"])
            for call in message.get("tool_calls") or ()
        ]
        said = {"content": message["content"] or "", "reasoning": message.get("reasoning_content"), "calls": calls}
        return {
            **said,
            "id": answer["id"],
            "model": answer["model"],
            "end": choice["finish_reason"],
            "usage": answer["usage"],
        }
    if client == "messages":
        names = ("id", "model", "content", "stop_reason", "stop_sequence", "usage", "role", "type")
        return {name: answer[name] for name in names}
    names = ("id", "model", "status", "incomplete_details", "output", "usage", "tools")
    return {name: answer[name] for name in names}


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize(("client", "backend"), PAIRS)
def test_whole_answer_is_valid_and_says_the_same(client: str, backend: str, name: str) -> None:
    answer = ANSWERS[name]

    body = translation(client, backend).response(whole(backend, answer), REQUESTS[client])

    TypeAdapter(TYPES[client]).validate_python(body)
    assert content_of(client, body) == content_of(client, whole(client, answer))
    assert not {"prompt_token_ids", "token_ids", "weights_version", "logprobs"} & set(body)


def content_of(client: str, body: dict[str, Any]) -> Any:
    """What an answer says, without what depends on the backend: its ids and the signatures of thoughts."""
    kept = essence(client, body)
    del kept["id"]
    if client == "chat":
        counted = ("prompt_tokens", "completion_tokens", "total_tokens")
        return {**kept, "usage": {name: kept["usage"][name] for name in counted}}
    if client == "messages":
        return {**kept, "content": [{**block, "signature": None} for block in kept["content"]]}
    return {**kept, "output": [{**item, "id": None, "status": None} for item in kept["output"]]}


def comparable(value: Any) -> Any:
    """Without fields that are None, and without what the SDKs parse on the side."""
    if isinstance(value, dict):
        skipped = ("parsed", "parsed_output", "parsed_arguments")
        return {name: comparable(entry) for name, entry in value.items() if entry is not None and name not in skipped}
    return [comparable(entry) for entry in value] if isinstance(value, list | tuple) else value


def compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


words = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6)
answers = st.builds(
    Answer,
    text=st.lists(words, max_size=3).map("".join),
    tool_calls=st.lists(st.dictionaries(words, words | st.integers(-9, 9) | st.none(), max_size=2), max_size=3).map(
        lambda inputs: tuple(ToolCall(f"tool_{n}", compact(given), f"call_{n}") for n, given in enumerate(inputs))
    ),
    cut_after_events=st.sampled_from([None, 0]),
    thought=st.lists(words, max_size=2).map("".join),
)


@pytest.mark.parametrize(("client", "backend"), CYCLE)
@given(answer=answers)
@example(answer=RICH)
@example(answer=Answer())
def test_sdk_puts_a_stream_together_to_the_whole_answer(client: str, backend: str, answer: Answer) -> None:
    pair = translation(client, backend)

    final = accumulated(client, sent(told(client, backend, answer)))

    expected = TypeAdapter(TYPES[client]).validate_python(pair.response(whole(backend, answer), request_of(client)))
    got = essence(client, final.model_dump(mode="json"))
    assert comparable(got) == comparable(essence(client, expected.model_dump(mode="json")))


# ---------------------------------------------------------------------- the events themselves


SHORT = Answer("a b", (ToolCall("f", "{1}", "c"),), thought="t")
"""A piece of thought, two of text, and a call of three."""


def types_of(stream: list[ServerSentEvent]) -> list[str]:
    contents = [json.loads(event.data) for event in stream]
    assert [event.name for event in stream] == [content["type"] for content in contents]
    return [content["type"] for content in contents]


def test_messages_stream_opens_fills_and_closes_each_block() -> None:
    stream = told("messages", "chat", SHORT)

    block = ["content_block_start", "content_block_delta", "content_block_delta", "content_block_stop"]
    calls = ["content_block_start", *["content_block_delta"] * 3, "content_block_stop"]
    assert types_of(stream) == ["message_start", *block, *block, *calls, "message_delta", "message_stop"]
    assert json.loads(stream[-2].data)["usage"] == {
        "input_tokens": PROMPT_TOKENS - CACHED_TOKENS,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": CACHED_TOKENS,
        "output_tokens": reply_of("chat", SHORT).completion_tokens,
    }


def test_responses_stream_opens_fills_and_closes_each_item() -> None:
    stream = told("responses", "chat", SHORT)

    def parts(kind: str, deltas: int) -> list[str]:
        filled = [f"response.{kind}.delta"] * deltas + [f"response.{kind}.done"]
        return ["response.content_part.added", *filled, "response.content_part.done"]

    items = [parts("reasoning_text", 1), parts("output_text", 2)]
    items.append(["response.function_call_arguments.delta"] * 3 + ["response.function_call_arguments.done"])
    opened = [["response.output_item.added", *item, "response.output_item.done"] for item in items]
    middle = [kind for item in opened for kind in item]
    assert types_of(stream) == ["response.created", "response.in_progress", *middle, "response.completed"]
    assert [json.loads(event.data)["sequence_number"] for event in stream] == list(range(len(stream)))


def test_responses_repeat_the_request() -> None:
    tools = [{"type": "function", "name": "f", "parameters": {}, "strict": False}]
    request = {**REQUESTS["responses"], "instructions": "Be kind.", "tools": tools, "metadata": {"a": "b"}}

    body = translation("responses", "chat").response(whole("chat", RICH), request)

    assert (body["instructions"], body["tools"], body["metadata"]) == ("Be kind.", tools, {"a": "b"})
    assert (body["id"], body["created_at"], body["tool_choice"]) == ("chatcmpl-1", 1700000000, "auto")


@pytest.mark.parametrize(("client", "backend"), CYCLE)
def test_nothing_is_held_back(client: str, backend: str) -> None:
    stream = translation(client, backend).stream(request_of(client))
    marks = [f"word{number}" for number in range(5)]

    seen = []
    for event in events(backend, Answer(" ".join(marks))):
        out = sent(stream.add(event)).decode()
        if "delta" in json.dumps(event):
            seen += [mark for mark in marks if mark in json.dumps(event) and mark in out]

    assert sorted(set(seen)) == marks


def test_chat_usage_is_told_on_request_alone() -> None:
    stream = translation("chat", "messages").stream({**REQUESTS["chat"], "stream": True})

    out = [event for given in events("messages", RICH) for event in stream.add(given)]

    assert out[-1] == DONE
    assert stream.finish() == []
    assert b'"usage"' not in sent(out)


def erring(client: str, backend: str, error: dict[str, Any]) -> StreamTranslation:
    stream = translation(client, backend).stream(request_of(client))
    stream.add(events(backend, RICH)[0])
    stream.add(error)
    return stream


@pytest.mark.parametrize(
    ("backend", "error"),
    [
        ("chat", {"error": {"message": "gone", "type": "server_error"}}),
        ("chat", {"object": "error", "message": "gone", "code": 500}),
        ("messages", {"type": "error", "error": {"type": "api_error", "message": "gone"}}),
        ("responses", {"type": "error", "message": "gone", "code": "server_error"}),
    ],
)
def test_error_event_of_the_backend_is_raised(backend: str, error: dict[str, Any]) -> None:
    client = next(client for client, other in CYCLE if other == backend)
    with pytest.raises(BackendStreamError, match="gone") as caught:
        erring(client, backend, error)

    assert caught.value.failure.status == 500


def test_failed_response_is_an_error_whole_and_streamed() -> None:
    failed = {**whole("responses", RICH), "status": "failed", "error": {"code": "server_error", "message": "gone"}}

    with pytest.raises(BackendStreamError, match="gone"):
        translation("chat", "responses").response(failed)
    with pytest.raises(BackendStreamError, match="gone"):
        erring("messages", "responses", {"type": "response.failed", "response": failed})


@pytest.mark.parametrize(
    ("client", "backend", "event"),
    [
        ("messages", "chat", {"choices": [1]}),
        ("responses", "chat", {"choices": [{"delta": {"tool_calls": 3}}]}),
        ("chat", "messages", {"type": "content_block_delta"}),
        ("chat", "responses", {"type": "response.created"}),
    ],
)
def test_event_of_another_shape_is_an_invalid_stream(client: str, backend: str, event: dict[str, Any]) -> None:
    with pytest.raises(InvalidStream):
        translation(client, backend).stream(request_of(client)).add(event)


@pytest.mark.parametrize("body", [{}, {"choices": []}, {"id": "1", "model": "m", "choices": [{"message": 3}]}])
def test_answer_of_another_shape_is_invalid(body: dict[str, Any]) -> None:
    with pytest.raises(InvalidResponse):
        translation("messages", "chat").response(body)


# ---------------------------------------------------------------------- single fields


@pytest.mark.parametrize(
    ("choice", "reason", "text"),
    [
        ({"finish_reason": "stop"}, "end_turn", None),
        ({"finish_reason": "stop", "stop_reason": "END"}, "stop_sequence", "END"),
        ({"finish_reason": "stop", "stop_reason": 128001}, "end_turn", None),
        ({"finish_reason": "content_filter"}, "refusal", None),
        ({"finish_reason": "length"}, "max_tokens", None),
    ],
)
def test_finish_reason_becomes_a_stop_reason(choice: dict[str, Any], reason: str, text: str | None) -> None:
    body = whole("chat", Answer("a"))
    body["choices"][0] |= choice

    message = translation("messages", "chat").response(body)

    assert (message["stop_reason"], message["stop_sequence"]) == (reason, text)


def test_call_asked_for_by_name_ends_as_tool_use() -> None:
    body = whole("chat", Answer(tool_calls=CALLS))
    body["choices"][0]["finish_reason"] = "stop"

    assert translation("messages", "chat").response(body)["stop_reason"] == "tool_use"


@pytest.mark.parametrize(
    ("reason", "finish"),
    [("end_turn", "stop"), ("stop_sequence", "stop"), ("refusal", "content_filter"), ("pause_turn", "stop")],
)
def test_stop_reason_becomes_a_finish_reason(reason: str, finish: str) -> None:
    body = {**whole("messages", Answer("a")), "stop_reason": reason}

    assert translation("chat", "messages").response(body)["choices"][0]["finish_reason"] == finish


def test_refusal_is_told_in_each_dialect() -> None:
    body = whole("chat", Answer())
    body["choices"][0]["message"]["refusal"] = "I cannot."

    message = translation("messages", "chat").response(body)
    response = translation("responses", "chat").response(body)
    back = translation("chat", "responses").response(response)

    assert (message["content"], message["stop_reason"]) == ([{"type": "text", "text": "I cannot."}], "refusal")
    assert response["output"][0]["content"] == [{"type": "refusal", "refusal": "I cannot."}]
    assert back["choices"][0]["message"]["refusal"] == "I cannot."


def test_refusal_is_streamed_as_a_part_of_its_own() -> None:
    chunk = {"id": "1", "model": "m", "choices": [{"index": 0, "delta": {"refusal": "No."}, "finish_reason": "stop"}]}
    stream = translation("responses", "chat").stream(request_of("responses"))

    final = accumulated("responses", sent([*stream.add(chunk), *stream.finish()]))

    assert final.output[0].content[0].refusal == "No."


def test_arguments_that_are_no_json_are_not_lost() -> None:
    body = whole("chat", Answer(tool_calls=CALLS[:1]))
    body["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"] = '{"city": '

    message = translation("messages", "chat").response(body)
    again = translation("messages", "chat").request(
        {**REQUESTS["messages"], "messages": [{"role": "assistant", "content": message["content"]}]}
    )

    assert message["content"][0]["input"] == {"invalid_arguments": '{"city": '}
    assert again["messages"][0]["tool_calls"][0]["function"]["arguments"] == '{"city": '


def test_calls_without_number_or_id_are_told_apart() -> None:
    calls = [{"function": {"name": "f", "arguments": "{}"}}, {"function": {"name": "g", "arguments": '{"a"'}}]
    chunks = [{"tool_calls": calls}, {"tool_calls": [{"function": {"arguments": ":1}"}}]}]
    stream = translation("messages", "chat").stream(request_of("messages"))

    out = []
    for delta in chunks:
        chunk = {"id": "c1", "model": "m", "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
        out += stream.add(chunk)
    final = accumulated("messages", sent([*out, *stream.finish()]))

    assert [(block.id, block.name, block.input) for block in final.content] == [
        ("c1-call-0", "f", {}),
        ("c1-call-1", "g", {"a": 1}),
    ]


def test_streamed_reasoning_is_its_first_form_with_gaps_between_its_parts() -> None:
    summary = {"type": "response.reasoning_summary_text.delta", "output_index": 0}
    text = {"type": "response.reasoning_text.delta", "output_index": 0, "content_index": 0, "delta": "again"}
    pieces = [{**summary, "summary_index": 0, "delta": "one"}, {**summary, "summary_index": 1, "delta": "two"}, text]
    stream = translation("chat", "responses").stream(REQUESTS["chat"])

    deltas = [json.loads(event.data)["choices"][0]["delta"] for piece in pieces for event in stream.add(piece)]

    assert "".join(delta["reasoning_content"] for delta in deltas) == "one\n\ntwo"
