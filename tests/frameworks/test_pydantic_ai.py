"""Agents of PydanticAI: `agentlightning.instrumentation.frameworks.pydantic_ai`."""

import asyncio
import os
from collections.abc import Callable
from typing import Any

import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI
from pydantic_ai import Agent, ApprovalRequired, DeferredToolRequests, ModelRetry, RunContext
from pydantic_ai.capabilities import Instrumentation
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.tool_manager import ToolManager

from agentlightning.adapter import Framework, TraceToMessages
from agentlightning.instrumentation.frameworks.pydantic_ai import PydanticAIPatch
from tests.frameworks.contract import CALL, FrameworkContract, forecast, weather_in
from tests.instrumentation.traces import observed_async
from tests.stub_model.script import Answer, Script
from tests.stub_model.server import StubModel
from tests.stub_model.words import ToolCall

RUNS_IN = ("openai3", "lowest")

IS_LOWEST = os.environ["AGL_FRAMEWORK_GROUP"] == "lowest"
# Its 2.0 does not go with anthropic 1.0, which is not of our extra.
OTHER_DIALECTS = ["openai.responses"] if IS_LOWEST else ["openai.responses", "anthropic.messages"]
SETTINGS: Any = {"extra_body": {"return_token_ids": True}}


def model_of(stub_model: StubModel, dialect: str = "openai.chat.completion") -> Any:
    # A connection that is kept would outlive the event loop of its test.
    options: Any = {"api_key": "any", "max_retries": 0, "default_headers": {"Connection": "close"}}
    if dialect == "anthropic.messages":
        client = AsyncAnthropic(base_url=stub_model.url, **options)
        return AnthropicModel("stub-model", provider=AnthropicProvider(anthropic_client=client))
    kind = OpenAIResponsesModel if dialect == "openai.responses" else OpenAIChatModel
    openai_client = AsyncOpenAI(base_url=stub_model.openai_url, **options)
    return kind("stub-model", provider=OpenAIProvider(openai_client=openai_client))


def make_forecaster(model: Any, name: str = "forecaster", **options: Any) -> Agent[None, Any]:
    agent = Agent(model, name=name, instructions="Be brief.", model_settings=SETTINGS, **options)

    @agent.tool_plain
    def weather(city: str) -> str:
        if city == "Pompeii":
            raise ModelRetry("it erupts")
        return weather_in(city)

    return agent


@pytest.fixture
def forecaster(stub_model: StubModel) -> Agent[None, Any]:
    stub_model.script = Script(forecast)
    return make_forecaster(model_of(stub_model))


async def run(agent: Agent[None, Any], task: str = "Oslo") -> Any:
    return (await agent.run(task)).output


def run_sync(agent: Agent[None, Any], task: str = "Oslo") -> Any:
    return _on_own_loop(lambda: agent.run_sync(task).output)


async def run_stream(agent: Agent[None, Any], task: str = "Oslo") -> Any:
    async with agent.run_stream(task) as result:
        return [text async for text in result.stream_text()][-1]


def run_stream_sync(agent: Agent[None, Any], task: str = "Oslo") -> Any:
    def stream() -> Any:
        with agent.run_stream_sync(task) as result:
            return list(result.stream_text())[-1]

    return _on_own_loop(stream)


async def run_stream_events(agent: Agent[None, Any], task: str = "Oslo") -> Any:
    async with agent.run_stream_events(task) as events:
        return [event async for event in events][-1].result.output


async def iterate(agent: Agent[None, Any], task: str = "Oslo") -> Any:
    async with agent.iter(task) as agent_run:
        async for _ in agent_run:
            pass
    return agent_run.result.output


