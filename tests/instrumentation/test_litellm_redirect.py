"""LiteLLM as a library: calls of its own HTTP handlers go where the router says, as those of the SDKs do."""

import asyncio
import gc
import importlib.util
import os
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # LiteLLM downloads its prices when it is imported
litellm = pytest.importorskip("litellm")

import agentlightning as agl  # noqa: E402
from agentlightning.instrumentation.frameworks.litellm import LiteLLMPatch  # noqa: E402
from agentlightning.instrumentation.model_sdks import OpenAIPatch  # noqa: E402
from agentlightning.instrumentation.redirect import ModelRequest, Target, redirected  # noqa: E402
from agentlightning.litagent import FunctionalLitAgent  # noqa: E402
from tests.instrumentation.traces import observed, observed_async  # noqa: E402
from tests.stub_model.server import StubModel, running  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore:Item 'summary' on TypedDict class:UserWarning",
    "ignore:unclosed:ResourceWarning",  # it does not close its clients
)
SECRET = "sk-secret"
HELLO = [{"role": "user", "content": "Hello there"}]
PROVIDERS = ("openai", "hosted_vllm", "anthropic")


@pytest.fixture(scope="module", autouse=True)
def forgotten_clients() -> Iterator[None]:
    """What LiteLLM did not close is not blamed on the tests that come after."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        litellm.in_memory_llm_clients_cache.flush_cache()
        gc.collect()


@pytest.fixture
def elsewhere() -> Iterator[StubModel]:
    with running(models=("mine",), api_key="theirs") as model:
        yield model


def to(there: StubModel) -> Any:
    def route(request: ModelRequest) -> Target:
        url = there.openai_url if request.sdk == "openai" else there.url
        return Target(url, "mine", "theirs", parameters={"temperature": 0.25})

    return route


def asking(stub_model: StubModel, provider: str, **options: Any) -> dict[str, Any]:
    base = stub_model.url if provider == "anthropic" else stub_model.openai_url
    asked = {"model": f"{provider}/stub-model", "api_base": base, "api_key": SECRET, "messages": HELLO}
    return {**asked, "max_tokens": 20, "temperature": 1.0, "extra_headers": {"X-Api-Token": SECRET}, **options}


def check(original: StubModel, elsewhere: StubModel, trace: Any) -> None:
    assert trace.error is None
    assert original.requests == []
    [request] = elsewhere.requests
    assert (request.body["model"], request.body["temperature"]) == ("mine", 0.25)
    assert SECRET not in str(dict(request.headers)) + request.path
    [span] = trace.model_calls
    assert request.headers["traceparent"].startswith(f"00-{span.trace_id}-{span.span_id}-0")
    assert span.attributes["agentlightning.requested_model"] == "stub-model"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_call_goes_where_the_router_says(
    stub_model: StubModel, elsewhere: StubModel, provider: str, stream: bool
) -> None:
    def run() -> str:
        with redirected(to(elsewhere)):
            answer = litellm.completion(**asking(stub_model, provider, stream=stream))
            if stream:
                return "".join(chunk.choices[0].delta.content or "" for chunk in answer)
            return str(answer.choices[0].message.content)

    trace = observed(run)

    check(stub_model, elsewhere, trace)
    assert trace.result == "Hello there"


@pytest.mark.parametrize("provider", PROVIDERS)
async def test_an_asynchronous_call_goes_there_too(stub_model: StubModel, elsewhere: StubModel, provider: str) -> None:
    async def run() -> str:
        with redirected(to(elsewhere)):
            answer = await litellm.acompletion(**asking(stub_model, provider))
        return str(answer.choices[0].message.content)

    trace = await observed_async(run)

    check(stub_model, elsewhere, trace)
    assert trace.result == "Hello there"


OTHERS = {
    "gemini": {"model": "gemini/gemini-2.0-flash", "api_key": SECRET},
    "ollama": {"model": "ollama/llama3", "keep_alive": "5m", "num_ctx": 4096},
    "ollama_chat": {"model": "ollama_chat/llama3"},
    "bedrock": {"model": "bedrock/anthropic.claude-3-5-sonnet-20240620-v1:0", "aws_secret_access_key": SECRET},
    "vertex": {"model": "vertex_ai/gemini-2.0-flash", "vertex_project": "p", "vertex_credentials": SECRET},
    "cohere": {"model": "cohere_chat/command-r", "api_key": SECRET},
    "groq": {"model": "groq/llama-3.1-8b", "api_key": SECRET},
    "by keyword": {"model": "gemini-2.0-flash", "custom_llm_provider": "gemini", "api_key": SECRET},
}
"""Providers that LiteLLM speaks to in shapes of their own, with arguments that are for them alone."""


def telling(options: dict[str, Any], original: StubModel) -> dict[str, Any]:
    address = {} if "vertex" in options["model"] else {"api_base": original.url}
    asked = {**options, **address, "messages": HELLO, "max_tokens": 20, "reasoning_effort": "low"}
    return {**asked, "extra_headers": {"X-Api-Token": SECRET, "X-Trace": "t"}}


def check_other(original: StubModel, elsewhere: StubModel, trace: Any) -> None:
    """It was one chat of OpenAI's shape, and nothing of the provider went along."""
    assert trace.error is None, trace.error
    assert trace.result == "Hello there"
    assert original.requests == []
    [request] = elsewhere.requests
    assert (request.dialect, request.body["model"], request.body["temperature"]) == ("chat", "mine", 0.25)
    assert SECRET not in str(request)
    assert not {"keep_alive", "num_ctx", "vertex_project", "vertex_credentials"} & request.body.keys()
    assert request.headers["x-trace"] == "t"
    [span] = trace.model_calls
    assert request.headers["traceparent"].startswith(f"00-{span.trace_id}-{span.span_id}-0")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("options", OTHERS.values(), ids=OTHERS)
