"""Requests in another dialect: what can be said is said as the real SDKs type it, and what cannot is refused."""

import functools
import pickle
from collections.abc import Iterable
from typing import Any

import orjson
import pytest
from anthropic.types.message_create_params import MessageCreateParamsNonStreaming
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming
from openai.types.responses.response_create_params import ResponseCreateParamsNonStreaming
from pydantic import TypeAdapter

from agentlightning.dialects.base import UntranslatableRequest
from tests.dialects.sdks import translation

PIXEL = "iVBORw0KGgo="
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
CHAT_TOOL = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": SCHEMA}}
MESSAGES_TOOL = {"name": "weather", "description": "d", "input_schema": SCHEMA}
RESPONSES_TOOL = {"type": "function", "name": "weather", "description": "d", "parameters": SCHEMA, "strict": False}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Bern"}'}}

CHAT = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "Be kind."},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "Weather?"},
                {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}},
                {"type": "image_url", "image_url": {"url": "https://x.test/a.png"}},
            ],
        },
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "Sunny"},
        {"role": "user", "content": "Thanks"},
    ],
    "tools": [CHAT_TOOL],
    "tool_choice": "auto",
    "temperature": 0.5,
    "max_completion_tokens": 50,
}
MESSAGES = {
    "model": "m",
    "system": "Be kind.",
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "Weather?"},
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}},
                {"type": "image", "source": {"type": "url", "url": "https://x.test/a.png"}},
            ],
        },
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Bern"}}],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": "Sunny"},
                {"type": "text", "text": "Thanks"},
            ],
        },
    ],
    "tools": [MESSAGES_TOOL],
    "tool_choice": {"type": "auto"},
    "temperature": 0.5,
    "max_tokens": 50,
}
RESPONSES = {
    "model": "m",
    "input": [
        {"type": "message", "role": "system", "content": "Be kind."},
        {
            "type": "message",
            "role": "user",
            "content": [
                {"type": "input_text", "text": "Weather?"},
                {"type": "input_image", "image_url": f"data:image/png;base64,{PIXEL}", "detail": "auto"},
                {"type": "input_image", "image_url": "https://x.test/a.png", "detail": "auto"},
            ],
        },
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city":"Bern"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "Sunny"},
        {"type": "message", "role": "user", "content": "Thanks"},
    ],
    "tools": [RESPONSES_TOOL],
    "tool_choice": "auto",
    "temperature": 0.5,
    "max_output_tokens": 50,
    "store": False,
}
STRICTLESS_CHAT = {**CHAT, "tools": [{"type": "function", "function": {**CHAT_TOOL["function"], "strict": False}}]}
STRICTLESS_MESSAGES = {**MESSAGES, "tools": [{**MESSAGES_TOOL, "strict": False}]}
PARAMS: dict[str, Any] = {
    "chat": CompletionCreateParamsNonStreaming,
    "messages": MessageCreateParamsNonStreaming,
    "responses": ResponseCreateParamsNonStreaming,
}


@functools.cache
def adapter_of(dialect: str) -> TypeAdapter[Any]:
    return TypeAdapter(PARAMS[dialect])


def valid(dialect: str, body: dict[str, Any]) -> dict[str, Any]:
    """A request that the dialect's SDK takes."""
    exhaust(adapter_of(dialect).validate_python(body))
    return body


def exhaust(value: Any) -> None:
    """Walk through a validated value: pydantic checks the entries of an iterable when they are taken."""
    if isinstance(value, dict):
        value = value.values()
    if isinstance(value, Iterable) and not isinstance(value, str):
        for entry in value:
            exhaust(entry)


