"""What OpenAI's own client must find through the proxy; run with each of its major releases."""

import asyncio
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.llm_proxy.proxied import MODEL, Proxied, entry, proxied
from tests.stub_model.script import Answer, Failure, Script
from tests.stub_model.server import StubModel
from tests.stub_model.words import ToolCall

USER: Any = [{"role": "user", "content": "Hello there"}]
WEATHER = ToolCall.of("weather", city="Oslo")
SCHEMA: Any = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CHAT_TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA, "strict": True}},
]
RESPONSE_TOOLS: Any = [{"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}]
PIXEL = "data:image/png;base64,iVBORw0KGgo="
ERRORS: Any = [
    pytest.param(400, openai.BadRequestError, id="400"),
    pytest.param(404, openai.NotFoundError, id="404"),
    pytest.param(422, openai.UnprocessableEntityError, id="422"),
    pytest.param(429, openai.RateLimitError, id="429"),
    pytest.param(503, openai.InternalServerError, id="503"),
]


class Verdict(BaseModel):
    reason: str
    score: int


class OpenAIChatSuite:
    """Chat completions."""

    def test_answer_is_whole(self, door: Proxied) -> None:
        told = door.openai().chat.completions.create(model=MODEL, messages=USER)

        assert (told.choices[0].message.content, told.choices[0].finish_reason) == ("Hello there", "stop")
        assert told.usage is not None
        assert told.usage.completion_tokens == 3
        assert told.choices[0].logprobs is None
        assert not (told.model_extra or {}).keys() & {"prompt_token_ids", "response_token_ids"}
        assert not (told.choices[0].model_extra or {}).keys() & {"token_ids"}

    def test_two_turns_with_a_tool(self, door: Proxied, stub_model: StubModel) -> None:
        stub_model.script = Script([Answer("I look.", (WEATHER,)), "It rains."])
        client = door.openai()

        first = client.chat.completions.create(model=MODEL, messages=USER, tools=CHAT_TOOLS).choices[0].message
        assert first.tool_calls
        result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "rain"}
        history: Any = [*USER, first.model_dump(exclude_none=True), result]
        second = client.chat.completions.create(model=MODEL, messages=history, tools=CHAT_TOOLS)

        assert first.tool_calls[0].to_dict()["function"] == {"name": "weather", "arguments": WEATHER.arguments}
        assert second.choices[0].message.content == "It rains."

    def test_parsed_answer(self, door: Proxied) -> None:
        told = door.openai().chat.completions.parse(model=MODEL, messages=USER, response_format=Verdict)

        assert told.choices[0].message.parsed == Verdict(reason="Hello there", score=0)

    def test_several_choices(self, door: Proxied, stub_model: StubModel) -> None:
        stub_model.script = Script([["one", "two", "three"]])

        told = door.openai().chat.completions.create(model=MODEL, messages=USER, n=3)

        assert [choice.message.content for choice in told.choices] == ["one", "two", "three"]

    def test_image_and_json_mode(self, door: Proxied, stub_model: StubModel) -> None:
        parts = [{"type": "text", "text": "See"}, {"type": "image_url", "image_url": {"url": PIXEL}}]
        messages: Any = [{"role": "user", "content": parts}]

        told = door.openai().chat.completions.create(
            model=MODEL, messages=messages, response_format={"type": "json_object"}
        )

        assert told.choices[0].message.content == '{"text": "See"}'
        assert stub_model.requests[0].messages[0].images == (PIXEL,)

    def test_what_the_agent_asks_for_it_gets(self, door: Proxied) -> None:
        told = door.openai().chat.completions.create(
            model=MODEL, messages=USER, logprobs=True, top_logprobs=2, extra_body={"return_token_ids": True}
        )

        choice = told.choices[0]
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert len(choice.logprobs.content) == len((choice.model_extra or {})["token_ids"]) == 3
        assert len(choice.logprobs.content[0].top_logprobs) == 2

    def test_stream_without_what_was_not_asked_for(self, door: Proxied) -> None:
        chunks = list(door.openai().chat.completions.create(model=MODEL, messages=USER, stream=True))

        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hello there"
        assert chunks[-1].choices[0].finish_reason == "stop"
        for chunk in chunks:
            assert chunk.usage is None
            assert not (chunk.model_extra or {}).keys() & {"prompt_token_ids", "response_token_ids"}
            assert not (chunk.choices[0].model_extra or {}).keys() & {"token_ids"}
            assert chunk.choices[0].logprobs is None

    def test_stream_with_usage_that_was_asked_for(self, door: Proxied) -> None:
        chunks = list(
            door.openai().chat.completions.create(
                model=MODEL, messages=USER, stream=True, stream_options={"include_usage": True}
            )
        )

        assert chunks[-1].usage is not None
        assert (chunks[-1].usage.total_tokens, chunks[-1].choices) == (8, [])

    def test_stream_of_tool_calls(self, door: Proxied, stub_model: StubModel) -> None:
        stub_model.script = Script([Answer("I look.", (WEATHER,))])

        with door.openai().chat.completions.stream(model=MODEL, messages=USER, tools=CHAT_TOOLS) as stream:
            kinds = {event.type for event in stream}
            message = stream.get_final_completion().choices[0].message

        assert {"content.delta", "tool_calls.function.arguments.delta"} <= kinds
        assert message.tool_calls
        assert message.tool_calls[0].function.parsed_arguments == {"city": "Oslo"}

    def test_stream_of_several_choices(self, door: Proxied, stub_model: StubModel) -> None:
        stub_model.script = Script([["one two", "three"]])

        texts = ["", ""]
        for chunk in door.openai().chat.completions.create(model=MODEL, messages=USER, n=2, stream=True):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""

        assert texts == ["one two", "three"]


class OpenAIOtherSuite:
    """The other dialects of OpenAI."""

    def test_completion(self, door: Proxied) -> None:
        told = door.openai().completions.create(model=MODEL, prompt="one two")

        assert (told.choices[0].text, told.choices[0].logprobs) == ("one two", None)
        assert not (told.choices[0].model_extra or {}).keys() & {"token_ids", "prompt_token_ids"}

    def test_completion_stream(self, door: Proxied) -> None:
        chunks = list(door.openai().completions.create(model=MODEL, prompt="one two", stream=True))

        assert "".join(chunk.choices[0].text for chunk in chunks) == "one two"

    def test_response_and_the_next(self, stub_model: StubModel) -> None:
        with proxied(entry(stub_model.url, "responses")) as door:
            client = door.openai()
            first = client.responses.create(model=MODEL, input="Hello there", instructions="Be brief.")
            second = client.responses.create(model=MODEL, input="More", previous_response_id=first.id)

        assert (first.output_text, first.status, second.output_text) == ("Hello there", "completed", "More")
        assert [message.text for message in stub_model.requests[1].messages] == ["Hello there", "Hello there", "More"]

    def test_response_stream(self, door: Proxied, stub_model: StubModel) -> None:
        stub_model.script = Script([Answer("I look.", (WEATHER,))])

        with door.openai().responses.stream(model=MODEL, input="Weather?", tools=RESPONSE_TOOLS) as stream:
            texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
            final = stream.get_final_response()

        assert "".join(texts) == final.output_text == "I look."
        assert final.output[1].to_dict()["arguments"] == WEATHER.arguments

    def test_parsed_response(self, door: Proxied) -> None:
        told = door.openai().responses.parse(model=MODEL, input="Well", text_format=Verdict)

        assert told.output_parsed == Verdict(reason="Well", score=0)

    def test_embeddings(self, door: Proxied) -> None:
        told = door.openai().embeddings.create(model=MODEL, input=["a b", "c"])

        assert [len(entry.embedding) for entry in told.data] == [16, 16]
        assert door.only_call().outcome == "answered"

    def test_models(self, door: Proxied) -> None:
        client = door.openai()

        assert MODEL in [model.id for model in client.models.list()]
        assert client.models.retrieve(MODEL).id == MODEL
        with pytest.raises(openai.NotFoundError, match="no model 'other'"):
            client.models.retrieve("other")

    def test_raw_and_streamed_answers(self, door: Proxied) -> None:
        client = door.openai()

        raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=USER)
        with client.chat.completions.with_streaming_response.create(model=MODEL, messages=USER) as streamed:
            lines = list(streamed.iter_lines())

        assert raw.headers["x-request-id"].startswith("chatcmpl")
        assert raw.parse().choices[0].message.content == "Hello there"
        assert '"Hello there"' in "".join(lines)

    async def test_asynchronous_client(self, door: Proxied) -> None:
        async with openai.AsyncOpenAI(base_url=f"{door.endpoint}/v1", api_key="any", max_retries=0) as client:
            told = await client.chat.completions.create(model=MODEL, messages=USER)
            stream = await client.chat.completions.create(model=MODEL, messages=USER, stream=True)
            texts = [chunk.choices[0].delta.content or "" async for chunk in stream]

        assert (told.choices[0].message.content, "".join(texts)) == ("Hello there", "Hello there")


