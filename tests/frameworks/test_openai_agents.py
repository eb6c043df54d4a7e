"""Agents of the OpenAI Agents SDK: `agentlightning.instrumentation.frameworks.openai_agents`."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import agents
import pytest
from agents import (
    Agent,
    AsyncOpenAI,
    GuardrailFunctionOutput,
    InputGuardrailTripwireTriggered,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    TracingProcessor,
    function_tool,
    input_guardrail,
)
from agents.mcp import MCPServer
from agents.tracing.spans import NoOpSpan, SpanImpl
from mcp.types import CallToolResult, ListPromptsResult, TextContent
from mcp.types import Tool as MCPTool

from agentlightning.adapter import Framework
from agentlightning.emitter import emit_reward
from agentlightning.instrumentation.frameworks.openai_agents import OpenAIAgentsPatch
from tests.frameworks.contract import FrameworkContract, forecast, weather_in
from tests.instrumentation.traces import observed_async
from tests.stub_model.script import Answer, Script
from tests.stub_model.server import StubModel
from tests.stub_model.words import ToolCall

RUNS_IN = ("openai2", "openai3", "lowest")

MODELS = {"openai.chat.completion": OpenAIChatCompletionsModel, "openai.responses": OpenAIResponsesModel}
WITH_TOKEN_IDS = ModelSettings(extra_body={"return_token_ids": True})


@function_tool
def weather(city: str) -> str:
    """The weather of a city."""
    return weather_in(city)


class Recording(TracingProcessor):
    """The processor of a program, which keeps what it is told."""

    def __init__(self) -> None:
        self.kinds: list[str] = []

    def on_span_end(self, span: Any) -> None:
        self.kinds.append(span.span_data.type)

    def on_trace_start(self, trace: Any) -> None: ...
    def on_trace_end(self, trace: Any) -> None: ...
    def on_span_start(self, span: Any) -> None: ...
    def shutdown(self) -> None: ...
    def force_flush(self) -> None: ...


@pytest.fixture(autouse=True)
def processor() -> Iterator[Recording]:
    """Stands in for the SDK's own processor, which would send everything to OpenAI."""
    processor = Recording()
    agents.set_trace_processors([processor])
    yield processor
    agents.set_trace_processors([])
    agents.set_tracing_disabled(False)


class Team:
    """Makes agents that share a model."""

    def __init__(self, stub_model: StubModel, dialect: str = "openai.chat.completion") -> None:
        # A connection that is kept would outlive the event loop of its test.
        headers = {"Connection": "close"}
        url = stub_model.openai_url
        client = AsyncOpenAI(base_url=url, api_key="any", max_retries=0, default_headers=headers)
        self.model = MODELS[dialect]("stub-model", client)

    def member(self, name: str, **options: Any) -> Agent[Any]:
        return Agent(name=name, model=self.model, model_settings=WITH_TOKEN_IDS, **options)


@pytest.fixture
def team(stub_model: StubModel) -> Team:
    return Team(stub_model)


async def run(agent: Agent[Any], task: str = "Oslo") -> Any:
    return (await Runner.run(agent, task)).final_output


async def run_streamed(agent: Agent[Any], task: str = "Oslo") -> Any:
    result = Runner.run_streamed(agent, task)
    async for _ in result.stream_events():
        pass
    return result.final_output


