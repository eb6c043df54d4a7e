"""Calls with Anthropic's SDK: one span each, although newer releases of it write spans of their own."""

import json
from typing import Any

import pytest
from anthropic._base_client import AsyncAPIClient, SyncAPIClient

from agentlightning.tracer import OtelTracer
from tests.instrumentation import sdk_calls
from tests.instrumentation.sdk_calls import MESSAGE_WAYS, USER, WEATHER, Asking, AskingAnthropic, values
from tests.instrumentation.traces import Trace, observed
from tests.stub_model.script import Answer, Script
from tests.stub_model.server import StubModel
from tests.stub_model.words import ToolCall

ASK: dict[str, Any] = {"model": "stub-model", "max_tokens": 99, "messages": USER}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS: Any = [{"name": "weather", "description": "It says.", "input_schema": SCHEMA}]


def call_of(trace: Trace) -> dict[str, Any]:
    return sdk_calls.call_of(trace, "anthropic.messages")


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("way", MESSAGE_WAYS.values(), ids=MESSAGE_WAYS)
def test_a_message_is_one_span_however_it_is_asked(
    stub_model: StubModel, way: tuple[str, dict[str, Any]], is_async: bool
) -> None:
    method, options = way
    ask_anthropic = AskingAnthropic(stub_model, is_async=is_async)

    attributes = call_of(ask_anthropic(method, **ASK, **options, system="Be brief."))

    assert values(attributes, "gen_ai.prompt.") == {
        "0.role": "system",
        "0.content": "Be brief.",
        "1.role": "user",
        "1.content": "Hello there",
    }
    assert values(attributes, "gen_ai.completion.0.") == {
        "role": "assistant",
        "content": "Hello there",
        "finish_reason": "end_turn",
    }
    usage = values(attributes, "gen_ai.usage.")
    assert (usage["completion_tokens"], usage["prompt_tokens"]) == (
        3,
        len(ask_anthropic.model.requests[0].prompt_token_ids),
    )
    assert (attributes["gen_ai.system"], attributes["gen_ai.request.max_tokens"]) == ("anthropic", 99)
    assert attributes["gen_ai.response.id"] == "msg-1"
    is_streaming = "stream" in options or method.endswith(".stream")
    assert ("gen_ai.streaming.time_to_first_token" in attributes) is is_streaming


@pytest.mark.parametrize("stream", [False, True])
def test_a_message_that_was_cut_off_says_so(ask_anthropic: Asking, stream: bool) -> None:
    attributes = call_of(ask_anthropic("messages.create", **{**ASK, "max_tokens": 1}, stream=stream))
    assert attributes["gen_ai.completion.0.finish_reason"] == "max_tokens"


@pytest.mark.parametrize("stream", [False, True])
def test_the_use_of_tools_is_told(ask_anthropic: Asking, stream: bool) -> None:
    ask_anthropic.model.script = Script([Answer("I look.", (WEATHER, ToolCall.of("clock")))])

    attributes = call_of(ask_anthropic("messages.create", **ASK, stream=stream, tools=TOOLS))

    told = values(attributes, "gen_ai.completion.0.")
    assert [json.loads(told.pop(f"tool_calls.{n}.arguments")) for n in range(2)] == [{"city": "Oslo"}, {}]
    assert told == {
        "role": "assistant",
        "content": "I look.",
        "finish_reason": "tool_use",
        "tool_calls.0.id": "toolu_1_0_0",
        "tool_calls.0.type": "function",
        "tool_calls.0.name": "weather",
        "tool_calls.1.id": "toolu_1_0_1",
        "tool_calls.1.type": "function",
        "tool_calls.1.name": "clock",
    }
    functions = values(attributes, "gen_ai.request.functions.0.")
    assert (functions["name"], json.loads(functions["parameters"])) == ("weather", SCHEMA)


def test_results_of_tools_are_messages_of_their_own(ask_anthropic: Asking) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Oslo"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "rain"}]},
                {"type": "text", "text": "So?"},
            ],
        },
    ]
    system = [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]

    attributes = call_of(
        ask_anthropic("messages.create", model="stub-model", max_tokens=9, system=system, messages=messages)
    )

    told = values(attributes, "gen_ai.prompt.")
    assert json.loads(told.pop("2.tool_calls.0.arguments")) == {"city": "Oslo"}
    assert told == {
        "0.role": "system",
        "0.content": "Be brief.",
        "1.role": "user",
        "1.content": "Weather?",
        "2.role": "assistant",
        "2.content": "I look.",
        "2.tool_calls.0.id": "t1",
        "2.tool_calls.0.type": "function",
        "2.tool_calls.0.name": "weather",
        "3.role": "tool",
        "3.content": "rain",
        "3.tool_call_id": "t1",
        "4.role": "user",
        "4.content": "So?",
    }


def test_an_answer_can_be_sent_back_as_the_objects_it_is(ask_anthropic: Asking) -> None:
    ask_anthropic.model.script = Script([Answer("I look.", (WEATHER,)), "It rains."])
    with AskingAnthropic(ask_anthropic.model, is_async=False).client() as client:
        first = client.messages.create(**ASK, tools=TOOLS)

    messages = [*USER, {"role": "assistant", "content": first.content}, *USER]
    attributes = call_of(ask_anthropic("messages.create", **{**ASK, "messages": messages}))

    assert attributes["gen_ai.prompt.1.content"] == "I look."
    assert json.loads(attributes["gen_ai.prompt.1.tool_calls.0.arguments"]) == {"city": "Oslo"}


def test_token_ids_are_found(ask_anthropic: Asking) -> None:
    trace = ask_anthropic("messages.create", **ASK, extra_body={"return_token_ids": True})
    attributes = call_of(trace)
    assert json.loads(attributes["prompt_token_ids"]) == list(ask_anthropic.model.requests[0].prompt_token_ids)
    assert len(json.loads(attributes["response_token_ids"])) == 3


@pytest.mark.parametrize("method", ["messages.count_tokens", "models.retrieve"])
def test_what_is_no_message_leaves_no_span_of_ours(ask_anthropic: Asking, method: str) -> None:
    arguments = {"model_id": "stub-model"} if "models" in method else {"model": "stub-model", "messages": USER}
    trace = ask_anthropic(method, **arguments)
    assert trace.error is None
    assert "anthropic.messages" not in [span.name for span in trace.spans]


# ---------------------------------------------------------------------- nothing is changed


def test_the_helper_gives_the_final_message(stub_model: StubModel) -> None:
    stub_model.script = Script([Answer("I look.", (WEATHER,))])
    with AskingAnthropic(stub_model, is_async=False).client() as client:

        def run() -> Any:
            with client.messages.stream(**ASK) as stream:
                return "".join(stream.text_stream), stream.get_final_message().content[1].input  # type: ignore[union-attr]

        trace = observed(run)

    assert trace.result == ("I look.", {"city": "Oslo"})
    assert call_of(trace)["gen_ai.completion.0.tool_calls.0.name"] == "weather"


def test_the_sdk_is_left_as_it_was_and_writes_its_own_spans_again(stub_model: StubModel) -> None:
    before = vars(SyncAPIClient)["request"], vars(AsyncAPIClient)["request"]
    with AskingAnthropic(stub_model, is_async=False).client() as client:
        call_of(observed(lambda: client.messages.create(**ASK)))
        with OtelTracer(instrument=False).lifespan() as tracer, tracer._trace_context_sync() as recorder:
            client.messages.create(**ASK)

    assert (vars(SyncAPIClient)["request"], vars(AsyncAPIClient)["request"]) == before
    assert "anthropic.messages" not in [span.name for span in recorder.spans()]