def said(client: str, backend: str, **fields: Any) -> dict[str, Any]:
    least: dict[str, dict[str, Any]] = {
        "chat": {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
        "messages": {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9},
        "responses": {"model": "m", "input": "hi"},
    }
    return valid(backend, translation(client, backend).request({**least[client], **fields}))


@pytest.mark.parametrize(
    ("client", "backend", "given", "expected"),
    [
        ("chat", "messages", CHAT, MESSAGES),
        ("messages", "chat", MESSAGES, CHAT),
        ("chat", "responses", CHAT, RESPONSES),
        ("responses", "chat", RESPONSES, STRICTLESS_CHAT),
        ("messages", "responses", MESSAGES, RESPONSES),
        ("responses", "messages", RESPONSES, STRICTLESS_MESSAGES),
        ("chat", "chat", CHAT, CHAT),
    ],
)
def test_conversation_with_tools_and_images(
    client: str, backend: str, given: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert valid(backend, translation(client, backend).request(given)) == expected


@pytest.mark.parametrize(
    ("client", "backend", "fields", "expected"),
    [
        ("chat", "messages", {}, {"max_tokens": 4096}),
        ("chat", "messages", {"max_tokens": 7}, {"max_tokens": 7}),
        ("chat", "messages", {"stop": "END"}, {"stop_sequences": ["END"]}),
        ("chat", "messages", {"top_p": 0.1, "top_k": 5}, {"top_p": 0.1, "top_k": 5}),
        ("chat", "messages", {"reasoning_effort": "high"}, {"output_config": {"effort": "high"}}),
        ("chat", "messages", {"reasoning_effort": "none"}, {"thinking": {"type": "disabled"}}),
        ("chat", "messages", {"tools": [CHAT_TOOL], "tool_choice": "required"}, {"tool_choice": {"type": "any"}}),
        (
            "chat",
            "messages",
            {"tools": [CHAT_TOOL], "parallel_tool_calls": False},
            {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        ),
        (
            "chat",
            "messages",
            {"tools": [CHAT_TOOL], "tool_choice": {"type": "function", "function": {"name": "weather"}}},
            {"tool_choice": {"type": "tool", "name": "weather"}},
        ),
        (
            "chat",
            "messages",
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
            {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        ),
        ("messages", "chat", {"stop_sequences": ["END"]}, {"stop": ["END"], "max_completion_tokens": 9}),
        ("messages", "chat", {"thinking": {"type": "enabled", "budget_tokens": 2048}}, {"reasoning_effort": "low"}),
        ("messages", "chat", {"thinking": {"type": "enabled", "budget_tokens": 32000}}, {"reasoning_effort": "high"}),
        ("messages", "chat", {"tool_choice": {"type": "any"}}, {"tool_choice": "required"}),
        (
            "messages",
            "chat",
            {"tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True}},
            {"tool_choice": {"type": "function", "function": {"name": "f"}}, "parallel_tool_calls": False},
        ),
        (
            "messages",
            "chat",
            {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True},
                }
            },
        ),
        ("responses", "chat", {"reasoning": {"effort": "low", "summary": "auto"}}, {"reasoning_effort": "low"}),
        (
            "responses",
            "chat",
            {"text": {"format": {"type": "json_object"}}},
            {"response_format": {"type": "json_object"}},
        ),
        (
            "responses",
            "chat",
            {"text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA, "strict": True}}},
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": SCHEMA, "strict": True},
                }
            },
        ),
        (
            "responses",
            "chat",
            {"tool_choice": {"type": "function", "name": "f"}},
            {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        ),
        (
            "chat",
            "responses",
            {"reasoning_effort": "low", "verbosity": "low"},
            {"reasoning": {"effort": "low"}, "text": {"verbosity": "low"}},
        ),
        (
            "chat",
            "responses",
            {"response_format": {"type": "json_object"}},
            {"text": {"format": {"type": "json_object"}}},
        ),
    ],
)
def test_options_are_said_in_the_other_dialect(
    client: str, backend: str, fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    body = said(client, backend, **fields)

    assert {name: body[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("client", "backend", "fields", "place"),
    [
        ("chat", "messages", {"n": 2}, "n"),
        ("chat", "messages", {"logprobs": True}, "logprobs"),
        ("chat", "messages", {"frequency_penalty": 0.5}, "frequency_penalty"),
        ("chat", "messages", {"response_format": {"type": "json_object"}}, "response_format"),
        ("chat", "messages", {"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0] of type 'custom'"),
        ("chat", "messages", {"functions": [{"name": "x"}]}, "functions"),
        ("chat", "messages", {"unheard_of": 1}, "unheard_of"),
        ("chat", "responses", {"stop": ["END"]}, "stop"),
        ("chat", "responses", {"n": 3}, "n"),
        ("messages", "responses", {"stop_sequences": ["END"]}, "stop"),
        (
            "messages",
            "chat",
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            "tools[0] of type 'web_search_20250305'",
        ),
        ("messages", "chat", {"container": "c"}, "container"),
        ("messages", "chat", {"mcp_servers": [{}]}, "mcp_servers"),
        ("responses", "chat", {"previous_response_id": "r"}, "previous_response_id"),
        ("responses", "chat", {"conversation": "c"}, "conversation"),
        ("responses", "chat", {"background": True}, "background"),
        ("responses", "chat", {"tools": [{"type": "web_search"}]}, "tools[0] of type 'web_search'"),
        ("responses", "chat", {"include": ["message.output_text.logprobs"]}, "include 'message.output_text.logprobs'"),
        (
            "responses",
            "messages",
            {"input": [{"type": "item_reference", "id": "x"}]},
            "input[0] of type 'item_reference'",
        ),
    ],
)
def test_what_cannot_be_said_is_refused_by_name(client: str, backend: str, fields: dict[str, Any], place: str) -> None:
    with pytest.raises(UntranslatableRequest) as caught:
        said(client, backend, **fields)

    assert caught.value.field == place
    assert place in str(caught.value)
    assert client in str(caught.value)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.field, str(again)) == (place, str(caught.value))


@pytest.mark.parametrize(
    ("client", "backend", "fields"),
    [
        (
            "chat",
            "messages",
            {"user": "u", "seed": 1, "store": True, "n": 1, "logprobs": False, "metadata": {"a": "b"}},
        ),
        ("chat", "responses", {"user": "u", "service_tier": "auto", "presence_penalty": 0, "stop": None}),
        (
            "messages",
            "chat",
            {"metadata": {"user_id": "u"}, "service_tier": "auto", "cache_control": {"type": "ephemeral"}},
        ),
        (
            "responses",
            "chat",
            {"store": True, "user": "u", "truncation": "auto", "include": ["reasoning.encrypted_content"]},
        ),
    ],
)
def test_harmless_hints_are_dropped(client: str, backend: str, fields: dict[str, Any]) -> None:
    assert said(client, backend, **fields) == said(client, backend)


@pytest.mark.parametrize("client", ["messages", "responses"])
def test_streams_of_chat_are_asked_for_their_usage(client: str) -> None:
    given = {**(MESSAGES if client == "messages" else RESPONSES), "stream": True}

    body = translation(client, "chat").request(given)

    assert (body["stream"], body["stream_options"]) == (True, {"include_usage": True})


def test_thought_goes_back_where_it_came_from() -> None:
    answer = {"id": "1", "model": "m", "choices": [{"message": {"content": "a", "reasoning": "hmm"}}]}
    message = translation("messages", "chat").response(answer)

    body = said("messages", "chat", messages=[{"role": "assistant", "content": message["content"]}])

    assert body["messages"] == [{"role": "assistant", "content": "a", "reasoning": "hmm"}]


def test_items_of_one_answer_are_one_message() -> None:
    items = [
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hmm"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Let me look."}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city":"Bern"}'},
        {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "Sunny"}]},
    ]

    messages = said("responses", "chat", input=items, instructions="Be kind.")["messages"]

    second = {"id": "c2", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    spoken = {"role": "assistant", "content": "Let me look.", "reasoning_content": "hmm", "tool_calls": [CALL, second]}
    result = {"role": "tool", "tool_call_id": "c1", "content": "Sunny"}
    assert messages == [{"role": "system", "content": "Be kind."}, spoken, result]


def test_pictures_that_a_tool_gives_follow_its_text() -> None:
    image = {"type": "image", "source": {"type": "url", "url": "https://x.test/a.png"}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "See:"}, image]}

    messages = said("messages", "chat", messages=[{"role": "user", "content": [result]}])["messages"]

    picture = {"type": "image_url", "image_url": {"url": "https://x.test/a.png"}}
    assert messages == [
        {"role": "tool", "tool_call_id": "c1", "content": "See:"},
        {"role": "user", "content": [picture]},
    ]


@pytest.mark.parametrize(
    "body", [{}, {"messages": 3}, {"messages": [{}]}, {"messages": [{"role": "user", "content": [1]}]}]
)
@pytest.mark.parametrize("backend", ["messages", "responses"])
def test_request_of_another_shape_is_refused(backend: str, body: dict[str, Any]) -> None:
    with pytest.raises(UntranslatableRequest, match="shape of the chat dialect"):
        translation("chat", backend).request(body)


# ---------------------------------------------------------------------- there and back

texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
arguments = st.dictionaries(texts, texts | st.integers(-99, 99) | st.booleans(), max_size=2)


@st.composite
def turns(draw: st.DrawFn) -> list[dict[str, Any]]:
    """A turn of a chat: the user's words, and an answer or calls with their results."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": draw(texts)}]
    given = draw(st.lists(arguments, max_size=2))
    content = draw(texts) if not given else draw(st.none() | texts)
    spoken: dict[str, Any] = {"role": "assistant", "content": content}
    if given:
        names = [f"c{draw(st.integers(0, 10**6))}-{number}" for number in range(len(given))]
        functions = [{"name": "f", "arguments": orjson.dumps(entry).decode()} for entry in given]
        pairs = zip(names, functions, strict=True)
        spoken["tool_calls"] = [{"id": name, "type": "function", "function": function} for name, function in pairs]
        results = [{"role": "tool", "tool_call_id": name, "content": draw(texts)} for name in names]
        return [*messages, spoken, *results]
    return [*messages, spoken]


@pytest.mark.parametrize("other", ["messages", "responses"])
@given(st.lists(turns(), min_size=1, max_size=3), st.none() | texts)
def test_chat_comes_back_from_another_dialect_as_it_was(
    other: str, rounds: list[list[dict[str, Any]]], system: str | None
) -> None:
    messages = [message for turn in rounds for message in turn]
    if system:
        messages.insert(0, {"role": "system", "content": system})

    there = translation("chat", other).request({"model": "m", "messages": messages})
    back = translation(other, "chat").request(there)

    assert back["messages"] == messages
