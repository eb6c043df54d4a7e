"""Dialects: however an answer comes, whole or in pieces, as objects or as JSON, the same attributes come out."""

import itertools
import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import anthropic
import openai
import pytest
from anthropic.types import Message as AnthropicMessage
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Completion
from openai.types.chat import ChatCompletion
from openai.types.responses import Response
from pydantic import BaseModel

from agentlightning.dialects import (
    ANTHROPIC_DIALECTS,
    OPENAI_DIALECTS,
    Dialect,
    chat,
    completions,
    dialect_of,
    messages,
    responses,
)
from agentlightning.instrumentation.model_calls import CallRecording, read_along
from agentlightning.instrumentation.patch import as_json
from agentlightning.tracer import OtelTracer
from tests.instrumentation.sdk_calls import HTTP
from tests.stub_model.chat import CHAT, COMPLETIONS
from tests.stub_model.messages import MESSAGES
from tests.stub_model.responses import RESPONSES
from tests.stub_model.script import Answer, CallOptions, Reply, Request, generate
from tests.stub_model.words import Message, ToolCall

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
TOOL_CALLS = st.builds(
    lambda name, arguments: ToolCall(name, json.dumps(arguments, ensure_ascii=False)),
    st.sampled_from(["weather", "søk", "時計"]),
    st.dictionaries(TEXTS, st.one_of(TEXTS, st.integers(-9, 9), st.none()), max_size=2),
)
ANSWERS = st.builds(Answer, TEXTS, st.lists(TOOL_CALLS, max_size=2).map(tuple))


@dataclass(frozen=True)
class Spoken:
    """A dialect of ours, and how the stub model speaks it."""

    ours: Dialect
    stub: Any
    model: type[BaseModel]
    choices: int = 3


SPOKEN = {
    "chat": Spoken(chat.DIALECT, CHAT, ChatCompletion),
    "completions": Spoken(completions.DIALECT, COMPLETIONS, Completion),
    "responses": Spoken(responses.DIALECT, RESPONSES, Response, 1),
    "messages": Spoken(messages.DIALECT, MESSAGES, AnthropicMessage, 1),
}
each_dialect = pytest.mark.parametrize("spoken", SPOKEN.values(), ids=SPOKEN)


def reply_of(spoken: Spoken, answers: list[Answer], shape: Any = "vllm", *, wants_ids: bool = True) -> Reply:
    """What the stub model would say to a request for everything."""
    body = {"model": "stub-model", "logprobs": True, "return_token_ids": wants_ids, "top_logprobs": 1}
    body |= {"stream_options": {"include_usage": True}, "messages": [{"role": "user", "content": "hi"}]}
    options = CallOptions((Message("user", "hi"),))
    request = Request("/", {}, json.dumps(body).encode(), "any", options.messages, options.prompt_ids)
    told = [Answer(answer.text) if spoken.stub is COMPLETIONS else answer for answer in answers]
    choices = [
        generate(answer, options, index=n, call_ids=[f"call_{n}_{k}" for k in range(3)])
        for n, answer in enumerate(told)
    ]
    return Reply("an-id", 1, request, tuple(choices), shape)


def assembled(spoken: Spoken, events: Iterator[Mapping[str, Any]]) -> dict[str, Any]:
    assembler = spoken.ours.assembler()
    assert assembler is not None
    for event in events:
        assembler.add(event)
    return dict(spoken.ours.response_attributes(assembler.response()))


def events_in(stream: Iterator[bytes]) -> Iterator[dict[str, Any]]:
    for block in b"".join(stream).split(b"\n\n"):
        data = [line[5:].strip() for line in block.split(b"\n") if line.startswith(b"data:")]
        if data and data[0] != b"[DONE]":
            yield json.loads(data[0])


