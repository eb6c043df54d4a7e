"""Calls with OpenAI's SDK: what each leaves in the trace."""

import base64
import json
from typing import Any

import pytest

from tests.instrumentation.sdk_calls import (
    CHAT,
    CHAT_WAYS,
    IDS,
    PARAMETERS,
    STRICT_TOOLS,
    TOOLS,
    USER,
    WEATHER,
    Asking,
    AskingOpenAI,
    Verdict,
    call_of,
    values,
)
from tests.instrumentation.traces import observed
from tests.stub_model.script import Answer, Script
from tests.stub_model.server import StubModel, running
from tests.stub_model.words import ToolCall

PIXEL = "data:image/png;base64," + base64.b64encode(b"not really").decode()

# ---------------------------------------------------------------------- chat

each_way = pytest.mark.parametrize("way", CHAT_WAYS.values(), ids=CHAT_WAYS)


@each_way
def test_a_chat_is_one_span_however_it_is_asked(ask_either: Asking, way: tuple[str, dict[str, Any]]) -> None:
    method, options = way

    attributes = call_of(ask_either(method, **CHAT, **options, temperature=0.5, seed=7, stop=["."], extra_body=IDS))

    prompt = list(ask_either.model.requests[0].prompt_token_ids)
    assert values(attributes, "gen_ai.prompt.") == {"0.role": "user", "0.content": "Hello there"}
    assert values(attributes, "gen_ai.completion.") == {
        "0.role": "assistant",
        "0.content": "Hello there",
        "0.finish_reason": "stop",
    }
    assert values(attributes, "gen_ai.usage.") == {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
    assert json.loads(attributes["prompt_token_ids"]) == prompt
    assert len(json.loads(attributes["response_token_ids"])) == 3
    is_streaming = "stream" in options or method.endswith(".stream")
    assert ("gen_ai.streaming.time_to_first_token" in attributes) is is_streaming
    request = values(attributes, "gen_ai.request.")
    assert {**request, "stop": list(request["stop"])} == {
        "model": "stub-model",
        "temperature": 0.5,
        "seed": 7,
        "stop": ["."],
        **({"streaming": True} if is_streaming else {}),
    }
    assert (attributes["gen_ai.response.id"], attributes["gen_ai.response.model"]) == ("chatcmpl-1", "stub-model")
    assert attributes["server.address"].startswith(ask_either.model.openai_url)


@pytest.mark.parametrize("stream", [False, True])
def test_calls_of_tools_are_told(ask: Asking, stream: bool) -> None:
    ask.model.script = Script([Answer("", (WEATHER, ToolCall.of("clock")))])

    attributes = call_of(ask("chat.completions.create", **CHAT, stream=stream, tools=STRICT_TOOLS))

    told = values(attributes, "gen_ai.completion.0.")
    assert json.loads(told.pop("tool_calls.0.arguments")) == {"city": "Oslo"}
    assert told == {
        "role": "assistant",
        "finish_reason": "tool_calls",
        "tool_calls.0.id": "call_1_0_0",
        "tool_calls.0.type": "function",
        "tool_calls.0.name": "weather",
        "tool_calls.1.id": "call_1_0_1",
        "tool_calls.1.type": "function",
        "tool_calls.1.name": "clock",
        "tool_calls.1.arguments": "{}",
    }


def test_a_conversation_with_tools_is_told(ask: Asking) -> None:
    calls = [{"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Wea"}, {"type": "text", "text": "ther?"}]},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]

    attributes = call_of(ask("chat.completions.create", model="stub-model", messages=messages, tools=TOOLS))

    assert values(attributes, "gen_ai.prompt.") == {
        "0.role": "system",
        "0.content": "Be brief.",
        "1.role": "user",
        "1.content": "Weather?",
        "2.role": "assistant",
        "2.tool_calls.0.id": "c1",
        "2.tool_calls.0.type": "function",
        "2.tool_calls.0.name": "weather",
        "2.tool_calls.0.arguments": '{"city": "Oslo"}',
        "3.role": "tool",
        "3.content": "rain",
        "3.tool_call_id": "c1",
    }
    functions = values(attributes, "gen_ai.request.functions.")
    assert json.loads(functions.pop("0.parameters")) == PARAMETERS
    assert functions == {"0.name": "weather", "0.description": "It says."}


def test_an_answer_can_be_sent_back_as_the_object_it_is(ask: Asking) -> None:
    ask.model.script = Script([Answer("I look.", (WEATHER,)), "It rains."])
    first = AskingOpenAI(ask.model, is_async=False)
    with first.client() as client:
        message = client.chat.completions.create(**CHAT, tools=TOOLS).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"}

    attributes = call_of(ask("chat.completions.create", model="stub-model", messages=[*USER, message, result]))

    assert attributes["gen_ai.prompt.1.content"] == "I look."
    assert json.loads(attributes["gen_ai.prompt.1.tool_calls.0.arguments"]) == {"city": "Oslo"}
    assert attributes["gen_ai.prompt.2.tool_call_id"] == "call_1_0_0"


