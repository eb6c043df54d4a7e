"""The stub model as the vendors' own clients see it; skipped where they are not installed."""

from typing import Any

import pytest
from pydantic import BaseModel

from tests.stub_model.script import Answer, Failure, Script
from tests.stub_model.server import StubModel
from tests.stub_model.words import ToolCall

USER: Any = [{"role": "user", "content": "Hello there"}]
WEATHER = ToolCall.of("weather", city="Oslo")
FUNCTION: Any = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}


class Verdict(BaseModel):
    reason: str
    score: int


@pytest.fixture
def openai_client(stub_model: StubModel) -> Any:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=stub_model.openai_url, api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture
def anthropic_client(stub_model: StubModel) -> Any:
    anthropic = pytest.importorskip("anthropic")
    with anthropic.Anthropic(base_url=stub_model.url, api_key="any", max_retries=0) as client:
        yield client


# ---------------------------------------------------------------------- OpenAI


def test_openai_chat(openai_client: Any) -> None:
    told = openai_client.chat.completions.create(
        model="stub-model", messages=USER, logprobs=True, top_logprobs=2, extra_body={"return_token_ids": True}
    )

    assert (told.choices[0].message.content, told.usage.completion_tokens) == ("Hello there", 3)
    assert len(told.choices[0].logprobs.content) == len(told.choices[0].token_ids) == 3
    assert len(told.prompt_token_ids) == told.usage.prompt_tokens


def test_openai_chat_chunks(openai_client: Any) -> None:
    chunks = list(
        openai_client.chat.completions.create(
            model="stub-model", messages=USER, stream=True, stream_options={"include_usage": True}
        )
    )

    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "Hello there"
    assert chunks[-1].usage.total_tokens == 8