def comparable(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """JSON texts as the values they stand for: their spaces and the order of their keys may differ."""
    written = ("arguments", "token_ids", "logprobs", "logprobs.content")
    return {name: json.loads(v) if name.endswith(written) and v else v for name, v in attributes.items()}


# ---------------------------------------------------------------------- whole and streamed


@each_dialect
@given(st.data())
def test_a_stream_and_a_whole_answer_say_the_same(spoken: Spoken, data: st.DataObject) -> None:
    answers = data.draw(st.lists(ANSWERS, min_size=1, max_size=spoken.choices))
    reply = reply_of(spoken, answers, wants_ids=spoken.stub is not MESSAGES)  # whose streams have none

    whole = comparable(spoken.ours.response_attributes(spoken.stub.write(reply)))
    streamed = comparable(assembled(spoken, events_in(spoken.stub.stream(reply))))

    assert streamed == whole


@each_dialect
@given(st.data())
def test_objects_of_the_sdk_and_json_say_the_same(spoken: Spoken, data: st.DataObject) -> None:
    answers = data.draw(st.lists(ANSWERS, min_size=1, max_size=spoken.choices))
    shape = data.draw(st.sampled_from(["vllm", "instrumented", "none"]))
    told = spoken.stub.write(reply_of(spoken, answers, shape))

    from_json = comparable(spoken.ours.response_attributes(told))
    from_object = comparable(spoken.ours.response_attributes(_constructed(spoken.model, told)))

    assert from_object == from_json


def _constructed(model: type[BaseModel], told: dict[str, Any]) -> Any:
    """As the SDK makes it of a response."""
    package = anthropic if model is AnthropicMessage else openai
    return package._models.construct_type(value=told, type_=model)


CHAT_STREAMS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "an empty text": ([{"content": ""}], {"content": ""}),
    "no text": ([{"content": None}], {"content": None}),
    "a refusal": ([{"refusal": "I "}, {"refusal": "won't"}], {"content": None, "refusal": "I won't"}),
    "reasoning": (
        [{"reasoning_content": "Hm"}, {"reasoning_content": "m."}, {"content": "Yes"}],
        {"content": "Yes", "reasoning_content": "Hmm."},
    ),
    "calls without numbers": (
        [
            {"tool_calls": [{"id": "a", "function": {"name": "f", "arguments": '{"x"'}}]},
            {"tool_calls": [{"function": {"arguments": ": 1}"}}]},
            {"tool_calls": [{"id": "b", "function": {"name": "g", "arguments": "{}"}}]},
        ],
        {
            "content": None,
            "tool_calls": [
                {"id": "a", "function": {"name": "f", "arguments": '{"x": 1}'}},
                {"id": "b", "function": {"name": "g", "arguments": "{}"}},
            ],
        },
    ),
    "a tool of the user's own": (
        [
            {"tool_calls": [{"index": 0, "id": "a", "type": "custom", "custom": {"name": "sh", "input": "ls"}}]},
            {"tool_calls": [{"index": 0, "custom": {"input": " -l"}}]},
        ],
        {"content": None, "tool_calls": [{"id": "a", "type": "custom", "custom": {"name": "sh", "input": "ls -l"}}]},
    ),
    "a function of the form before tools": (
        [{"function_call": {"name": "f", "arguments": '{"x"'}}, {"function_call": {"arguments": ": 1}"}}],
        {"content": None, "function_call": {"name": "f", "arguments": '{"x": 1}'}},
    ),
}


