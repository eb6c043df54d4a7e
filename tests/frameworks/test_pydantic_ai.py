"""Agents of PydanticAI: `agentlightning.instrumentation.pydantic_ai`."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from inspect import iscoroutinefunction
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

from agentlightning.adapter import TraceToMessages
from agentlightning.instrumentation import instrument_all, uninstrument_all
from agentlightning.instrumentation.pydantic_ai import PydanticAIPatch
from tests.frameworks.fresh_process import told_by
from tests.instrumentation.observing import Trace, observed, observed_async
from tests.stub_model.script import Answer, Failure, Request, Script, Turn
from tests.stub_model.server import StubModel
from tests.stub_model.words import ToolCall

CALL = ["openai.chat.completion"]
CALLS = r"openai\.(chat\.completion|responses)|anthropic\.messages"
SETTINGS: Any = {"extra_body": {"return_token_ids": True}}


def forecast(request: Request) -> Turn:
    """Looks up the city that was asked for, and says what it found."""
    if request.messages[-1].role == "tool":
        return f"I found {request.text}."
    return Answer("", (ToolCall.of("weather", city=request.text),))


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
        if city == "Atlantis":
            raise ModelRetry("no such city")
        if city == "Pompeii":
            raise RuntimeError("it erupts")
        return f"rain in {city}"

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


# ---------------------------------------------------------------------- an agent with a tool


def assert_is_forecast(
    trace: Trace, stub_model: StubModel, dialect: str = CALL[0], *, has_token_ids: bool = True
) -> None:
    """The whole trace of one run of the forecaster."""
    assert trace.result == "I found rain in Oslo."
    assert trace.shape == ["forecaster.agent [forecaster]", [dialect], ["weather.tool"], [dialect]]
    triplets = trace.triplets(llm_call_match=CALLS)
    assert [triplet.metadata["agent_name"] for triplet in triplets] == ["forecaster", "forecaster"]
    if not has_token_ids:
        return
    prompts = [tuple(triplet.prompt["token_ids"]) for triplet in triplets]
    assert prompts == [request.prompt_token_ids for request in stub_model.requests]
    assert all(triplet.response["token_ids"] for triplet in triplets)


WAYS = [run, run_sync, run_stream, run_stream_sync, run_stream_events, iterate]


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_run_is_one_tree(stub_model: StubModel, forecaster: Any, way: Callable[..., Any]) -> None:
    trace = asyncio.run(observed_async(way, forecaster)) if iscoroutinefunction(way) else observed(way, forecaster)

    assert_is_forecast(trace, stub_model)


@pytest.mark.parametrize("way", [run, run_stream])
@pytest.mark.parametrize("dialect", ["openai.responses", "anthropic.messages"])
async def test_other_models_are_seen_alike(stub_model: StubModel, dialect: str, way: Callable[..., Any]) -> None:
    stub_model.script = Script(forecast)
    agent = make_forecaster(model_of(stub_model, dialect))

    trace = await observed_async(way, agent)

    is_streamed_message = (dialect, way) == ("anthropic.messages", run_stream)  # has no place for token ids
    assert_is_forecast(trace, stub_model, dialect, has_token_ids=not is_streamed_message)


async def test_tool_says_what_it_was_asked_and_answered(forecaster: Agent[None, Any]) -> None:
    trace = await observed_async(run, forecaster)

    (tool,) = trace.tools
    assert tool.attributes == {
        "tool.name": "weather",
        "tool.call.type": "function",
        "tool.call.id": "call_1_0_0",
        "tool.parameters": '{"city": "Oslo"}',
        "tool.result": "rain in Oslo",
    }


async def test_parallel_tools_are_told_apart(stub_model: StubModel, forecaster: Agent[None, Any]) -> None:
    both = Answer("", (ToolCall.of("weather", city="Oslo"), ToolCall.of("weather", city="Rome")))
    stub_model.script = Script([both, "Done."])

    trace = await observed_async(run, forecaster)

    told = {tool.attributes["tool.call.id"]: tool.attributes["tool.result"] for tool in trace.tools}
    assert told == {"call_1_0_0": "rain in Oslo", "call_1_0_1": "rain in Rome"}
    assert trace.shape == ["forecaster.agent [forecaster]", CALL, ["weather.tool"], ["weather.tool"], CALL]


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
    cities = ("Atlantis", "Oslo")
    stub_model.script = Script([*(Answer("", (ToolCall.of("weather", city=city),)) for city in cities), "Done."])

    trace = await observed_async(run, forecaster)

    assert [tool.status.status_code for tool in trace.tools] == ["ERROR", "UNSET"]
    assert "no such city" in (trace.tools[0].status.description or "")
    assert trace.named("forecaster.agent").status.status_code == "UNSET"


async def test_tool_that_is_called_wrongly_is_marked(stub_model: StubModel, forecaster: Any) -> None:
    stub_model.script = Script([Answer("", (ToolCall.of("weather", town="Oslo"),)), "Done."])

    trace = await observed_async(run, forecaster)

    assert [tool.status.status_code for tool in trace.tools] == ["ERROR"]


async def test_tool_that_raises_ends_the_run(forecaster: Agent[None, Any]) -> None:
    trace = await observed_async(run, forecaster, "Pompeii")

    assert isinstance(trace.error, RuntimeError)
    assert trace.tools[0].status.description == "RuntimeError: it erupts"
    assert trace.named("forecaster.agent").status.description == "RuntimeError: it erupts"


async def test_tool_that_waits_for_approval_has_not_failed(stub_model: StubModel) -> None:
    agent = Agent(model_of(stub_model), name="clerk", output_type=[str, DeferredToolRequests])

    @agent.tool_plain
    def pay() -> str:
        raise ApprovalRequired

    stub_model.script = Script([Answer("", (ToolCall.of("pay"),))])

    trace = await observed_async(run, agent)

    assert isinstance(trace.result, DeferredToolRequests)
    assert trace.tools[0].status.status_code == "UNSET"


@pytest.mark.parametrize("way", [run, run_stream, iterate])
async def test_failing_model_reaches_the_program_unchanged(
    stub_model: StubModel, forecaster: Any, way: Callable[..., Any]
) -> None:
    stub_model.script = Script([Failure(500), Failure(500)])
    with pytest.raises(Exception, match="told to fail") as unobserved:
        await way(forecaster)

    trace = await observed_async(way, forecaster)

    assert type(trace.error) is unobserved.type
    assert trace.shape == ["forecaster.agent [forecaster]", CALL]
    assert [span.status.status_code for span in trace.spans] == ["ERROR", "ERROR"]


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


async def test_mistake_of_ours_does_not_reach_the_agent(
    forecaster: Agent[None, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("agentlightning.instrumentation.pydantic_ai.agent_step", None)
    monkeypatch.setattr("agentlightning.instrumentation.pydantic_ai.tool_step", None)

    trace = await observed_async(run, forecaster)

    assert trace.result == "I found rain in Oslo."
    assert caplog.text.count("A step of PydanticAI could not be recorded.") == 2


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


# ---------------------------------------------------------------------- at the same time


async def test_agents_at_the_same_time_keep_their_own_steps(stub_model: StubModel) -> None:
    stub_model.script = Script(forecast)
    members = [make_forecaster(model_of(stub_model), name) for name in ("north", "south")]

    async def both() -> Any:
        return await asyncio.gather(*(run(agent, str(agent.name)) for agent in members))

    trace = await observed_async(both)

    halves = [[f"{name}.agent [{name}]", CALL, ["weather.tool"], CALL] for name in ("north", "south")]
    assert trace.shape == ["virtual-root", *halves]
    for tool in trace.tools:
        assert trace.named(tool.attributes["tool.result"].split()[-1] + ".agent").span_id == tool.parent_id


async def test_traces_at_the_same_time_do_not_mix(stub_model: StubModel) -> None:
    stub_model.script = Script(forecast)
    members = [make_forecaster(model_of(stub_model), f"m{n}") for n in range(8)]

    traces = await asyncio.gather(*(observed_async(run_stream, agent, agent.name) for agent in members))

    for agent, trace in zip(members, traces, strict=True):
        assert trace.shape == [f"{agent.name}.agent [{agent.name}]", CALL, ["weather.tool"], CALL]


def test_threads_do_not_mix(stub_model: StubModel) -> None:
    stub_model.script = Script(forecast)

    def run_one(name: str) -> Trace:
        return observed(run_sync, make_forecaster(model_of(stub_model), name), name)

    with ThreadPoolExecutor(2) as pool:
        traces = list(pool.map(run_one, ("north", "south")))

    for name, trace in zip(("north", "south"), traces, strict=True):
        assert trace.shape == [f"{name}.agent [{name}]", CALL, ["weather.tool"], CALL]


# ---------------------------------------------------------------------- applying and undoing


def test_undone_patch_leaves_pydantic_ai_as_it_was() -> None:
    before = [dict(vars(owner)) for owner in (Agent, ToolManager)]

    with PydanticAIPatch() as patch:
        assert patch.is_applied
        assert [dict(vars(owner)) for owner in (Agent, ToolManager)] != before

    assert [dict(vars(owner)) for owner in (Agent, ToolManager)] == before


async def test_nothing_is_recorded_once_undone(forecaster: Agent[None, Any]) -> None:
    async def run_unpatched() -> Any:
        uninstrument_all()
        try:
            return await run(forecaster)
        finally:
            instrument_all()

    trace = await observed_async(run_unpatched)

    assert (trace.result, trace.spans) == ("I found rain in Oslo.", [])


def test_pydantic_ai_may_be_imported_later(stub_model: StubModel) -> None:
    stub_model.script = Script(forecast)
    program = """
        import json, sys
        from agentlightning.tracer import OtelTracer
        tracer = OtelTracer()
        tracer.init_worker(0)
        assert "pydantic_ai" not in sys.modules
        from tests.frameworks.test_pydantic_ai import make_forecaster, model_of, run_sync
        class Model: openai_url = sys.argv[1]
        with tracer._trace_context_sync():
            run_sync(make_forecaster(model_of(Model())))
        print(json.dumps(sorted(span.name for span in tracer.get_last_trace())))
    """

    names = told_by(program, stub_model.openai_url)

    assert names == ["forecaster.agent", *CALL, *CALL, "weather.tool"]