class OpenAIErrorsSuite:
    """Each failure raises the error that the client has for it."""

    @pytest.mark.parametrize(("status", "kind"), ERRORS)
    def test_backend_error(self, door: Proxied, stub_model: StubModel, status: int, kind: type[Exception]) -> None:
        stub_model.script = Script([Failure(status, "no luck")])

        with pytest.raises(kind, match="no luck"):
            door.openai().chat.completions.create(model=MODEL, messages=USER)

        call = door.only_call()
        assert (call.outcome, call.status, call.span.status.status_code) == ("failed", status, "ERROR")
        assert "no luck" in (call.error or "")

    def test_client_waits_as_long_as_the_backend_wants(self, door: Proxied, stub_model: StubModel) -> None:
        stub_model.script = Script([Failure(429, "slow down", retry_after_seconds=7)])

        with pytest.raises(openai.RateLimitError) as caught:
            door.openai().chat.completions.create(model=MODEL, messages=USER)

        assert caught.value.response.headers["retry-after"] == "7"

    def test_client_tries_again(self, door: Proxied, stub_model: StubModel) -> None:
        stub_model.script = Script([Failure(503), "at last"])

        told = door.openai(max_retries=1).chat.completions.create(model=MODEL, messages=USER)

        assert told.choices[0].message.content == "at last"
        assert [call.outcome for call in door.calls()] == ["failed", "answered"]

    def test_unknown_model(self, door: Proxied) -> None:
        with pytest.raises(openai.NotFoundError, match="other"):
            door.openai().chat.completions.create(model="other", messages=USER)

        assert door.only_call().outcome == "refused"

    def test_error_within_a_stream(self, door: Proxied, stub_model: StubModel) -> None:
        stub_model.script = Script([Answer("one two three", cut_after_events=2, cut_with=Failure(500, "out of luck"))])
        chunks = door.openai().chat.completions.create(model=MODEL, messages=USER, stream=True)

        assert [next(chunks).choices[0].delta.content for _ in range(2)] == ["", "one"]
        with pytest.raises(openai.APIError, match="out of luck"):
            next(chunks)
        assert door.only_call().outcome == "failed"

    def test_client_that_gives_up_waiting(self, door: Proxied, stub_model: StubModel) -> None:
        stub_model.script = Script([Answer("late", latency_seconds=30.0)])

        with pytest.raises(openai.APITimeoutError):
            door.openai(timeout=0.2).chat.completions.create(model=MODEL, messages=USER)

        call = door.only_call()
        assert (call.outcome, call.status) == ("cancelled", 499)

    async def test_cancelled_task(self, door: Proxied, stub_model: StubModel) -> None:
        stub_model.script = Script([Answer("late", latency_seconds=30.0)])
        async with openai.AsyncOpenAI(base_url=f"{door.endpoint}/v1", api_key="any", max_retries=0) as client:
            asking = asyncio.create_task(client.chat.completions.create(model=MODEL, messages=USER))
            while not stub_model.requests:
                await asyncio.sleep(0.01)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

        call = await asyncio.to_thread(door.only_call)
        assert call.outcome == "cancelled"
