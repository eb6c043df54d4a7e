"""LiteLLM as a library: `agentlightning.instrumentation.frameworks.litellm`."""

import asyncio
import functools
import gc
import json
import os
import sys
import warnings
import weakref
from collections.abc import AsyncIterator, Iterator
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # LiteLLM downloads its prices when it is imported

import litellm
import pytest
from litellm import CustomLLM, Router, acompletion, completion, main
from litellm.integrations.opentelemetry import OpenTelemetry
from litellm.llms.custom_httpx.http_handler import AsyncHTTPHandler, HTTPHandler

from agentlightning.instrumentation.frameworks.litellm import LiteLLMPatch, instrument_litellm, uninstrument_litellm
from agentlightning.instrumentation.patch import agent_step
from tests.frameworks.contract import BACKEND_ERRORS, evidence_of, trace_of, unobserved
from tests.frameworks.fresh_process import told_by
from tests.instrumentation.traces import Trace, observed, observed_async
from tests.stub_model.raw import held_until_read
from tests.stub_model.script import Answer, Failure, Script, Turn
from tests.stub_model.server import StubModel
from tests.stub_model.words import ToolCall, encode, id_of

RUNS_IN = ("openai2", "litellm", "lowest")

pytestmark = pytest.mark.filterwarnings(
    "ignore:Item 'summary' on TypedDict class:UserWarning",
    "ignore:unclosed:ResourceWarning",  # it does not close its clients
)

HELLO = [{"role": "user", "content": "Hello there"}]
ANSWER_IDS = [*encode("Hello there"), id_of("<|end|>")]
PROMPT_IDS = [id_of("<|user|>"), *encode("Hello there"), id_of("<|end|>"), id_of("<|assistant|>")]
PROVIDERS = ("openai", "hosted_vllm", "anthropic")
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


def to(stub_model: StubModel, provider: str) -> dict[str, Any]:
    """What a call of the stub model is called with, as if it were the provider's."""
    if provider == "anthropic":
        return {"model": "anthropic/stub-model", "api_base": stub_model.url, "api_key": "any", "messages": HELLO}
    options = {"model": f"{provider}/stub-model", "api_base": stub_model.openai_url, "api_key": "any"}
    return options | {"messages": HELLO, "extra_body": {"return_token_ids": True}}


def texts(chunks: list[Any]) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def told(trace: Trace) -> tuple[Any, ...]:
    """What the only call says of itself."""
    (call,) = trace.spans
    names = ("gen_ai.system", "gen_ai.prompt.0.content", "gen_ai.completion.0.content")
    return (call.name, *(call.attributes.get(name) for name in names))


def expected(provider: str) -> tuple[Any, ...]:
    return "openai.chat.completion", provider, "Hello there", "Hello there"


def check_token_ids(trace: Trace, provider: str) -> None:
    (triplet,) = trace.triplets()
    ids = ([], []) if provider == "anthropic" else (PROMPT_IDS, ANSWER_IDS)
    assert (triplet.prompt["token_ids"], triplet.response["token_ids"]) == ids


