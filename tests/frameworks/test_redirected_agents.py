"""Agents of real frameworks, as their documentation shows them, sent to the model that is trained through the proxy."""

import asyncio
import importlib
import json
import os
import warnings
from collections.abc import Callable, Iterator
from inspect import iscoroutinefunction
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.litagent import FunctionalLitAgent
from tests.frameworks.contract import collect_clients, forecast, look_up
from tests.stub_model.script import Script
from tests.stub_model.server import StubModel, running

RUNS_IN = ("openai2", "openai3", "litellm", "lowest")
GROUP = os.environ["AGL_FRAMEWORK_GROUP"]

pytestmark = pytest.mark.filterwarnings(
    "ignore:unclosed:ResourceWarning",  # frameworks do not close their clients
    "ignore:(.* is )?deprecated:DeprecationWarning",  # CrewAI uses fields it has deprecated
    "ignore:Item 'summary' on TypedDict class:UserWarning",  # of LiteLLM
)


@pytest.fixture(autouse=True)
def forgotten_clients() -> Iterator[None]:
    """What a framework did not close is not blamed on the tests that come after."""
    yield
    collect_clients()


def imported(package: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CrewAI warns of itself when it is imported
        return importlib.import_module(package)


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


def spans_of(agent: Callable[[Any], Any], trained: StubModel) -> list[agl.Span]:
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


async def openai_agent(task: str) -> Any:
    agents = imported("agents")
    agents.set_tracing_disabled(True)
    try:
        tools = [agents.function_tool(weather)]
        forecaster = agents.Agent(name="forecaster", instructions="Be brief.", tools=tools, model="gpt-4.1")
        return (await agents.Runner.run(forecaster, task)).final_output
    finally:
        agents.set_tracing_disabled(False)


async def pydantic_agent(task: str) -> Any:
    pydantic_ai = imported("pydantic_ai")
    forecaster = pydantic_ai.Agent("openai:gpt-4.1", instructions="Be brief.", tools=[weather])
    return (await forecaster.run(task)).output


def crew_with_litellm(task: str) -> Any:
    crewai = imported("crewai")
    llm = crewai.LLM(model="mistral/mistral-large-latest", api_key="sk-mine", is_litellm=True)
    tools = [crewai.tools.tool("weather")(weather)]
    forecaster = crewai.Agent(role="forecaster", goal="Tell the weather", backstory="Old.", llm=llm, tools=tools)
    work = crewai.Task(description=f"Look at {task}", expected_output="A sentence.", agent=forecaster)
    return crewai.Crew(agents=[forecaster], tasks=[work]).kickoff().raw


def litellm_with(model: str) -> Callable[[str], Any]:
    """Calls a tool as the documentation of LiteLLM does."""
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tools = [
        {"type": "function", "function": {"name": "weather", "description": "Of a city.", "parameters": parameters}}
    ]

    def run(task: str) -> Any:
        completion = imported("litellm").completion
        messages: list[Any] = [{"role": "user", "content": task}]
        asked = completion(model=model, messages=messages, tools=tools).choices[0].message
        (call,) = asked.tool_calls
        found = weather(**json.loads(call.function.arguments))
        messages += [asked, {"role": "tool", "tool_call_id": call.id, "name": "weather", "content": found}]
        return completion(model=model, messages=messages, tools=tools).choices[0].message.content

    return run


AGENTS: dict[str, tuple[Callable[[str], Any], tuple[str, ...]]] = {
    "openai-agents": (openai_agent, ("openai2", "openai3", "lowest")),
    "pydantic-ai": (pydantic_agent, ("openai3", "lowest")),
    "crewai-litellm": (crew_with_litellm, ("openai2", "lowest")),
    "litellm-openai": (litellm_with("openai/gpt-4.1"), ("openai2", "litellm", "lowest")),
    "litellm-anthropic": (litellm_with("anthropic/claude-sonnet-4-6"), ("openai2", "litellm", "lowest")),
}
"""Agents that have their tool called, and the groups in which they can."""


@pytest.mark.parametrize("name", [name for name, (_, groups) in AGENTS.items() if GROUP in groups])
def test_an_agent_can_be_trained_as_it_is(stub_model: StubModel, original: StubModel, name: str) -> None:
    run, _ = AGENTS[name]
    stub_model.script = Script(look_up if name.startswith("crewai") else forecast)

    def agent(task: str) -> float:
        return float(run(task) == "I found rain in Oslo.")

    async def agent_async(task: str) -> float:
        return float(await run(task) == "I found rain in Oslo.")

    check(stub_model, original, spans_of(agent_async if iscoroutinefunction(run) else agent, stub_model))


@pytest.mark.skipif(GROUP not in ("openai2", "lowest"), reason="CrewAI needs openai 2")
def test_a_crew_with_claude_counts_its_tokens_at_the_proxy(stub_model: StubModel, original: StubModel) -> None:
    crewai = imported("crewai")

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