def test_a_chat_of_any_provider_goes_there_as_one_of_openai(
    stub_model: StubModel, elsewhere: StubModel, options: dict[str, Any], stream: bool
) -> None:
    def run() -> str:
        with redirected(to(elsewhere)):
            answer = litellm.completion(**telling(options, stub_model), stream=stream)
            return _text(answer) if not stream else "".join(chunk.choices[0].delta.content or "" for chunk in answer)

    check_other(stub_model, elsewhere, observed(run))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_an_asynchronous_chat_of_any_provider_goes_there_too(
    stub_model: StubModel, elsewhere: StubModel, stream: bool
) -> None:
    async def run() -> str:
        with redirected(to(elsewhere)):
            answer = await litellm.acompletion(**telling(OTHERS["gemini"], stub_model), stream=stream)
            if stream:
                return "".join([chunk.choices[0].delta.content or "" async for chunk in answer])
            return _text(answer)

    check_other(stub_model, elsewhere, await observed_async(run))


async def test_chats_of_a_router_go_there_too(stub_model: StubModel, elsewhere: StubModel) -> None:
    params = {"model": "gemini/gemini-2.0-flash", "api_key": SECRET, "api_base": stub_model.url}
    params |= {"extra_headers": {"X-Trace": "t"}}
    router = litellm.Router([{"model_name": "mine-too", "litellm_params": params}], num_retries=0)

    async def run() -> str:
        with redirected(to(elsewhere)):
            return _text(await router.acompletion("mine-too", HELLO))

    check_other(stub_model, elsewhere, await observed_async(run))


def test_a_text_completion_of_any_provider_goes_there_too(stub_model: StubModel, elsewhere: StubModel) -> None:
    asked: Any = {"model": "gemini/gemini-2.0-flash", "api_key": SECRET, "api_base": stub_model.url}
    with LiteLLMPatch(), OpenAIPatch(), redirected(to(elsewhere)):
        completed = litellm.text_completion(prompt="Hello there", **asked)

    assert completed.choices[0].text == "Hello there"
    assert [request.dialect for request in elsewhere.requests] == ["chat"]
    assert stub_model.requests == []


@pytest.mark.skipif(
    importlib.util.find_spec("mcp_types") is None,
    reason="litellm.responses needs mcp 2, others here need 1",
)
def test_a_response_of_any_provider_goes_there_too(stub_model: StubModel, elsewhere: StubModel) -> None:
    asked: Any = {"model": "gemini/gemini-2.0-flash", "api_key": SECRET, "api_base": stub_model.url}
    with LiteLLMPatch(), OpenAIPatch(), redirected(to(elsewhere)):
        responded = litellm.responses(input="Hello there", **asked)

    assert responded.output[0].content[0].text == "Hello there"
    assert [request.dialect for request in elsewhere.requests] == ["chat"]
    assert stub_model.requests == []


