"""Agents of the OpenAI Agents SDK: `agentlightning.instrumentation.openai_agents`."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
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

from agentlightning.emitter import emit_reward
from agentlightning.instrumentation.openai_agents import OpenAIAgentsPatch
from tests.frameworks.fresh_process import told_by
from tests.instrumentation.observing import Trace, observed, observed_async
from tests.stub_model.script import Answer, Failure, Request, Script, Turn
from tests.stub_model.server import StubModel
from tests.stub_model.words import ToolCall

CALLS = r"openai\.(chat\.completion|responses)"
MODELS = {"openai.chat.completion": OpenAIChatCompletionsModel, "openai.responses": OpenAIResponsesModel}
WITH_TOKEN_IDS = ModelSettings(extra_body={"return_token_ids": True})


@function_tool
def weather(city: str) -> str:
    """The weather of a city."""
    if city == "Atlantis":
        raise LookupError("no such city")
    return f"rain in {city}"


def forecast(request: Request) -> Turn:
    """Looks up the city that was asked for, and says what it found."""
    if request.messages[-1].role == "tool":
        return f"I found {request.text}."
    return Answer("", (ToolCall.of("weather", city=request.text),))


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


@pytest.fixture
def forecaster(stub_model: StubModel, team: Team) -> Agent[Any]:
    stub_model.script = Script(forecast)
    return team.member("Forecaster", instructions="Be brief.", tools=[weather])


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


# ---------------------------------------------------------------------- an agent with a tool


def assert_is_forecast(trace: Trace, stub_model: StubModel, dialect: str = "openai.chat.completion") -> None:
    """The whole trace of one run of the forecaster, token ids included."""
    assert trace.result == "I found rain in Oslo."
    assert trace.shape == ["Forecaster.agent [Forecaster]", [dialect], ["weather.tool"], [dialect]]
    triplets = trace.triplets(llm_call_match=CALLS)
    assert [triplet.metadata["agent_name"] for triplet in triplets] == ["Forecaster", "Forecaster"]
    prompts = [tuple(triplet.prompt["token_ids"]) for triplet in triplets]
    assert prompts == [request.prompt_token_ids for request in stub_model.requests]
    first = prompts[0] + tuple(triplets[0].response["token_ids"])
    assert prompts[1][: len(first)] == first
    assert len(triplets[1].response["token_ids"]) > 0


@pytest.mark.parametrize("dialect", MODELS)
@pytest.mark.parametrize("how", [run, run_streamed])
async def test_run_is_one_tree(stub_model: StubModel, dialect: str, how: Callable[..., Awaitable[Any]]) -> None:
    stub_model.script = Script(forecast)
    agent = Team(stub_model, dialect).member("Forecaster", instructions="Be brief.", tools=[weather])

    trace = await observed_async(how, agent)

    assert_is_forecast(trace, stub_model, dialect)


def test_run_sync_is_one_tree(stub_model: StubModel, forecaster: Agent[Any]) -> None:
    trace = observed(run_sync, forecaster)

    assert_is_forecast(trace, stub_model)


async def test_tool_says_what_it_was_asked_and_answered(forecaster: Agent[Any]) -> None:
    trace = await observed_async(run, forecaster)

    (tool,) = trace.tools
    assert tool.attributes == {
        "tool.name": "weather",
        "tool.call.type": "function",
        "tool.call.id": "call_1_0_0",
        "tool.parameters": '{"city": "Oslo"}',
        "tool.result": "rain in Oslo",
    }


async def test_sensitive_data_stay_out_of_tools_where_the_program_wants_it(forecaster: Agent[Any]) -> None:
    config = RunConfig(trace_include_sensitive_data=False)

    trace = await observed_async(Runner.run, forecaster, "Oslo", run_config=config)

    assert trace.tools[0].attributes.keys() == {"tool.name", "tool.call.type", "tool.call.id"}


async def test_parallel_tools_are_told_apart(stub_model: StubModel, forecaster: Agent[Any]) -> None:
    both = Answer("", (ToolCall.of("weather", city="Oslo"), ToolCall.of("weather", city="Rome")))
    stub_model.script = Script([both, "Done."])

    trace = await observed_async(run, forecaster)

    told = {tool.attributes["tool.call.id"]: tool.attributes["tool.result"] for tool in trace.tools}
    assert told == {"call_1_0_0": "rain in Oslo", "call_1_0_1": "rain in Rome"}
    assert {tool.parent_id for tool in trace.tools} == {trace.named("Forecaster.agent").span_id}


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


async def test_failing_tool_is_marked_and_the_agent_goes_on(forecaster: Agent[Any]) -> None:
    trace = await observed_async(run, forecaster, "Atlantis")

    assert trace.error is None
    (tool,) = trace.tools
    assert tool.status.status_code == "ERROR"
    assert trace.named("Forecaster.agent").status.status_code == "UNSET"


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


@pytest.mark.parametrize("how", [run, run_streamed])
async def test_failing_model_reaches_the_program_unchanged(
    stub_model: StubModel, team: Team, how: Callable[..., Awaitable[Any]]
) -> None:
    agent = team.member("Forecaster")
    stub_model.script = Script([Failure(500), Failure(500)])
    with pytest.raises(Exception, match="told to fail") as unobserved:
        await how(agent)

    trace = await observed_async(how, agent)

    assert type(trace.error) is unobserved.type
    assert trace.shape == ["Forecaster.agent [Forecaster]", ["openai.chat.completion"]]
    assert [span.status.status_code for span in trace.spans] == ["ERROR", "ERROR"]


async def test_mistake_of_ours_does_not_reach_the_agent(
    forecaster: Agent[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("agentlightning.instrumentation.openai_agents.agent_step", None)

    trace = await observed_async(run, forecaster)

    assert trace.result == "I found rain in Oslo."
    assert "A step of OpenAI Agents SDK could not be recorded." in caplog.text


# ---------------------------------------------------------------------- what the program set up itself


async def test_tracing_that_is_switched_off_makes_no_difference(
    stub_model: StubModel, forecaster: Agent[Any], processor: Recording
) -> None:
    agents.set_tracing_disabled(True)

    trace = await observed_async(run, forecaster)

    assert_is_forecast(trace, stub_model)
    assert trace.tools[0].attributes["tool.result"] == "rain in Oslo"
    assert processor.kinds == []


async def test_tracing_that_is_switched_off_for_a_run_makes_no_difference(forecaster: Agent[Any]) -> None:
    config = RunConfig(tracing_disabled=True)

    trace = await observed_async(Runner.run, forecaster, "Atlantis", run_config=config)

    call = ["openai.chat.completion"]
    assert trace.shape == ["Forecaster.agent [Forecaster]", call, ["weather.tool"], call]
    assert trace.tools[0].status.status_code == "ERROR"


async def test_processors_of_the_program_are_told_the_same(forecaster: Agent[Any], processor: Recording) -> None:
    await run(forecaster)
    told_before = list(processor.kinds)
    processor.kinds.clear()

    await observed_async(run, forecaster)

    assert processor.kinds == told_before
    assert {"agent", "function", "generation"} <= set(told_before)


# ---------------------------------------------------------------------- at the same time


async def test_agents_at_the_same_time_keep_their_own_steps(stub_model: StubModel, team: Team) -> None:
    stub_model.script = Script(forecast)
    members = [team.member(name, tools=[weather]) for name in ("North", "South")]

    async def both() -> Any:
        return await asyncio.gather(*(run(agent, agent.name) for agent in members))

    trace = await observed_async(both)

    call = ["openai.chat.completion"]
    halves = [[f"{name}.agent [{name}]", call, ["weather.tool"], call] for name in ("North", "South")]
    assert trace.shape == ["virtual-root", *halves]
    for tool in trace.tools:
        assert trace.named(tool.attributes["tool.result"].split()[-1] + ".agent").span_id == tool.parent_id


async def test_traces_at_the_same_time_do_not_mix(stub_model: StubModel, team: Team) -> None:
    stub_model.script = Script(forecast)
    members = [team.member(f"M{n}", tools=[weather]) for n in range(8)]

    traces = await asyncio.gather(*(observed_async(run, agent, agent.name) for agent in members))

    call = ["openai.chat.completion"]
    for agent, trace in zip(members, traces, strict=True):
        assert trace.shape == [f"{agent.name}.agent [{agent.name}]", call, ["weather.tool"], call]


def test_threads_do_not_mix(stub_model: StubModel) -> None:
    stub_model.script = Script(forecast)

    def run_one(name: str) -> Trace:
        return observed(run_sync, Team(stub_model).member(name, tools=[weather]), name)

    with ThreadPoolExecutor(2) as pool:
        traces = list(pool.map(run_one, ("North", "South")))

    call = ["openai.chat.completion"]
    for name, trace in zip(("North", "South"), traces, strict=True):
        assert trace.shape == [f"{name}.agent [{name}]", call, ["weather.tool"], call]


# ---------------------------------------------------------------------- applying and undoing


async def test_undone_patch_leaves_the_sdk_as_it_was(forecaster: Agent[Any]) -> None:
    owners = (SpanImpl, NoOpSpan, agents.tool_context.ToolContext)
    before = [dict(vars(owner)) for owner in owners]

    with OpenAIAgentsPatch() as patch:
        assert patch.is_applied
        assert [dict(vars(owner)) for owner in owners] != before

    assert [dict(vars(owner)) for owner in owners] == before


async def test_nothing_is_recorded_once_undone(forecaster: Agent[Any]) -> None:
    with OpenAIAgentsPatch():
        pass

    trace = await observed_async(_uninstrumented, forecaster)

    assert [span.name for span in trace.spans] == []


async def _uninstrumented(agent: Agent[Any]) -> Any:
    from agentlightning.instrumentation import instrument_all, uninstrument_all

    uninstrument_all()
    try:
        return await run(agent)
    finally:
        instrument_all()


def test_sdk_may_be_imported_later(stub_model: StubModel) -> None:
    stub_model.script = Script(forecast)
    program = """
        import json, sys
        from agentlightning.tracer import OtelTracer
        from agentlightning.adapter import TraceTree
        tracer = OtelTracer()
        tracer.init_worker(0)
        assert "agents" not in sys.modules
        from tests.frameworks.test_openai_agents import Team, run_sync, weather
        import agents
        agents.set_tracing_disabled(True)
        class Model: openai_url = sys.argv[1]
        with tracer._trace_context_sync():
            run_sync(Team(Model()).member("Late", tools=[weather]))
        spans = tracer.get_last_trace()
        print(json.dumps(sorted(span.name for span in spans)))
    """

    names = told_by(program, stub_model.openai_url)

    assert names == ["Late.agent", "openai.chat.completion", "openai.chat.completion", "weather.tool"]
