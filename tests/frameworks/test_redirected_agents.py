"""Agents of real frameworks, as their documentation shows them, sent to the model that is trained through the proxy."""

import asyncio
import importlib
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.litagent import FunctionalLitAgent
from tests.frameworks.contract import collect_clients, forecast
from tests.stub_model.script import Script
from tests.stub_model.server import StubModel, running

RUNS_IN = ("openai2", "openai3")

pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # frameworks do not close their clients


@pytest.fixture(autouse=True)
def forgotten_clients() -> Iterator[None]:
    """What a framework did not close is not blamed on the tests that come after."""
    yield
    collect_clients()


def weather(city: str) -> str:
    """The weather of a city."""
    return f"rain in {city}"


@pytest.fixture
def original(monkeypatch: pytest.MonkeyPatch) -> Iterator[StubModel]:
    """The provider that the frameworks call by themselves."""
    with running(models=("gpt-4.1", "claude-sonnet-4-6")) as served:
        monkeypatch.setenv("OPENAI_BASE_URL", served.openai_url)
        monkeypatch.setenv("ANTHROPIC_BASE_URL", served.url)
        yield served


def spans_of(agent: Callable[[Any], Awaitable[float]] | Callable[[Any], float], trained: StubModel) -> list[agl.Span]:
    """Run an agent once with its calls redirected; the spans that the store has afterwards."""
    entry = {"model": "hosted_vllm/stub-model", "api_base": trained.openai_url}
    store = agl.InMemoryLightningStore()
    proxy = agl.LLMProxy(port=0, model_list=[{"model_name": "stub-model", "litellm_params": entry}], store=store)
    proxy.start()
    runner = agl.LitAgentRunner[Any](agl.OtelTracer())
    try:
        with runner.run_context(agent=FunctionalLitAgent(agent), store=store):
            rollout = asyncio.run(runner.step("Oslo", resources={"main_llm": proxy.as_resource()}))
        assert proxy.flush(10.0)
    finally:
        proxy.stop()
    return list(asyncio.run(store.query_spans(rollout.rollout_id)))


def check(trained: StubModel, original: StubModel, spans: list[agl.Span]) -> None:
    """Both calls were chats of the trained model, with all their tokens, and the last one has the reward."""
    assert original.requests == []
    assert [request.dialect for request in trained.requests] == ["chat", "chat"]
    triplets = agl.TracerTraceToTriplet().adapt(spans)
    prompts = [tuple(triplet.prompt["token_ids"]) for triplet in triplets]
    assert prompts == [request.prompt_token_ids for request in trained.requests]
    assert all(len(one.response["token_ids"]) == len(one.response["logprobs"]) for one in triplets)
    assert [triplet.reward for triplet in triplets] == [None, 1.0]


def test_an_agent_of_the_openai_agents_sdk_can_be_trained_as_it_is(stub_model: StubModel, original: StubModel) -> None:
    agents = importlib.import_module("agents")
    agents.set_tracing_disabled(True)
    stub_model.script = Script(forecast)

    async def agent(task: str) -> float:
        tools = [agents.function_tool(weather)]
        forecaster = agents.Agent(name="forecaster", instructions="Be brief.", tools=tools, model="gpt-4.1")
        found = await agents.Runner.run(forecaster, task)
        return float(found.final_output == "I found rain in Oslo.")

    try:
        check(stub_model, original, spans_of(agent, stub_model))
    finally:
        agents.set_tracing_disabled(False)


def test_an_agent_of_pydantic_ai_can_be_trained_as_it_is(stub_model: StubModel, original: StubModel) -> None:
    pydantic_ai = pytest.importorskip("pydantic_ai", reason="it needs openai 3")
    stub_model.script = Script(forecast)

    async def agent(task: str) -> float:
        forecaster = pydantic_ai.Agent("openai:gpt-4.1", instructions="Be brief.", tools=[weather])
        return float((await forecaster.run(task)).output == "I found rain in Oslo.")

    check(stub_model, original, spans_of(agent, stub_model))


@pytest.mark.filterwarnings("ignore:(.* is )?deprecated:DeprecationWarning")  # CrewAI uses fields it has deprecated
def test_a_crew_with_claude_counts_its_tokens_at_the_proxy(stub_model: StubModel, original: StubModel) -> None:
    crewai = pytest.importorskip("crewai", reason="it needs openai 2")

    def agent(task: str) -> float:
        llm = crewai.LLM(model="anthropic/claude-sonnet-4-6", api_key="sk-mine")
        forecaster = crewai.Agent(role="forecaster", goal="Tell the weather", backstory="Old.", llm=llm)
        work = crewai.Task(description=f"Weather of {task}?", expected_output="A sentence.", agent=forecaster)
        crewai.Crew(agents=[forecaster], tasks=[work]).kickoff()
        return 1.0

    spans = spans_of(agent, stub_model)

    assert original.requests == []
    triplets = agl.TracerTraceToTriplet().adapt(spans)
    assert len(triplets) == len(stub_model.requests)
    assert triplets[-1].reward == 1.0