def run_sync(agent: Agent[Any], task: str = "Oslo") -> Any:
    """On a loop of ours, because the SDK leaves its own open."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        return Runner.run_sync(agent, task).final_output
    finally:
        asyncio.set_event_loop(None)
        loop.close()


class TestOpenAIAgents(FrameworkContract):
    package, patch, framework = "agents", OpenAIAgentsPatch, Framework.OPENAI_AGENTS
    owners = (SpanImpl, NoOpSpan, agents.tool_context.ToolContext)
    steps, tool_failure = ("agent_step",), "Error running tool"
    ways = (run, run_streamed, run_sync)

    def agent(self, model: StubModel, name: str) -> Agent[Any]:
        return Team(model).member(name, instructions="Be brief.", tools=[weather])


@pytest.fixture
def forecaster(stub_model: StubModel) -> Agent[Any]:
    stub_model.script = Script(forecast)
    return TestOpenAIAgents().agent(stub_model, "forecaster")


# ---------------------------------------------------------------------- an agent with a tool


@pytest.mark.parametrize("how", [run, run_streamed])
async def test_responses_are_one_tree(stub_model: StubModel, how: Callable[..., Awaitable[Any]]) -> None:
    stub_model.script = Script(forecast)
    agent = Team(stub_model, "openai.responses").member("forecaster", tools=[weather])

    trace = await observed_async(how, agent)

    call = ["openai.responses"]
    assert trace.shape == ["forecaster.agent [forecaster]", call, ["weather.tool"], call]
    triplets = trace.triplets()
    prompts = [tuple(triplet.prompt["token_ids"]) for triplet in triplets]
    assert prompts == [request.prompt_token_ids for request in stub_model.requests]


async def test_sensitive_data_stay_out_of_tools_where_the_program_wants_it(forecaster: Agent[Any]) -> None:
    config = RunConfig(trace_include_sensitive_data=False)
    trace = await observed_async(Runner.run, forecaster, "Oslo", run_config=config)
    assert trace.tools[0].attributes.keys() == {"tool.name", "tool.call.type", "tool.call.id"}


# ---------------------------------------------------------------------- several agents


async def test_handoff_gives_calls_to_the_next_agent(stub_model: StubModel, team: Team) -> None:
    @function_tool
    def pay() -> str:
        """Pay the bill."""
        emit_reward(1.0)
        return "paid"

    closer = team.member("Closer")
    clerk = team.member("Clerk", tools=[pay], handoffs=[closer])
    triage = team.member("Triage", tools=[weather], handoffs=[clerk])
    said = [("weather", {"city": "Oslo"}), ("transfer_to_clerk", {}), ("pay", {}), ("transfer_to_closer", {})]
    stub_model.script = Script([*(Answer("", (ToolCall.of(name, **given),)) for name, given in said), "Goodbye."])

    trace = await observed_async(run, triage)

    call = ["openai.chat.completion"]
    assert trace.shape == [
        "virtual-root",
        ["Triage.agent [Triage]", call, ["weather.tool"], call, ["Triage.handoff"]],
        ["Clerk.agent [Clerk]", call, ["pay.tool", ["agentlightning.reward"]], call, ["Clerk.handoff"]],
        ["Closer.agent [Closer]", call],
    ]
    assert trace.named("Clerk.handoff").attributes == {"handoff.from_agent": "Clerk", "handoff.to_agent": "Closer"}
    assert [triplet.reward for triplet in trace.triplets()] == [None, None, 1.0, None, None]
    assert len(trace.triplets(agent_match="Clerk")) == 2


async def test_agent_as_a_tool_works_beneath_that_tool(stub_model: StubModel, team: Team) -> None:
    poet = team.member("Poet")
    editor = team.member("Editor", tools=[poet.as_tool("write", "Write a poem.")])
    stub_model.script = Script([Answer("", (ToolCall.of("write", input="sea"),)), "Waves.", "Printed."])

    trace = await observed_async(run, editor)

    call = ["openai.chat.completion"]
    assert trace.shape == ["Editor.agent [Editor]", call, ["write.tool", ["Poet.agent [Poet]", call]], call]


def guarded_agent(team: Team, *, is_bad: bool) -> Agent[Any]:
    judge = team.member("Judge")

    @input_guardrail(run_in_parallel=False)
    async def decency(context: Any, agent: Any, task: Any) -> GuardrailFunctionOutput:
        judged = await Runner.run(judge, "Is it decent?", context=context.context)
        return GuardrailFunctionOutput(judged.final_output, tripwire_triggered=is_bad)

    return team.member("Guarded", input_guardrails=[decency])


async def test_guardrail_stands_beside_the_calls_of_its_agent(team: Team) -> None:
    trace = await observed_async(run, guarded_agent(team, is_bad=False))

    call = ["openai.chat.completion"]
    assert trace.shape == ["Guarded.agent [Guarded]", ["decency.guardrail", ["Judge.agent [Judge]", call]], call]
    assert [triplet.metadata["agent_name"] for triplet in trace.triplets()] == ["Judge", "Guarded"]
    assert trace.named("decency.guardrail").attributes["guardrail.triggered"] is False


@pytest.mark.parametrize("how", [run, run_streamed])
async def test_triggered_guardrail_is_marked(team: Team, how: Callable[..., Awaitable[Any]]) -> None:
    trace = await observed_async(how, guarded_agent(team, is_bad=True))
    assert isinstance(trace.error, InputGuardrailTripwireTriggered)
    assert trace.named("decency.guardrail").attributes["guardrail.triggered"] is True


class Almanac(MCPServer):
    """A server of one tool, in this process."""

    name = "almanac"

    async def connect(self) -> None: ...
    async def cleanup(self) -> None: ...

    async def list_tools(self, run_context: Any = None, agent: Any = None) -> list[MCPTool]:
        return [MCPTool(name="sunrise", inputSchema={"type": "object", "properties": {}})]

    async def call_tool(self, tool_name: str, arguments: Any, meta: Any = None) -> CallToolResult:
        return CallToolResult(content=[TextContent(type="text", text="06:12")])

    async def list_prompts(self) -> ListPromptsResult:
        return ListPromptsResult(prompts=[])

    async def get_prompt(self, name: str, arguments: Any = None) -> Any:
        raise LookupError(name)


async def test_mcp_tools_are_listed_and_called(stub_model: StubModel, team: Team) -> None:
    stub_model.script = Script([Answer("", (ToolCall.of("sunrise"),)), "At six."])

    trace = await observed_async(run, team.member("Watch", mcp_servers=[Almanac()]))

    call, listing = ["openai.chat.completion"], ["almanac.mcp_tools"]
    # Some versions list the tools before they begin with the agent.
    watch = trace.shape[-1] if trace.shape[0] == "virtual-root" else trace.shape
    assert [part for part in watch if part != listing] == ["Watch.agent [Watch]", call, ["sunrise.tool"], call]
    assert trace.tools[0].attributes["mcp.server"] == "almanac"
    assert trace.spans[0].attributes == {"mcp.server": "almanac", "mcp.tools": ["sunrise"]}
    assert len(trace.triplets()) == 2


# ---------------------------------------------------------------------- failures


async def test_tool_that_ends_the_run_is_marked(stub_model: StubModel, team: Team) -> None:
    @function_tool(failure_error_function=None)
    def explode() -> str:
        """Explode."""
        raise RuntimeError("boom")

    stub_model.script = Script([Answer("", (ToolCall.of("explode"),))])

    trace = await observed_async(run, team.member("Bomber", tools=[explode]))

    assert "boom" in str(trace.error)
    assert trace.tools[0].status.description == "Error running tool: boom"
    assert trace.named("Bomber.agent").status.status_code == "ERROR"


# ---------------------------------------------------------------------- what the program set up itself


@pytest.mark.parametrize("is_off_for_all", [True, False], ids=["for all runs", "for this run"])
async def test_tracing_that_is_switched_off_makes_no_difference(
    forecaster: Agent[Any], processor: Recording, is_off_for_all: bool
) -> None:
    agents.set_tracing_disabled(is_off_for_all)
    config = RunConfig(tracing_disabled=not is_off_for_all)

    trace = await observed_async(Runner.run, forecaster, "Oslo", run_config=config)

    assert trace.shape == TestOpenAIAgents().shape("forecaster", ["weather.tool"])
    assert trace.tools[0].attributes["tool.result"] == "rain in Oslo"
    assert processor.kinds == []


async def test_processors_of_the_program_are_told_the_same(forecaster: Agent[Any], processor: Recording) -> None:
    await run(forecaster)
    told_before = list(processor.kinds)
    processor.kinds.clear()

    await observed_async(run, forecaster)

    assert processor.kinds == told_before
    assert {"agent", "function", "generation"} <= set(told_before)