@pytest.mark.parametrize("records", [True, False])
@pytest.mark.parametrize(
    "call",
    [
        lambda **asked: litellm.embedding(model="gemini/text-embedding-004", input=["Hello"], **asked),
        lambda **asked: litellm.embedding(model="openai/text-embedding-3-small", input=["Hello"], **asked),
        lambda **asked: litellm.image_generation(model="openai/dall-e-3", prompt="Hello", **asked),
        lambda **asked: litellm.speech(model="openai/tts-1", input="Hello", voice="alloy", **asked),
        lambda **asked: litellm.rerank(model="cohere/rerank-v3", query="Hello", documents=["a"], **asked),
    ],
    ids=["embedding", "openai embedding", "image", "speech", "rerank"],
)
def test_what_is_no_chat_is_not_sent_past_the_router(
    stub_model: StubModel, elsewhere: StubModel, call: Any, records: bool
) -> None:
    def chats_only(request: ModelRequest) -> Target | None:
        return None if request.path == "/embeddings" else to(elsewhere)(request)

    with (
        LiteLLMPatch(records=records),
        OpenAIPatch(records=records),
        redirected(chats_only),
        pytest.raises(Exception, match=r"no chat .* redirect_exclude=\['\w+/.+'\]"),
    ):
        call(api_key=SECRET, api_base=stub_model.url)

    assert stub_model.requests == elsewhere.requests == []


def test_an_embedding_goes_where_the_router_has_a_place_for_it(stub_model: StubModel, elsewhere: StubModel) -> None:
    asked: Any = {"model": "gemini/text-embedding-004", "api_key": SECRET, "api_base": stub_model.url}
    with LiteLLMPatch(), OpenAIPatch(), redirected(to(elsewhere)):
        litellm.embedding(input=["Hello"], **asked)

    assert [request.dialect for request in elsewhere.requests] == ["embeddings"]
    assert stub_model.requests == []


@pytest.mark.parametrize("exclude", [[], ["gemini/*"], ["gemini-2.0-*"]], ids=["all", "provider", "model"])
def test_an_agent_that_asks_gemini_is_answered_by_the_model_of_its_rollout_unless_excluded(
    stub_model: StubModel, elsewhere: StubModel, exclude: list[str]
) -> None:
    def agent(task: str) -> float:
        asked: Any = {"model": "gemini/gemini-2.0-flash", "api_key": SECRET, "api_base": stub_model.url}
        try:
            return float(_text(litellm.completion(messages=HELLO, **asked)) == task)
        except litellm.NotFoundError:  # nobody speaks Gemini's dialect there
            return 0.0

    runner, store = agl.LitAgentRunner[Any](agl.OtelTracer()), agl.InMemoryLightningStore()
    llm = agl.LLM(endpoint=elsewhere.openai_url, model="mine", api_key="theirs", redirect=True)
    llm.redirect_exclude = exclude
    with runner.run_context(agent=FunctionalLitAgent(agent), store=store):
        rollout = asyncio.run(runner.step("Hello there", resources={"main_llm": llm}))
    spans = asyncio.run(store.query_spans(rollout.rollout_id))

    assert agl.find_final_reward(spans) == (0.0 if exclude else 1.0)
    assert [request.body["model"] for request in elsewhere.requests] == ([] if exclude else ["mine"])
    [call] = [span for span in spans if span.name == "openai.chat.completion"]
    assert call.attributes.get("agentlightning.redirect.is_excluded", False) is bool(exclude)


def test_what_litellm_makes_up_itself_is_left_alone(elsewhere: StubModel) -> None:
    with LiteLLMPatch(), OpenAIPatch(), redirected(to(elsewhere)):
        answer = litellm.completion(model="gemini/gemini-2.0-flash", messages=HELLO, mock_response="made up")
    assert (_text(answer), elsewhere.requests) == ("made up", [])


def _text(answer: Any) -> str:
    return str(answer.choices[0].message.content)


def test_what_a_router_lets_go_is_sent_as_it_was(stub_model: StubModel, elsewhere: StubModel) -> None:
    def run() -> None:
        with redirected(lambda _: None):
            litellm.completion(**asking(stub_model, "hosted_vllm"))

    observed(run)

    [request] = stub_model.requests
    assert (request.body["model"], request.headers["authorization"]) == ("stub-model", f"Bearer {SECRET}")
    assert "traceparent" not in request.headers
    assert elsewhere.requests == []


def test_a_patch_that_does_not_record_still_redirects(stub_model: StubModel, elsewhere: StubModel) -> None:
    with LiteLLMPatch(records=False), redirected(to(elsewhere)):
        litellm.completion(**asking(stub_model, "hosted_vllm"))
    assert (len(stub_model.requests), [r.body["model"] for r in elsewhere.requests]) == (0, ["mine"])