@pytest.fixture(scope="module", autouse=True)
def forgotten_clients() -> Iterator[None]:
    """What LiteLLM did not close is not blamed on the tests that come after."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        litellm.in_memory_llm_clients_cache.flush_cache()
        gc.collect()


# ---------------------------------------------------------------------- every provider, every way of calling


def call(**options: Any) -> Any:
    return completion(**options).choices[0].message.content


def call_streamed(**options: Any) -> Any:
    return texts(list(completion(stream=True, **options)))


async def call_async(**options: Any) -> Any:
    return (await acompletion(**options)).choices[0].message.content


async def call_streamed_async(**options: Any) -> Any:
    return texts([chunk async for chunk in await acompletion(stream=True, **options)])


@pytest.mark.parametrize("way", [call, call_streamed, call_async, call_streamed_async])
@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_call_is_one_span_whatever_the_provider(stub_model: StubModel, provider: str, way: Any) -> None:
    trace = trace_of(functools.partial(way, **to(stub_model, provider)))

    assert trace.result == "Hello there"
    assert told(trace) == expected(provider)
    assert ("gen_ai.streaming.time_to_first_token" in trace.spans[0].attributes) is ("streamed" in way.__name__)
    check_token_ids(trace, provider)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_tool_calls_are_told(stub_model: StubModel, provider: str) -> None:
    stub_model.script = Script([Answer("", (ToolCall.of("weather", city="Oslo"),))])

    trace = observed(completion, tools=[WEATHER], **to(stub_model, provider))

    (call,) = trace.spans
    assert call.attributes["gen_ai.request.functions.0.name"] == "weather"
    assert call.attributes["gen_ai.completion.0.tool_calls.0.name"] == "weather"
    assert json.loads(str(call.attributes["gen_ai.completion.0.tool_calls.0.arguments"])) == {"city": "Oslo"}


@pytest.mark.parametrize("failure", BACKEND_ERRORS.values(), ids=BACKEND_ERRORS)
@pytest.mark.parametrize("way", [call, call_streamed_async])
@pytest.mark.parametrize("provider", PROVIDERS)
def test_backend_error_reaches_the_program_unchanged(
    stub_model: StubModel, provider: str, way: Any, failure: Turn
) -> None:
    stub_model.script = Script(lambda request: failure)
    asked = functools.partial(way, max_retries=0, **to(stub_model, provider))
    with pytest.raises(Exception) as plain:  # noqa: PT011 # LiteLLM has one for each
        unobserved(asked)
    request_count = len(stub_model.requests)

    trace = trace_of(asked)

    assert (type(trace.error), evidence_of(trace.error)) == (plain.type, evidence_of(plain.value))
    assert len(stub_model.requests) == 2 * request_count
    assert [span.name for span in trace.spans] == ["openai.chat.completion"] * request_count
    assert {span.status.status_code for span in trace.spans} == {"ERROR"}


@pytest.mark.parametrize("provider", ["hosted_vllm", "anthropic"])
def test_each_attempt_of_a_call_is_a_span(stub_model: StubModel, provider: str) -> None:
    stub_model.script = Script([Failure(500), "Hello there"])
    trace = observed(completion, num_retries=1, **to(stub_model, provider))
    assert [span.status.status_code for span in trace.model_calls] == ["ERROR", "UNSET"]
    assert trace.result.choices[0].message.content == "Hello there"


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_stream_that_breaks_is_one_span_with_its_error(stub_model: StubModel, provider: str) -> None:
    stub_model.script = Script([Answer("one two three four", cut_after_events=3)])

    trace = observed(lambda: list(completion(stream=True, max_retries=0, **to(stub_model, provider))))

    (call,) = trace.spans
    assert "peer closed connection" in str(trace.error)
    assert (call.name, call.status.status_code) == ("openai.chat.completion", "ERROR")
    assert call.attributes["agentlightning.response.is_cut"] is True


def test_the_span_stands_beneath_what_is_current(stub_model: StubModel) -> None:
    def work() -> None:
        with agent_step("poet"):
            completion(**to(stub_model, "hosted_vllm"))
            list(completion(stream=True, **to(stub_model, "anthropic")))

    trace = observed(work)

    assert trace.shape == ["poet.agent [poet]", ["openai.chat.completion"], ["openai.chat.completion"]]
    assert [triplet.metadata["agent_name"] for triplet in trace.triplets()] == ["poet", "poet"]


# ---------------------------------------------------------------------- other functions


@pytest.mark.parametrize(("method", "provider"), [("completion", "hosted_vllm"), ("acompletion", "anthropic")])
def test_calls_of_a_router_are_spans(stub_model: StubModel, method: str, provider: str) -> None:
    options = to(stub_model, provider)
    messages = options.pop("messages")
    router = Router(model_list=[{"model_name": "any", "litellm_params": options}])

    trace = trace_of(functools.partial(getattr(router, method), model="any", messages=messages))

    assert told(trace) == expected(provider)


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_text_completions_and_embeddings_are_one_span_each(stub_model: StubModel, provider: str) -> None:
    options = {"model": f"{provider}/stub-model", "api_base": stub_model.openai_url, "api_key": "any"}

    text = observed(litellm.text_completion, prompt="Hello there", **options)
    embedding = observed(litellm.embedding, input=["Hello there"], **options)

    assert [span.name for span in text.spans] == ["openai.completion"]
    assert [span.name for span in embedding.spans] == ["openai.embeddings"]
    assert embedding.spans[0].attributes["gen_ai.system"] == provider


@pytest.mark.parametrize(
    ("provider", "name"),
    [("openai", "openai.responses"), ("hosted_vllm", "openai.responses"), ("anthropic", "openai.chat.completion")],
)
async def test_responses_are_one_span_each(stub_model: StubModel, provider: str, name: str) -> None:
    options = {k: v for k, v in to(stub_model, provider).items() if k not in ("messages", "extra_body")}
    options["input"] = "Hello there"

    async def stream() -> list[Any]:
        return [event async for event in await litellm.aresponses(stream=True, **options)]

    traces = [
        observed(litellm.responses, **options),
        observed(lambda: list(litellm.responses(stream=True, **options))),
        await observed_async(litellm.aresponses, **options),
        await observed_async(stream),
    ]

    assert [trace.error for trace in traces] == [None] * 4
    assert [told(trace) for trace in traces] == [(name, provider, "Hello there", "Hello there")] * 4
    assert [len(trace.triplets()) for trace in traces] == [1] * 4


class Parrot(CustomLLM):
    """A model that is no server."""

    def completion(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs["messages"][0]["content"] == "fail":
            raise LookupError("lost for words")
        return completion(model="openai/any", messages=HELLO, mock_response="Hello there")

    async def acompletion(self, *args: Any, **kwargs: Any) -> Any:
        return litellm.ModelResponse(choices=[{"message": {"role": "assistant", "content": "Hello there"}}])

    def streaming(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        for text in ("Hello", " there", ""):
            chunk: Any = {"text": text, "is_finished": not text, "finish_reason": "stop" if not text else None}
            yield chunk | {"index": 0, "tool_use": None, "usage": None}

    async def astreaming(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        for chunk in self.streaming():
            yield chunk


@pytest.fixture
def parrot(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(litellm, "custom_provider_map", [{"provider": "parrot", "custom_handler": Parrot()}])
    monkeypatch.setattr(litellm, "provider_list", [*litellm.provider_list, "parrot"])
    monkeypatch.setattr(litellm, "_custom_providers", ["parrot"])
    return "parrot/grey"


async def test_a_model_without_a_server_is_recorded_as_litellm_translates_it(parrot: str) -> None:
    trace = await observed_async(acompletion, model=parrot, messages=HELLO)
    assert told(trace) == expected("parrot")


async def test_streams_of_a_model_without_a_server_are_recorded(parrot: str) -> None:
    async def read() -> list[Any]:
        return [chunk async for chunk in await acompletion(parrot, HELLO, stream=True)]

    one = observed(lambda: list(completion(parrot, HELLO, stream=True)))
    other = await observed_async(read)

    assert told(one) == told(other) == expected("parrot")
    assert texts(one.result) == texts(other.result) == "Hello there"


def test_a_model_without_a_server_that_fails_is_a_span_with_its_error(parrot: str) -> None:
    trace = observed(completion, model=parrot, messages=[{"role": "user", "content": "fail"}])
    (call,) = trace.spans
    assert trace.error is not None
    assert (call.name, call.status.status_code) == ("openai.chat.completion", "ERROR")


def test_a_call_within_a_call_is_recorded_once(parrot: str) -> None:
    trace = observed(completion, model=parrot, messages=HELLO)
    assert told(trace) == expected("openai")


def test_a_stream_that_is_left_is_a_span_that_says_so(parrot: str) -> None:
    def leave() -> None:
        stream = completion(parrot, HELLO, stream=True)
        next(iter(stream))
        left = weakref.ref(stream)
        del stream
        while left() is not None:  # LiteLLM's own logging may hold it for a moment
            gc.collect()

    trace = observed(leave)

    assert trace.spans[0].attributes["agentlightning.response.is_cut"] is True
    assert trace.spans[0].attributes["gen_ai.completion.0.content"] == "Hello"


# ---------------------------------------------------------------------- at the same time


async def test_calls_at_the_same_time_stay_beneath_their_agents(stub_model: StubModel) -> None:
    async def work(agent: str, provider: str) -> None:
        with agent_step(agent):
            await acompletion(**to(stub_model, provider) | {"messages": [{"role": "user", "content": agent}]})

    async def both() -> None:
        await asyncio.gather(*(work(f"{provider}-{n}", provider) for provider in PROVIDERS for n in range(5)))

    trace = await observed_async(both)

    assert len(trace.model_calls) == 15
    agent_by_id = {span.span_id: span.name for span in trace.spans}
    assert all(
        agent_by_id[c.parent_id] == f"{c.attributes['gen_ai.prompt.0.content']}.agent" for c in trace.model_calls
    )


# ---------------------------------------------------------------------- applied and undone


def test_nothing_is_left_when_it_is_undone(stub_model: StubModel) -> None:
    def state() -> list[Any]:
        kinds = (HTTPHandler, AsyncHTTPHandler, litellm.CustomStreamWrapper)
        functions = (main.completion, main.embedding, sys.modules["litellm.responses.main"].responses)
        return [dict(vars(kind)) for kind in kinds] + [
            [cell.cell_contents for cell in f.__closure__] for f in functions
        ]

    before = state()
    patch = LiteLLMPatch()

    with patch:
        assert patch.is_applied
        assert state() != before

    assert state() == before


def test_litellm_is_not_imported_for_us_and_is_recorded_when_it_is(stub_model: StubModel) -> None:
    program = """
    import json, sys
    from agentlightning.instrumentation import instrument_all
    from tests.instrumentation.traces import observed
    instrument_all()
    was_imported = "litellm" in sys.modules
    from litellm import completion
    message = {"role": "user", "content": "Hello there"}
    trace = observed(completion, model="hosted_vllm/stub-model", messages=[message], api_base=sys.argv[1])
    print(json.dumps([was_imported, [span.name for span in trace.spans]]))
    """

    assert told_by(program, stub_model.openai_url) == [False, ["openai.chat.completion"]]


READER = """
import asyncio, json, sys, httpx
from agentlightning.tracer import OtelTracer

