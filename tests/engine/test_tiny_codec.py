"""The tiny model's chat format: what was sampled comes back unchanged in the next turn, whatever it was."""

import json
import subprocess
import sys
from itertools import chain
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentlightning.engine.codec import CallArguments, CallStarted, ContentDelta, Message, ParsedMessage, ToolDefinition
from agentlightning.engine.tiny import tokenizer
from agentlightning.engine.tiny.codec import TinyChatCodec
from agentlightning.engine.tiny.tokenizer import ASSISTANT, CALL, END, NAMED, VOCABULARY_SIZE, encode
from agentlightning.errors import InvalidRequest


def tool(name: str, **types: str) -> ToolDefinition:
    properties = {parameter: {"type": kind} for parameter, kind in types.items()}
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


CALCULATOR = tool("calculator", expression="string")
LOOKUP = tool("look", key="string")
LOOKUP_ALL = tool("look_all", key="string", limit="integer")
CODEC = TinyChatCodec()
QUESTION: Message = {"role": "user", "content": "37+58?"}
ONE = [CALCULATOR]
RAW = [LOOKUP_ALL]
SEVERAL = [CALCULATOR, LOOKUP, LOOKUP_ALL]

tool_lists = st.sampled_from([None, ONE, RAW, SEVERAL])
names = st.sampled_from([encode("calculator"), encode("look"), encode("look_all"), encode("lo")])
structure = st.sampled_from([[CALL], [NAMED], [END], encode("{}"), encode('"\\')])
anything = st.integers(0, VOCABULARY_SIZE - 1).map(lambda token: [token])
sampled_tokens = st.lists(anything | structure | names, max_size=30).map(lambda parts: [*chain(*parts)])


def next_turn(parsed: ParsedMessage) -> list[Message]:
    """The conversation as the agent sends it back, through JSON, with a result for every call."""
    answer: dict[str, Any] = json.loads(json.dumps(parsed.as_message()))
    results = [{"role": "tool", "tool_call_id": call.id, "content": "95"} for call in parsed.tool_calls]
    return [QUESTION, answer, *results]


@settings(max_examples=2 * settings.default.max_examples)
@given(tools=tool_lists, sampled=sampled_tokens)
def test_next_turn_begins_with_the_sampled_tokens_and_calls_name_given_tools(
    tools: list[ToolDefinition] | None, sampled: list[int]
) -> None:
    prompt, parsed = CODEC.render([QUESTION], tools), CODEC.parse(sampled, tools)

    following = CODEC.render(next_turn(parsed), tools)

    assert following[: len(prompt) + len(sampled)] == prompt + sampled
    parameters = {"calculator": "expression", "look": "key"}
    for call in parsed.tool_calls:
        assert call.name in [given["function"]["name"] for given in tools or []]
        if call.name in parameters:
            assert list(json.loads(call.arguments)) == [parameters[call.name]]


@given(tools=tool_lists, sampled=sampled_tokens)
def test_message_cut_short_is_closed_in_the_next_turn(tools: list[ToolDefinition] | None, sampled: list[int]) -> None:
    cut = [*sampled, encode("x")[0]]

    following = CODEC.render(next_turn(CODEC.parse(cut, tools)), tools)

    assert following[len(CODEC.render([QUESTION], tools)) + len(cut)] == END


def test_call_of_the_only_tool_is_its_bare_string() -> None:
    parsed = CODEC.parse([CALL, *encode("37+58"), END], ONE)

    assert parsed.content is None
    assert [(call.name, call.arguments) for call in parsed.tool_calls] == [("calculator", '{"expression": "37+58"}')]
    assert CODEC.render([parsed.as_message()], ONE) == [ASSISTANT, CALL, *encode("37+58"), END, ASSISTANT]


def test_arguments_written_anew_by_a_framework_render_alike() -> None:
    parsed = CODEC.parse([CALL, *encode('a"b'), END], ONE)
    message = parsed.as_message()
    arguments = json.loads(message["tool_calls"][0]["function"]["arguments"])

    message["tool_calls"][0]["function"]["arguments"] = json.dumps(arguments, indent=2)

    assert CODEC.render([message], ONE) == [ASSISTANT, CALL, *encode('a"b'), END, ASSISTANT]


def test_text_and_several_calls_stand_in_one_message() -> None:
    sampled = [*encode("let me see"), CALL, *encode("calculator"), NAMED, *encode("1+2"), CALL, *encode("look"), NAMED]

    parsed = CODEC.parse([*sampled, *encode("x"), END], SEVERAL)

    assert parsed.content == "let me see"
    assert [(call.name, json.loads(call.arguments)) for call in parsed.tool_calls] == [
        ("calculator", {"expression": "1+2"}),
        ("look", {"key": "x"}),
    ]
    assert len({call.id for call in parsed.tool_calls}) == 2


def test_call_of_an_unknown_tool_stays_text() -> None:
    parsed = CODEC.parse([CALL, *encode("erase"), NAMED, *encode("all"), END], SEVERAL)

    assert parsed.tool_calls == []
    assert "erase" in (parsed.content or "")


@pytest.mark.parametrize("text", ["ä 你好 🙂", "\ud800", "\x00\t\r", "\ue005\ue008"], ids=ascii)
@pytest.mark.parametrize("role", ["user", "tool", "system"])
def test_text_of_others_cannot_say_special_tokens(role: str, text: str) -> None:
    rendered = CODEC.render([{"role": role, "content": text}])[:-1]

    assert tokenizer.decode(rendered[1:-1]) == "".join("?" if character != " " else " " for character in text)
    assert len(rendered) == len(text) + 2


@pytest.mark.parametrize(
    "message",
    [
        {"role": "judge", "content": "x"},
        {"content": "x"},
        {"role": "user", "content": 5},
        {"role": "assistant", "tool_calls": [{"function": {}}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "calculator", "arguments": {"expression": "1"}}}]},
    ],
    ids=["unknown role", "no role", "number", "nameless call", "arguments are no text"],
)
def test_message_that_cannot_be_rendered_is_refused(message: Message) -> None:
    with pytest.raises(InvalidRequest):
        CODEC.render([message], ONE)


def test_stream_says_what_is_certain_at_once() -> None:
    parser = CODEC.stream(ONE)

    assert parser.add(encode("a")[0]) == [ContentDelta("a")]
    started, opened = parser.add(CALL)
    assert isinstance(started, CallStarted)
    assert started.name == "calculator"
    assert opened == CallArguments(0, '{"expression": "')
    assert parser.add(encode('"')[0]) == [CallArguments(0, '\\"')]
    assert parser.add(END) == []
    assert parser.finish() == [CallArguments(0, '"}')]


def test_stream_holds_a_name_back_until_it_is_known() -> None:
    parser = CODEC.stream(SEVERAL)

    held = [parser.add(token) for token in [CALL, *encode("look")]]
    named = parser.add(NAMED)

    assert held == [[]] * 5
    assert isinstance(named[0], CallStarted)
    assert named[0].name == "look"


def test_codec_needs_no_torch() -> None:
    modules = ["engine", "engine.model", "engine.sampling", "engine.tiny.codec"]
    program = (
        "".join(f"import agentlightning.{module}\n" for module in modules) + "import sys; print('torch' in sys.modules)"
    )

    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)

    assert run.stdout.strip() == "False"