@pytest.mark.parametrize(("deltas", "message"), CHAT_STREAMS.values(), ids=CHAT_STREAMS)
def test_a_chat_is_put_together(deltas: list[dict[str, Any]], message: dict[str, Any]) -> None:
    chunks = [{"weights_version": 0, "choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    whole = {"weights_version": 0, "choices": [{"index": 0, "message": {"role": "assistant", **message}}]}

    streamed = assembled(SPOKEN["chat"], iter(chunks))

    assert streamed == chat.DIALECT.response_attributes(whole)
    assert streamed["agentlightning.weights_version"] == 0


def test_thinking_is_kept_apart_from_what_is_said() -> None:
    blocks = [{"type": "thinking", "thinking": "Hmm.", "signature": "s"}, {"type": "text", "text": "Yes."}]
    events: list[dict[str, Any]] = [
        {"type": "message_start", "message": {"id": "m", "usage": {"input_tokens": 3, "output_tokens": 1}}},
        {
            "type": "content_block_start",
            "index": 0,
            "content_block": {"type": "thinking", "thinking": "", "signature": ""},
        },
        {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "Hm"}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "m."}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "signature_delta", "signature": "s"}},
        {"type": "content_block_start", "index": 1, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "Yes."}},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 9}},
        {"type": "message_stop"},
    ]

    streamed = assembled(SPOKEN["messages"], iter(events))

    usage = {"input_tokens": 3, "output_tokens": 9}
    whole = {"id": "m", "content": blocks, "stop_reason": "end_turn", "usage": usage}
    assert streamed == messages.DIALECT.response_attributes(whole)
    assert (streamed["gen_ai.completion.0.content"], streamed["gen_ai.completion.0.reasoning"]) == ("Yes.", "Hmm.")


def test_a_response_that_was_cut_says_what_had_come() -> None:
    reply = reply_of(SPOKEN["responses"], [Answer("One two three.")])
    events = [event for event in events_in(RESPONSES.stream(reply)) if "done" not in event["type"]][:6]

    cut = assembled(SPOKEN["responses"], iter(events))

    assert cut["gen_ai.completion.0.content"] == "One two"
    assert cut["gen_ai.response.id"] == "an-id"


# ---------------------------------------------------------------------- pieces


class Recorded:
    """Attributes that a model call would leave, without a tracer."""

    def __init__(self, dialect: Dialect) -> None:
        self.tracer = OtelTracer(instrument=False)
        self.dialect = dialect

    def of(self, pieces: list[bytes], *, is_read: bool = False) -> dict[str, Any]:
        with self.tracer.lifespan(), self.tracer._trace_context_sync() as recorder:
            response = HTTP.Response(200, headers={"content-type": "text/event-stream"}, content=iter(pieces))
            call = CallRecording(self.dialect, {"model": "m"})
            if is_read:
                response.read()
            read_along(call, response)
            assert b"".join(response.iter_bytes()) == b"".join(pieces)
            response.close()
            attributes = dict(recorder.spans()[0].attributes or {})
        attributes.pop("gen_ai.streaming.time_to_first_token", None)
        return attributes


def cut_at(stream: bytes, places: list[int]) -> list[bytes]:
    marks = [0, *sorted(place % (len(stream) + 1) for place in places), len(stream)]
    return [stream[start:end] for start, end in itertools.pairwise(marks)]


@given(
    answer=ANSWERS,
    places=st.lists(st.integers(0, 10_000), max_size=25),
    line_end=st.sampled_from([b"\n", b"\r\n", b"\r"]),
    space=st.sampled_from([b"data: ", b"data:", b"data:  "]),
    comment=st.sampled_from([b"", b": keep alive\n\n", b"\n\n\n", b"id: 3\nretry: 10\n", b":\n"]),
    escape=st.booleans(),
)
def test_where_a_stream_is_cut_into_pieces_does_not_matter(
    answer: Answer,
    places: list[int],
    line_end: bytes,
    space: bytes,
    comment: bytes,
    escape: bool,
) -> None:
    spoken = SPOKEN["messages"]
    events = list(spoken.stub.stream(reply_of(spoken, [answer])))
    written = [comment + (event if escape else _unescaped(event)) for event in events]
    stream = b"".join(written).replace(b"data: ", space).replace(b"\n", line_end)
    recorded = Recorded(spoken.ours)

    in_pieces = recorded.of(cut_at(stream, places))

    assert in_pieces == recorded.of([b"".join(events)])
    assert in_pieces == recorded.of([b"".join(events)], is_read=True)
    assert "agentlightning.response.is_cut" not in in_pieces


def _unescaped(event: bytes) -> bytes:
    """With letters of several bytes, which may be cut too."""
    name, _, data = event.partition(b"data: ")
    if data.strip() == b"[DONE]":
        return event
    return name + b"data: " + json.dumps(json.loads(data), ensure_ascii=False).encode() + b"\n\n"


