"""Calls with Anthropic's SDK: one span each, although newer releases of it write spans of their own."""

import asyncio
import json
from typing import Any

import anthropic
import pytest
from anthropic._base_client import AsyncAPIClient, SyncAPIClient

from agentlightning.tracer import OtelTracer
from tests.instrumentation import asking
from tests.instrumentation.asking import USER, WEATHER, Asking, AskingAnthropic, values
from tests.instrumentation.observing import Trace, observed
from tests.stub_model.script import Answer, Failure, Script
from tests.stub_model.server import StubModel, running
from tests.stub_model.words import ToolCall

ASK: dict[str, Any] = {"model": "stub-model", "max_tokens": 99, "messages": USER}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS: Any = [{"name": "weather", "description": "It says.", "input_schema": SCHEMA}]
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("messages.create", {}),
    "stream": ("messages.create", {"stream": True}),
    "helper": ("messages.stream", {}),
    "raw": ("messages.with_raw_response.create", {}),
    "raw stream": ("messages.with_raw_response.create", {"stream": True}),
    "streamed response": ("messages.with_streaming_response.create", {}),
    "beta": ("beta.messages.create", {}),
    "beta stream": ("beta.messages.create", {"stream": True}),
    "beta helper": ("beta.messages.stream", {}),
}
each_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def call_of(trace: Trace) -> dict[str, Any]:
    return asking.call_of(trace, "anthropic.messages")


@each_way
def test_a_message_is_one_span_however_it_is_asked(ask_anthropic: Asking, way: tuple[str, dict[str, Any]]) -> None:
    method, options = way

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


@each_way
def test_a_message_that_was_cut_off_says_so(ask_anthropic: Asking, way: tuple[str, dict[str, Any]]) -> None:
    method, options = way

    attributes = call_of(ask_anthropic(method, **{**ASK, "max_tokens": 1}, **options))

    assert attributes["gen_ai.completion.0.finish_reason"] == "max_tokens"


@each_way
def test_the_use_of_tools_is_told(ask_anthropic: Asking, way: tuple[str, dict[str, Any]]) -> None:
    method, options = way
    ask_anthropic.model.script = Script([Answer("I look.", (WEATHER, ToolCall.of("clock")))])

    attributes = call_of(ask_anthropic(method, **ASK, **options, tools=TOOLS))

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


# ---------------------------------------------------------------------- errors

ERRORS = {
    "400": (Failure(400, "no"), anthropic.BadRequestError),
    "401": (Failure(401, "no"), anthropic.AuthenticationError),
    "404": (Failure(404, "no"), anthropic.NotFoundError),
    "429": (Failure(429, "no"), anthropic.RateLimitError),
    "500": (Failure(500, "no"), anthropic.InternalServerError),
    "too late": (Answer("late", latency_seconds=5), anthropic.APITimeoutError),
}


@pytest.mark.parametrize(("turn", "kind"), ERRORS.values(), ids=ERRORS)
@pytest.mark.parametrize("stream", [False, True])
def test_an_error_is_raised_unchanged_and_told(
    ask_anthropic: Asking, turn: Any, kind: type[Exception], stream: bool
) -> None:
    ask_anthropic.model.script = Script([turn])

    trace = ask_anthropic(
        "messages.create", **ASK, stream=stream, client={"timeout": 0.3} if isinstance(turn, Answer) else {}
    )

    assert type(trace.error) is kind
    assert [(span.name, span.status.status_code) for span in trace.spans] == [("anthropic.messages", "ERROR")]
    assert (trace.spans[0].status.description or "").startswith(f"{kind.__name__}: ")


def test_a_call_that_is_tried_again_is_one_span(ask_anthropic: Asking) -> None:
    ask_anthropic.model.script = Script([Failure(429, retry_after_seconds=0.01), "at last"])

    attributes = call_of(ask_anthropic("messages.create", **ASK, client={"max_retries": 1}))

    assert attributes["gen_ai.completion.0.content"] == "at last"
    assert len(ask_anthropic.model.requests) == 2


async def test_a_cancelled_call_is_told(stub_model: StubModel) -> None:
    stub_model.script = Script([Answer("late", latency_seconds=5)])
    with OtelTracer().lifespan() as tracer:
        made = AskingAnthropic(stub_model, is_async=True).async_client()
        async with made as client, tracer.trace_context() as recorder:
            task = asyncio.create_task(client.messages.create(**ASK))
            while not stub_model.requests:
                await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.wait([task])

    assert [(span.name, span.status.description) for span in recorder.spans()] == [
        ("anthropic.messages", "CancelledError: ")
    ]


# ---------------------------------------------------------------------- nothing is changed

ALL_CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (method, {**ASK, **options}) for name, (method, options) in WAYS.items()},
    "tools": ("messages.create", {**ASK, "tools": TOOLS}),
    "tools stream": ("messages.create", {**ASK, "tools": TOOLS, "stream": True}),
    "tools helper": ("messages.stream", {**ASK, "tools": TOOLS}),
    "count": ("messages.count_tokens", {"model": "stub-model", "messages": USER}),
}


@pytest.mark.parametrize("call", ALL_CALLS.values(), ids=ALL_CALLS)
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_the_program_gets_what_it_would_get_anyway(call: tuple[str, dict[str, Any]], is_async: bool) -> None:
    method, arguments = call
    before = repr(arguments)
    with running(Script(lambda _: Answer("I look.", (WEATHER,) if "tools" in arguments else ()))) as model:
        plainly = AskingAnthropic(model, is_async=is_async).plainly(method, **arguments)
        sent = model.requests[-1].body
    with running(Script(lambda _: Answer("I look.", (WEATHER,) if "tools" in arguments else ()))) as model:
        trace = AskingAnthropic(model, is_async=is_async)(method, **arguments)

    assert trace.error is None
    assert trace.result == plainly
    assert model.requests[-1].body == sent
    assert repr(arguments) == before


def test_the_helper_gives_the_final_message(stub_model: StubModel) -> None:
    stub_model.script = Script([Answer("I look.", (WEATHER,))])
    with AskingAnthropic(stub_model, is_async=False).client() as client:

        def run() -> Any:
            with client.messages.stream(**ASK) as stream:
                return "".join(stream.text_stream), stream.get_final_message().content[1].input  # type: ignore[union-attr]

        trace = observed(run)

    assert trace.result == ("I look.", {"city": "Oslo"})
    assert call_of(trace)["gen_ai.completion.0.tool_calls.0.name"] == "weather"


def test_a_client_made_before_and_a_subclass_are_seen(stub_model: StubModel) -> None:
    class Mine(anthropic.Anthropic):
        """A client of the program's own."""

    with Mine(base_url=stub_model.url, api_key="any") as client:
        trace = observed(lambda: client.with_options(max_retries=1).messages.create(**ASK))

    call_of(trace)


def test_the_sdk_is_left_as_it_was_and_writes_its_own_spans_again(stub_model: StubModel) -> None:
    before = vars(SyncAPIClient)["request"], vars(AsyncAPIClient)["request"]
    with AskingAnthropic(stub_model, is_async=False).client() as client:
        call_of(observed(lambda: client.messages.create(**ASK)))
        with OtelTracer(instrument=False).lifespan() as tracer, tracer._trace_context_sync() as recorder:
            client.messages.create(**ASK)

    assert (vars(SyncAPIClient)["request"], vars(AsyncAPIClient)["request"]) == before
    assert "anthropic.messages" not in [span.name for span in recorder.spans()]
