"""Spans become chat messages in OpenAI's shape, without OpenAI's package."""

import re
from typing import Any

import pytest

from agentlightning.adapter import TraceToMessages
from agentlightning.adapter.messages import convert_to_openai_messages, group_genai_dict
from agentlightning.types import Span, TraceStatus
from tests.adapter.spans import span

PROMPT = {"gen_ai.prompt.0.role": "user", "gen_ai.prompt.0.content": "2+2?"}


def chat(**attributes: Any) -> Span:
    return span("chat", attributes={**PROMPT, **attributes})


def adapted(*spans: Span) -> Any:
    (conversation,) = TraceToMessages().adapt(spans)
    return conversation


def test_a_call_that_failed_without_an_answer_is_no_conversation() -> None:
    failed = {"status": TraceStatus(status_code="ERROR")}
    cut = span("cut", attributes={**PROMPT, "gen_ai.completion.0.role": "assistant"}, **failed)

    assert TraceToMessages().adapt([span("failed", attributes=PROMPT, **failed)]) == []
    assert len(TraceToMessages().adapt([cut])) == 1


@pytest.mark.parametrize(
    ("flat", "grouped"),
    [
        pytest.param({"p.a": 1, "q.b": 2}, {"a": 1}, id="names"),
        pytest.param({"p.a.b": 1, "p.a.c.d": 2}, {"a": {"b": 1, "c": {"d": 2}}}, id="nested"),
        pytest.param({"p.10.r": "c", "p.2.r": "b", "p.0.r": "a"}, [{"r": "a"}, {"r": "b"}, {"r": "c"}], id="numbers"),
        pytest.param({"p.0.r": "a", "p.filter": "x"}, [{"r": "a"}], id="other-names-go"),
        pytest.param({"p.0.calls.1.id": "i"}, [{"calls": [{"id": "i"}]}], id="lists-in-lists"),
        pytest.param({"p.0": "a", "p.1": "b"}, ["a", "b"], id="plain-items"),
        pytest.param({"prefix.0": 1}, {}, id="nothing"),
    ],
)
def test_dotted_names_are_unflattened(flat: dict[str, Any], grouped: object) -> None:
    assert group_genai_dict(flat, "p") == grouped


def test_tools_that_ran_beneath_a_completion_are_its_tool_calls() -> None:
    call = {"tool.name": "add", "tool.parameters": '{"a": 2}', "tool.call.id": "t1", "tool.call.type": "function"}
    spans = [
        span("chat", attributes={**PROMPT, "gen_ai.completion.0.role": "assistant"}),
        span("tool", "chat", attributes=call),
        span("deeper", "tool", attributes=call),
        span("plain", "chat"),
    ]

    assert adapted(*spans)["messages"][1] == {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "t1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}],
    }


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        pytest.param({"gen_ai.prompt.role": "user"}, r"'gen_ai.prompt.\*' of span 'c' must be numbered", id="prompt"),
        pytest.param({"gen_ai.completion.role": "x"}, "gen_ai.completion", id="completion"),
        pytest.param({"gen_ai.request.0.model": "m"}, "must be named", id="request"),
        pytest.param({"gen_ai.response.0.id": "r"}, "gen_ai.response", id="response"),
        pytest.param({"gen_ai.prompt.0.role": "robot"}, "role 'robot'; OpenAI knows developer", id="role"),
        pytest.param({"gen_ai.prompt.0.content": "hi"}, "role None", id="no-role"),
        pytest.param({"gen_ai.prompt.0.role": "user", "gen_ai.prompt.0.content": 4}, "must be text", id="content"),
        pytest.param({"gen_ai.prompt.0.role": "tool"}, "'tool_call_id'", id="tool-without-call"),
        pytest.param({"gen_ai.prompt.0": "hi"}, "where a list of objects belongs", id="no-object"),
    ],
)
def test_a_call_of_the_wrong_shape_is_left_out_and_told(
    attributes: dict[str, Any], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    healthy = {"gen_ai.prompt.0.role": "user", "gen_ai.prompt.0.content": "hi"}

    found = TraceToMessages().adapt([span("c", attributes=attributes), span("d", attributes=healthy)])

    assert [one["messages"] for one in found] == [[{"role": "user", "content": "hi"}]]
    (line,) = [record.getMessage() for record in caplog.records]
    assert re.search(message, line)


def test_a_tool_without_an_id_is_refused() -> None:
    call = {
        "prompt": [],
        "completion": [{"role": "assistant"}],
        "request": {},
        "response": {},
        "tools": [{"name": "add"}],
    }

    with pytest.raises(ValueError, match="needs a text under 'id'"):
        list(convert_to_openai_messages([call]))  # type: ignore[list-item] # a plain dictionary, as users pass it


def test_parts_of_a_message_and_arguments_that_are_no_text_are_allowed() -> None:
    parts = [{"type": "text", "text": "hi"}]
    tool = {"name": "add", "parameters": {"a": 2}, "call": {"id": "t1"}}
    call = {"completion": [{"role": "assistant"}], "request": {}, "response": {}, "tools": [tool]}

    (conversation,) = convert_to_openai_messages([{"prompt": [{"role": "user", "content": parts}], **call}])  # type: ignore[list-item,typeddict-item] # as above

    assert conversation["messages"][0]["content"] == parts
    assert conversation["messages"][1]["tool_calls"][0]["function"]["arguments"] == '{"a": 2}'


IMAGE = {"type": "image_url", "image_url": {"url": "https://x/y.png"}}


@pytest.mark.parametrize(
    ("said", "content"),
    [
        pytest.param('[{"type": "input_text", "text": "hi"}]', [{"type": "text", "text": "hi"}], id="text"),
        pytest.param('[{"type": "input_image", "image_url": "https://x/y.png"}]', [IMAGE], id="url"),
        pytest.param(
            '[{"type": "image", "source": {"type": "url", "url": "https://x/y.png"}}]', [IMAGE], id="source by url"
        ),
        pytest.param(
            '[{"type": "image_url", "image_url": {"url": "u", "detail": "low"}}]',
            [{"type": "image_url", "image_url": {"url": "u", "detail": "low"}}],
            id="detail",
        ),
        pytest.param(
            '[{"type": "input_image", "image_url": "u", "detail": "low"}]',
            [{"type": "image_url", "image_url": {"url": "u", "detail": "low"}}],
            id="detail of a response",
        ),
        pytest.param(
            '[{"type": "image", "source": {"type": "file", "file_id": "f"}}]',
            [{"type": "image", "source": {"type": "file", "file_id": "f"}}],
            id="image that only its API can find",
        ),
        pytest.param('[{"type": "room", "text": "Oak"}]', '[{"type": "room", "text": "Oak"}]', id="unknown kind"),
        pytest.param('[{"type": "text"}]', '[{"type": "text"}]', id="no field"),
        pytest.param('[{"type": "text", "text": "hi"', '[{"type": "text", "text": "hi"', id="no JSON"),
    ],
)
def test_content_is_in_parts_only_if_all_are_known(said: str, content: object) -> None:
    attributes = {"gen_ai.prompt.0.role": "user", "gen_ai.prompt.0.content": said}

    assert adapted(span("c", attributes=attributes))["messages"] == [{"role": "user", "content": content}]