async def main(url):
    import litellm
    asked = {"messages": [{"role": "user", "content": "hi"}], "api_key": "x", "api_base": url}
    async with httpx.AsyncClient() as client:
        for provider in ("openai", "hosted_vllm"):
            stream = await litellm.acompletion(model=f"{provider}/stub-model", stream=True, **asked)
            assert (await anext(stream)).choices[0].delta.content == "One"
            await client.post(f"{url}/chat/completions", json={"messages": []})
            [chunk async for chunk in stream]
    return True

tracer = OtelTracer()
with tracer.lifespan(), tracer._trace_context_sync():
    print(json.dumps(asyncio.run(main(sys.argv[1]))))
"""


def test_the_first_stream_of_a_process_is_live(stub_model: StubModel) -> None:
    stub_model.script = Script([held_until_read()], repeats_last=True)
    assert told_by(READER, stub_model.openai_url) is True


# ---------------------------------------------------------------------- what LiteLLM exports


class FakeSpan:
    def __init__(self) -> None:
        self.attributes: dict[str, Any] = {}

    def set_attribute(self, name: str, value: Any) -> None:
        self.attributes[name] = value

    def is_recording(self) -> bool:
        return True


@pytest.mark.parametrize(
    "response",
    [
        {"prompt_token_ids": [1, 2], "response_token_ids": [[3, 4]]},
        {"prompt_token_ids": [1, 2], "choices": [{"provider_specific_fields": {"token_ids": [3, 4]}}]},
    ],
    ids=["instrumented", "vllm"],
)
def test_exported_spans_carry_token_ids(response: Any) -> None:
    found = vars(OpenTelemetry)["set_attributes"]
    integration, span = object.__new__(OpenTelemetry), FakeSpan()
    integration.callback_name = None

    instrument_litellm()
    instrument_litellm()
    integration.set_attributes(span, {}, litellm.ModelResponse(**response))
    uninstrument_litellm()

    assert (span.attributes["prompt_token_ids"], span.attributes["response_token_ids"]) == ([1, 2], [3, 4])
    assert vars(OpenTelemetry)["set_attributes"] is found