ODD_STREAMS = {
    "data over several lines": b'data: {"choices": [{"delta":\ndata: {"content": "Yes"}}]}\n\ndata: [DONE]\n\n',
    "no end of the last line": b'data: {"choices": [{"delta": {"content": "Yes"}}]}\n\ndata: [DONE]',
    "an infinite number": b'data: {"choices": [{"delta": {"content": "Yes"}, "x": -Infinity}]}\n\ndata: [DONE]\n\n',
    "half a character": b'data: {"choices": [{"delta": {"content": "Yes"}, "x": "\\ud83d"}]}\n\ndata: [DONE]\n\n',
    "an event that is no object": b"data: [1]\n\n"
    b'data: {"choices": [{"delta": {"content": "Yes"}}]}\n\ndata: [DONE]\n\n',
}


@pytest.mark.parametrize("stream", ODD_STREAMS.values(), ids=ODD_STREAMS)
def test_an_odd_stream_is_read(stream: bytes, caplog: pytest.LogCaptureFixture) -> None:
    attributes = Recorded(chat.DIALECT).of([stream])

    assert attributes["gen_ai.completion.0.content"] == "Yes"
    assert "agentlightning.response.is_cut" not in attributes
    assert caplog.records == []


BROKEN_EVENTS = (b"data: {broken\n\n", b'data: {"choices": [5]}\n\n', b'data: {"choices": [{"delta": 3}]}\n\n')


@pytest.mark.parametrize("broken", BROKEN_EVENTS)
def test_a_broken_event_does_not_take_others_with_it(broken: bytes, caplog: pytest.LogCaptureFixture) -> None:
    good = [b'data: {"choices": [{"delta": {"content": "%s"}}]}\n\n' % text for text in (b"Ye", b"s")]

    attributes = Recorded(chat.DIALECT).of([good[0] + broken + good[1] + b"data: [DONE]\n\n"])

    assert attributes["gen_ai.completion.0.content"] == "Yes"
    assert "agentlightning.response.is_cut" not in attributes
    assert len(caplog.records) == 1


# ---------------------------------------------------------------------- odd values


class Name(str, Enum):
    """Texts of an SDK that are members of an enum."""

    USER = "user"
    LENGTH = "length"
    MODEL = "gpt"
    TOOL = "weather"


ENUM_REQUESTS: dict[str, tuple[Dialect, dict[str, Any]]] = {
    "chat": (chat.DIALECT, {"messages": [{"role": Name.USER, "content": "hi"}]}),
    "chat in parts": (chat.DIALECT, {"messages": [{"role": Name.USER, "content": [{"type": "text", "text": "hi"}]}]}),
    "responses": (responses.DIALECT, {"input": [{"role": Name.USER, "content": "hi"}]}),
    "messages": (messages.DIALECT, {"messages": [{"role": Name.USER, "content": "hi"}]}),
}


@pytest.mark.parametrize(("dialect", "body"), ENUM_REQUESTS.values(), ids=ENUM_REQUESTS)
def test_a_member_of_an_enum_is_written_as_its_value(dialect: Dialect, body: dict[str, Any]) -> None:
    attributes = dialect.request_attributes({"model": Name.MODEL, "stop": [Name.LENGTH], **body})

    told = {name: attributes[f"gen_ai.{name}"] for name in ("prompt.0.role", "request.model", "request.stop")}
    assert told == {"prompt.0.role": "user", "request.model": "gpt", "request.stop": ["length"]}
    assert type(told["prompt.0.role"]) is type(told["request.model"]) is str


class Colour(Enum):
    RED = "red"


class Slotted:
    __slots__ = ("model_dump",)


class Hostile:
    def __str__(self) -> str:
        raise RuntimeError("no")

    __repr__ = __str__