def test_messages_may_come_from_a_generator(ask: Asking) -> None:
    attributes = call_of(ask("chat.completions.create", model="stub-model", messages=(m for m in USER)))
    assert values(attributes, "gen_ai.prompt.") == {"0.role": "user", "0.content": "Hello there"}
    assert ask.model.requests[0].text == "Hello there"


def test_images_are_kept_as_parts(ask: Asking) -> None:
    parts = [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": PIXEL}}]

    attributes = call_of(
        ask("chat.completions.create", model="stub-model", messages=[{"role": "user", "content": parts}])
    )

    assert json.loads(attributes["gen_ai.prompt.0.content"]) == parts


@pytest.mark.parametrize("stream", [False, True])
def test_several_choices_are_told_apart(ask: Asking, stream: bool) -> None:
    ask.model.script = Script([["One.", "Two words.", Answer("", (WEATHER,))]])

    attributes = call_of(
        ask("chat.completions.create", **CHAT, n=3, stream=stream, logprobs=True, extra_body=IDS, tools=TOOLS)
    )

    assert [attributes.get(f"gen_ai.completion.{n}.content") for n in range(3)] == ["One.", "Two words.", None]
    assert attributes["gen_ai.completion.2.tool_calls.0.name"] == "weather"
    ids = [attributes[name] for name in ("response_token_ids", "gen_ai.completion.1.token_ids")]
    assert [len(json.loads(text)) for text in ids] == [3, 4]
    logprobs = [attributes[name] for name in ("logprobs.content", "gen_ai.completion.1.logprobs")]
    assert [len(json.loads(text)) for text in logprobs] == [3, 4]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("shape", ["vllm", "instrumented", "none"])
def test_token_ids_are_found_in_every_shape(shape: Any, stream: bool) -> None:
    with running(token_ids=shape) as model:
        trace = AskingOpenAI(model, is_async=False)("chat.completions.create", **CHAT, stream=stream, extra_body=IDS)
        asked = model.requests[0]

    triplet = trace.triplets()[0] if shape != "none" else None
    ids = {name: call_of(trace).get(name) for name in ("prompt_token_ids", "response_token_ids")}
    if triplet is None:
        assert ids == {"prompt_token_ids": None, "response_token_ids": None}
        return
    assert tuple(triplet.prompt["token_ids"]) == asked.prompt_token_ids
    assert len(triplet.response["token_ids"]) == 3


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_are_told_for_every_token(ask: Asking, stream: bool) -> None:
    trace = ask("chat.completions.create", **CHAT, logprobs=True, top_logprobs=2, stream=stream, extra_body=IDS)

    told = json.loads(call_of(trace)["logprobs.content"])
    assert [entry["token"] for entry in told] == ["Hello", " there", "<|end|>"]
    assert {frozenset(entry) for entry in told} == {frozenset({"token", "logprob", "bytes", "top_logprobs"})}
    assert len(told[0]["top_logprobs"]) == 2


def test_structured_output_is_parsed_and_told(ask: Asking) -> None:
    trace = ask("chat.completions.parse", **CHAT, response_format=Verdict)
    assert trace.result[0].startswith("ParsedChatCompletion")
    assert trace.result[1]["choices"][0]["message"]["parsed"] == {"reason": "Hello there", "score": 0}
    assert json.loads(call_of(trace)["gen_ai.completion.0.content"]) == {"reason": "Hello there", "score": 0}


def test_the_time_to_the_first_token_is_measured(ask: Asking) -> None:
    ask.model.script = Script([Answer("One two three.", latency_seconds=0.05, pause_seconds=0.1)])

    trace = ask("chat.completions.create", **CHAT, stream=True)

    seconds = call_of(trace)["gen_ai.streaming.time_to_first_token"]
    span = trace.spans[0]
    assert 0.05 <= seconds < (span.end_time or 0) - (span.start_time or 0) - 0.03


# ---------------------------------------------------------------------- responses


@pytest.mark.parametrize("method", ["responses.create", "responses.stream", "responses.parse", "streaming create"])
def test_a_response_is_one_span(ask_either: Asking, method: str) -> None:
    options: dict[str, Any] = {"stream": True} if method == "streaming create" else {}
    method = method.replace("streaming create", "responses.create")

    asked = {"model": "stub-model", "input": "Hello there", "instructions": "Be brief.", "extra_body": IDS}
    trace = ask_either(method, **asked, **options)

    attributes = call_of(trace, "openai.responses")
    assert values(attributes, "gen_ai.prompt.") == {
        "0.role": "system",
        "0.content": "Be brief.",
        "1.role": "user",
        "1.content": "Hello there",
    }
    assert values(attributes, "gen_ai.completion.0.") == {
        "role": "assistant",
        "content": "Hello there",
        "finish_reason": "completed",
    }
    assert json.loads(attributes["prompt_token_ids"]) == list(ask_either.model.requests[0].prompt_token_ids)
    assert len(json.loads(attributes["response_token_ids"])) == 3
    assert attributes["gen_ai.usage.total_tokens"] == len(ask_either.model.requests[0].prompt_token_ids) + 3


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_was_cut_off_says_why(ask: Asking, stream: bool) -> None:
    response = ask("responses.create", model="stub-model", input="Hello there", max_output_tokens=1, stream=stream)
    told = call_of(response, "openai.responses")
    assert told["gen_ai.completion.0.finish_reason"] == "max_output_tokens"
    chat = ask("chat.completions.create", **CHAT, max_tokens=1, stream=stream)
    assert call_of(chat)["gen_ai.completion.0.finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_items_of_a_response_are_told(ask: Asking, stream: bool) -> None:
    ask.model.script = Script([Answer("I look.", (WEATHER,))])
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Rome"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "sun"},
    ]
    tools = [{"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}, {"type": "web_search"}]

    trace = ask("responses.create", model="stub-model", input=items, tools=tools, stream=stream)

    attributes = call_of(trace, "openai.responses")
    assert values(attributes, "gen_ai.prompt.") == {
        "0.role": "user",
        "0.content": "Weather?",
        "1.role": "assistant",
        "1.tool_calls.0.id": "c1",
        "1.tool_calls.0.type": "function",
        "1.tool_calls.0.name": "weather",
        "1.tool_calls.0.arguments": '{"city": "Rome"}',
        "2.role": "tool",
        "2.content": "sun",
        "2.tool_call_id": "c1",
    }
    assert [attributes[f"gen_ai.request.functions.{n}.name"] for n in range(2)] == ["weather", "web_search"]
    assert attributes["gen_ai.completion.0.content"] == "I look."
    assert json.loads(attributes["gen_ai.completion.0.tool_calls.0.arguments"]) == {"city": "Oslo"}
    assert attributes["gen_ai.completion.0.tool_calls.0.id"] == "call_1_0_0"


def test_a_response_that_goes_on_names_the_one_before(ask: Asking) -> None:
    with AskingOpenAI(ask.model, is_async=False).client() as client:
        first = client.responses.create(model="stub-model", input="One")
    trace = ask("responses.create", model="stub-model", input="Two", previous_response_id=first.id)
    assert call_of(trace, "openai.responses")["gen_ai.request.previous_response_id"] == first.id


# ---------------------------------------------------------------------- completions and embeddings


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("prompt", "told"), [("one two", "one two"), ([11, 12, 13], "[11,12,13]")])
def test_a_completion_is_one_span(ask: Asking, prompt: Any, told: str, stream: bool) -> None:
    ask.model.script = Script(["three four"])

    trace = ask("completions.create", model="stub-model", prompt=prompt, stream=stream, logprobs=1, extra_body=IDS)

    attributes = call_of(trace, "openai.completion")
    assert values(attributes, "gen_ai.prompt.0.") == {"role": "user", "content": told}
    assert values(attributes, "gen_ai.completion.0.") == {
        "role": "assistant",
        "content": "three four",
        "finish_reason": "stop",
    }
    assert json.loads(attributes["prompt_token_ids"]) == list(ask.model.requests[0].prompt_token_ids)
    assert len(json.loads(attributes["response_token_ids"])) == 3
    assert [entry["token"] for entry in json.loads(attributes["logprobs.content"])] == ["three", " four", "<|end|>"]


def test_token_ids_of_a_completion_in_the_older_shape() -> None:
    with running(token_ids="instrumented") as model:
        trace = AskingOpenAI(model, is_async=False)("completions.create", model="stub-model", prompt="one two", n=2)

    attributes = call_of(trace, "openai.completion")
    assert len(json.loads(attributes["prompt_token_ids"])) == 2
    assert len(json.loads(attributes["response_token_ids"])) == 3
    assert len(json.loads(attributes["gen_ai.completion.1.token_ids"])) == 3


def test_embeddings_are_one_span_without_vectors(ask: Asking) -> None:
    trace = ask("embeddings.create", model="stub-model", input=["a b", "c"], dimensions=8)

    attributes = call_of(trace, "openai.embeddings")
    assert json.loads(attributes["embedding.input"]) == ["a b", "c"]
    assert (attributes["embedding.count"], attributes["gen_ai.usage.prompt_tokens"]) == (2, 3)
    assert attributes["gen_ai.request.dimensions"] == 8


def test_listing_models_leaves_no_span(stub_model: StubModel) -> None:
    with AskingOpenAI(stub_model, is_async=False).client() as client:
        trace = observed(
            lambda: [model.id for model in client.models.list()] + [client.models.retrieve("stub-model").id]
        )

    assert (trace.result, trace.spans) == (["stub-model", "stub-model"], [])