def _on_own_loop(work: Callable[[], Any]) -> Any:
    """PydanticAI leaves the loop that it makes open."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        return work()
    finally:
        asyncio.set_event_loop(None)
        loop.close()


class TestPydanticAI(FrameworkContract):
    package, patch, framework = "pydantic_ai", PydanticAIPatch, Framework.PYDANTIC_AI
    owners = (Agent, ToolManager)
    ways = (run, run_sync, run_stream, run_stream_events, iterate)
    if not IS_LOWEST:  # its 2.0 leaves these runs open, and their agent unrecorded
        ways = (*ways, run_stream_sync)
    tool_error = LookupError

    def agent(self, model: StubModel, name: str) -> Agent[None, Any]:
        return make_forecaster(model_of(model), name)


# ---------------------------------------------------------------------- agents


@pytest.mark.parametrize("way", [run, run_stream])
@pytest.mark.parametrize("dialect", OTHER_DIALECTS)
async def test_other_models_are_seen_alike(stub_model: StubModel, dialect: str, way: Callable[..., Any]) -> None:
    stub_model.script = Script(forecast)
    trace = await observed_async(way, make_forecaster(model_of(stub_model, dialect)))
    assert trace.result == "I found rain in Oslo."
    assert trace.shape == ["forecaster.agent [forecaster]", [dialect], ["weather.tool"], [dialect]]
    assert [triplet.metadata["agent_name"] for triplet in trace.triplets()] == ["forecaster"] * 2


async def test_agent_that_a_tool_asks_works_beneath_that_tool(stub_model: StubModel) -> None:
    model = model_of(stub_model)
    poet = Agent(model, name="poet")
    editor = Agent(model, name="editor")

    @editor.tool
    async def write(context: RunContext[None], theme: str) -> str:
        return (await poet.run(theme, usage=context.usage)).output

    stub_model.script = Script([Answer("", (ToolCall.of("write", theme="sea"),)), "Waves.", "Printed."])

    trace = await observed_async(run, editor)

    poem = ["write.tool", ["poet.agent [poet]", CALL]]
    assert trace.shape == ["editor.agent [editor]", CALL, poem, CALL]
    assert trace.tools[0].attributes["tool.result"] == "Waves."


async def test_agent_without_a_name_is_called_as_its_variable(stub_model: StubModel) -> None:
    oracle = Agent(model_of(stub_model))

    async def ask() -> Any:
        return (await oracle.run("Hi")).output

    trace = await observed_async(ask)

    assert trace.shape == ["oracle.agent [oracle]", CALL]


async def test_agent_that_has_no_name_at_all_is_an_agent(stub_model: StubModel) -> None:
    async def ask() -> Any:
        async with [Agent(model_of(stub_model))][0].iter("Hi") as agent_run:
            return [node async for node in agent_run]

    trace = await observed_async(ask)

    assert trace.shape == ["agent.agent [agent]", CALL]


# ---------------------------------------------------------------------- failures


async def test_tool_that_asks_to_be_called_again_is_marked(stub_model: StubModel, forecaster: Any) -> None:
    cities = ("Pompeii", "Oslo")
    stub_model.script = Script([*(Answer("", (ToolCall.of("weather", city=city),)) for city in cities), "Done."])

    trace = await observed_async(run, forecaster)

    assert [tool.status.status_code for tool in trace.tools] == ["ERROR", "UNSET"]
    assert "it erupts" in (trace.tools[0].status.description or "")
    assert trace.named("forecaster.agent").status.status_code == "UNSET"


async def test_tool_that_waits_for_approval_has_not_failed(stub_model: StubModel) -> None:
    agent = Agent(model_of(stub_model), name="clerk", output_type=[str, DeferredToolRequests])

    @agent.tool_plain
    def pay() -> str:
        raise ApprovalRequired

    stub_model.script = Script([Answer("", (ToolCall.of("pay"),))])

    trace = await observed_async(run, agent)

    assert isinstance(trace.result, DeferredToolRequests)
    assert trace.tools[0].status.status_code == "UNSET"


async def test_run_that_is_left_early_is_closed(stub_model: StubModel, forecaster: Agent[None, Any]) -> None:
    async def glance() -> str:
        async with forecaster.iter("Oslo") as agent_run:
            async for _ in agent_run:
                break
        other = Agent(model_of(stub_model), name="other")
        stub_model.script = Script(["Hi."])
        return (await other.run("Hi")).output

    trace = await observed_async(glance)

    assert trace.shape == ["virtual-root", ["forecaster.agent [forecaster]"], ["other.agent [other]", CALL]]


# ---------------------------------------------------------------------- its own instrumentation


async def test_own_instrumentation_doubles_no_call(stub_model: StubModel) -> None:
    stub_model.script = Script(forecast)
    agent = make_forecaster(model_of(stub_model), capabilities=[Instrumentation()])

    trace = await observed_async(run, agent)

    chat = ["chat stub-model [forecaster]", CALL]
    tool = ["weather.tool", ["execute_tool weather [forecaster]"]]
    assert trace.shape == [
        "forecaster.agent [forecaster]",
        ["invoke_agent forecaster [forecaster]", chat, tool, chat],
    ]
    assert [t.metadata["agent_name"] for t in trace.triplets()] == ["forecaster", "forecaster"]
    assert [len(told["messages"]) for told in TraceToMessages().adapt(trace.spans)] == [3, 5]