def test_openai_chat_stream_collects_tool_calls(openai_client: Any, stub_model: StubModel) -> None:
    stub_model.script = Script([Answer("I look.", (WEATHER,))])
    tools = [{"type": "function", "function": {**FUNCTION, "strict": True}}]

    with openai_client.chat.completions.stream(model="stub-model", messages=USER, tools=tools) as stream:
        kinds = {event.type for event in stream}
        message = stream.get_final_completion().choices[0].message

    assert {"content.delta", "tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
    assert message.tool_calls[0].function.parsed_arguments == {"city": "Oslo"}


def test_openai_chat_parse(openai_client: Any) -> None:
    told = openai_client.chat.completions.parse(model="stub-model", messages=USER, response_format=Verdict)

    assert told.choices[0].message.parsed == Verdict(reason="Hello there", score=0)


def test_openai_completion(openai_client: Any) -> None:
    told = openai_client.completions.create(model="stub-model", prompt="one two", logprobs=1)

    assert (told.choices[0].text, told.choices[0].logprobs.text_offset) == ("one two", [0, 3, 7])


def test_openai_response(openai_client: Any, stub_model: StubModel) -> None:
    first = openai_client.responses.create(model="stub-model", input="Hello there", instructions="Be brief.")
    second = openai_client.responses.create(model="stub-model", input="More", previous_response_id=first.id)

    assert (first.output_text, first.status) == ("Hello there", "completed")
    assert second.output_text == "More"
    assert [message.text for message in stub_model.requests[1].messages] == ["Hello there", "Hello there", "More"]


def test_openai_response_stream(openai_client: Any, stub_model: StubModel) -> None:
    stub_model.script = Script([Answer("I look.", (WEATHER,))])
    tools = [{"type": "function", "strict": True, **FUNCTION}]

    with openai_client.responses.stream(model="stub-model", input="Weather?", tools=tools) as stream:
        texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()

    assert "".join(texts) == final.output_text == "I look."
    assert final.output[1].parsed_arguments == {"city": "Oslo"}


def test_openai_response_parse(openai_client: Any) -> None:
    told = openai_client.responses.parse(model="stub-model", input="Well", text_format=Verdict)

    assert told.output_parsed == Verdict(reason="Well", score=0)


def test_openai_embeddings(openai_client: Any) -> None:
    told = openai_client.embeddings.create(model="stub-model", input=["a b", "c"])

    assert [len(entry.embedding) for entry in told.data] == [16, 16]


def test_openai_models(openai_client: Any) -> None:
    assert [model.id for model in openai_client.models.list()] == ["stub-model"]


def test_openai_errors(openai_client: Any, stub_model: StubModel) -> None:
    openai = pytest.importorskip("openai")
    stub_model.script = Script(
        [Failure(429, "slow down", retry_after_seconds=0), Failure(500), Answer(cut_after_events=0)]
    )
    create = openai_client.chat.completions.create

    with pytest.raises(openai.RateLimitError, match="slow down"):
        create(model="stub-model", messages=USER)
    with pytest.raises(openai.InternalServerError):
        create(model="stub-model", messages=USER)
    with pytest.raises(openai.APIConnectionError):
        create(model="stub-model", messages=USER)
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        create(model="other", messages=USER)
    with pytest.raises(openai.BadRequestError):
        create(model="stub-model", messages=[])


def test_openai_retries_a_failure(openai_client: Any, stub_model: StubModel) -> None:
    stub_model.script = Script([Failure(429, retry_after_seconds=0.01), "at last"])

    told = openai_client.with_options(max_retries=1).chat.completions.create(model="stub-model", messages=USER)

    assert told.choices[0].message.content == "at last"
    assert len(stub_model.requests) == 2


# ---------------------------------------------------------------------- Anthropic


def test_anthropic_message(anthropic_client: Any) -> None:
    told = anthropic_client.messages.create(model="stub-model", max_tokens=99, messages=USER)

    assert (told.content[0].text, told.stop_reason, told.usage.output_tokens) == ("Hello there", "end_turn", 3)


def test_anthropic_tool_loop(anthropic_client: Any, stub_model: StubModel) -> None:
    stub_model.script = Script([Answer("I look.", (WEATHER,)), "It rains."])
    tools = [{"name": "weather", "input_schema": FUNCTION["parameters"]}]
    ask = {"model": "stub-model", "max_tokens": 99, "tools": tools}

    first = anthropic_client.messages.create(messages=USER, **ask)
    result = {"type": "tool_result", "tool_use_id": first.content[1].id, "content": "rain"}
    history = [*USER, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    second = anthropic_client.messages.create(messages=history, **ask)

    assert (first.stop_reason, first.content[1].input) == ("tool_use", {"city": "Oslo"})
    assert second.content[0].text == "It rains."
    before = stub_model.requests[0].prompt_token_ids
    assert stub_model.requests[1].prompt_token_ids[: len(before)] == before


def test_anthropic_stream(anthropic_client: Any, stub_model: StubModel) -> None:
    stub_model.script = Script([Answer("I look.", (WEATHER,))])

    with anthropic_client.messages.stream(model="stub-model", max_tokens=99, messages=USER) as stream:
        texts = list(stream.text_stream)
        final = stream.get_final_message()

    assert "".join(texts) == "I look."
    assert (final.content[1].input, final.stop_reason) == ({"city": "Oslo"}, "tool_use")
    assert final.usage.output_tokens > 1


def test_anthropic_errors(anthropic_client: Any, stub_model: StubModel) -> None:
    anthropic = pytest.importorskip("anthropic")
    stub_model.script = Script([Failure(429, "slow down"), Failure(529, "busy")])
    ask = {"model": "stub-model", "max_tokens": 9, "messages": USER}

    with pytest.raises(anthropic.RateLimitError, match="slow down"):
        anthropic_client.messages.create(**ask)
    with pytest.raises(anthropic.APIStatusError, match="busy"):
        anthropic_client.messages.create(**ask)
    with pytest.raises(anthropic.NotFoundError):
        anthropic_client.messages.create(**{**ask, "model": "other"})


def test_anthropic_counts_tokens_and_lists_models(anthropic_client: Any) -> None:
    counted = anthropic_client.messages.count_tokens(model="stub-model", messages=USER)

    assert counted.input_tokens == 5
    assert [model.id for model in anthropic_client.models.list()] == ["stub-model"]