class Raising:
    """Raises at every attribute it does not have."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


class Extra(BaseModel, extra="allow"):
    name: str


def circular() -> list[Any]:
    things: list[Any] = []
    things.append(things)
    return things


ODD_VALUES: dict[str, tuple[Any, str | None]] = {
    "text": ("é", "é"),
    "big number": ([2**70], "[1180591620717411303424]"),
    "not a number": ([float("nan")], "[null]"),
    "bytes": ([b"x"], "[\"b'x'\"]"),
    "enum": ([Colour.RED], '["red"]'),
    "model with more": (Extra(name="a", more=[1]), '{"name":"a","more":[1]}'),
    "numbered keys": ({1: 2}, '{"1":2}'),
    "half a character": (["\ud800"], None),
    "circular": (circular(), None),
    "slots": ([Slotted()], None),
    "hostile": ([Hostile()], None),
    "hostile alone": (Hostile(), None),
    "raising": ([Raising()], None),
    "lock": ([threading.Lock()], None),
    "tuple key": ({(1, 2): 3}, None),
}


@pytest.mark.parametrize(("value", "text"), ODD_VALUES.values(), ids=ODD_VALUES)
def test_odd_values_are_text(value: Any, text: str | None) -> None:
    written = as_json(value)

    assert isinstance(written, str)
    assert text is None or written == text


ODD_BODIES: list[dict[str, Any]] = [
    {},
    {"messages": None, "tools": None, "input": None, "prompt": None, "system": None},
    {"messages": [None, 5, "text", {}, {"role": None}, {"content": {"a": 1}}, {"tool_calls": [None, {}]}]},
    {"messages": [{"role": "user", "content": [None, {"type": "tool_result"}, {"type": "tool_use"}]}]},
    {"input": [None, {}, {"type": "reasoning", "summary": []}, {"type": "item_reference", "id": "x"}, 5]},
    {"prompt": [], "tools": [None, {}, {"function": None}], "functions": [None], "stop": None, "temperature": "hot"},
    {"model": 5, "n": None, "stop": [1, None], "metadata": {"a": 1}, "input": [[1, 2], [3]]},
]
ODD_ANSWERS: list[Any] = [
    None,
    "text",
    {},
    {"choices": None, "usage": None, "content": None, "output": None, "data": None},
    {"choices": [None, {}, {"message": None}, {"text": None, "logprobs": {"tokens": None}}], "usage": {}},
    {"choices": [{"message": {"content": [{"type": "text", "text": "a"}]}}], "usage": {"prompt_tokens": None}},
    {"content": [None, {}, {"type": "text"}, {"type": "text", "text": None}, {"type": "tool_use"}, "x"]},
    {"output": [None, {}, {"type": "message"}, {"type": "message", "content": [None, {"type": "output_text"}]}]},
    {"prompt_token_ids": 5, "response_token_ids": "x", "id": 3, "model": None, "weights_version": [1]},
    {"response_token_ids": [], "choices": [{"token_ids": None}]},
]


@pytest.mark.parametrize("name", ["/chat/completions", "/completions", "/responses", "/embeddings", "/v1/messages"])
def test_odd_requests_and_answers_are_read(name: str) -> None:
    dialect = {**OPENAI_DIALECTS, **ANTHROPIC_DIALECTS}[name]

    for body in ODD_BODIES:
        assert None not in dialect.request_attributes(body).values()
    for answer in ODD_ANSWERS:
        written = dialect.response_attributes(answer)
        assert None not in written.values()
        assert not any("None" in str(value) for value in written.values())


PATHS: dict[str, str | None] = {
    "/chat/completions": "openai.chat.completion",
    "/openai/deployments/gpt/chat/completions?api-version=1": "openai.chat.completion",
    "https://me.example/v1/completions/": "openai.completion",
    "/responses": "openai.responses",
    "/responses/resp_1/cancel": None,
    "/chat/completions/id": None,
    "/embeddings": "openai.embeddings",
    "/models": None,
    "/images/generations": None,
}


@pytest.mark.parametrize(("path", "name"), PATHS.items())
def test_a_dialect_is_known_by_its_path(path: str, name: str | None) -> None:
    dialect = dialect_of(path, OPENAI_DIALECTS)

    assert (dialect.span_name if dialect else None) == name
