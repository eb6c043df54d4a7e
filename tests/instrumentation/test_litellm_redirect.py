"""LiteLLM as a library: calls of its own HTTP handlers go where the router says, as those of the SDKs do."""

import gc
import os
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # LiteLLM downloads its prices when it is imported
litellm = pytest.importorskip("litellm")

from agentlightning.instrumentation.litellm import LiteLLMPatch  # noqa: E402
from agentlightning.instrumentation.redirect import ModelRequest, Target, redirected  # noqa: E402
from tests.instrumentation.observing import observed, observed_async  # noqa: E402
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
