"""Agents, teams and tools of AutoGen 0.7, run unmodified against the stub model."""

import asyncio
import importlib
import sys
from collections import Counter
from typing import Any

import pytest
from autogen_agentchat.agents import AssistantAgent, SocietyOfMindAgent
from autogen_agentchat.base import TaskResult
from autogen_agentchat.conditions import TextMentionTermination
from autogen_agentchat.messages import TextMessage
from autogen_agentchat.teams import RoundRobinGroupChat, SelectorGroupChat, Swarm
from autogen_agentchat.tools import AgentTool
from autogen_core import AgentId, CancellationToken, SingleThreadedAgentRuntime
from autogen_ext.models.openai import OpenAIChatCompletionClient as Client
from opentelemetry import trace as otel_trace

from agentlightning.adapter import Framework, detect_framework
from agentlightning.events import handovers
from agentlightning.instrumentation.frameworks.autogen import AutoGenPatch
from tests.frameworks.autogen_teams import (
    ASK_WEATHER,
    MCP_SERVER,
    TOOL_RUN,
    Poet,
    approve_second,
    called_by,
    client_of,
    pair,
    process_of,
    speaks_mcp,
    tasks_of,
    team_shape,
    weather,
    without_messages,
)
from tests.frameworks.autogen_teams import client as client
from tests.frameworks.autogen_teams import helper as helper
from tests.frameworks.contract import CALL, FrameworkContract
from tests.frameworks.fresh_process import told_by
from tests.instrumentation.traces import observed_async
from tests.stub_model.script import Answer, Failure, Script
from tests.stub_model.server import StubModel
from tests.stub_model.words import ToolCall, encode

RUNS_IN = ("openai2", "openai3", "lowest")


async def run(agent: AssistantAgent, task: str) -> Any:
    return (await agent.run(task=task)).messages[-1].content


async def run_streamed(agent: AssistantAgent, task: str) -> Any:
    return [item async for item in agent.run_stream(task=task)][-1].messages[-1].content


async def run_in_chunks(agent: AssistantAgent, task: str) -> Any:
    agent._model_client_stream = True
    return await run_streamed(agent, task)


async def ask_directly(agent: AssistantAgent, task: str) -> Any:
    asked = [TextMessage(content=task, source="user")]
    return (await agent.on_messages(asked, CancellationToken())).chat_message.content


def autogen_owners() -> list[Any]:
    """The modules and the classes of AutoGen."""
    modules = [module for name, module in sys.modules.items() if name.startswith("autogen_")]
    kinds = {kind for module in modules for kind in vars(module).values() if isinstance(kind, type)}
    return [*modules, *(kind for kind in kinds if kind.__module__.startswith("autogen_"))]


class TestAutoGen(FrameworkContract):
    package, patch, framework = "autogen_core", AutoGenPatch, Framework.AUTOGEN
    owners = autogen_owners()
    ways = (run, run_streamed, run_in_chunks, ask_directly)
    tool = "execute_tool weather"
    steps = ("as_json",)
    left_behind = ("execute_tool weather", "invoke_agent forecaster")

    def agent(self, model: StubModel, name: str) -> AssistantAgent:
        return AssistantAgent(name, client_of(model), tools=[weather], reflect_on_tool_use=True)

    def shape(self, name: str, *tools: Any) -> Any:
        return [*self.failed_shape(name), *tools, CALL]

    def failed_shape(self, name: str) -> Any:
        return [f"invoke_agent {name} [{name}]", CALL]


# ---------------------------------------------------------------------- one agent


async def test_reader_of_a_stream_is_not_beneath_the_agent(helper: AssistantAgent) -> None:
    async def run() -> None:
        async for message in helper.run_stream(task="Weather in Oslo?"):
            _span(f"read {type(message).__name__}")

    trace = await observed_async(run)

    read_spans = [span for span in trace.spans if span.name.startswith("read ")]
    assert len(read_spans) == 5
    assert {span.parent_id for span in read_spans} == {None}


async def test_reader_who_stops_early_is_not_left_beneath_the_agent(helper: AssistantAgent) -> None:
    async def run() -> None:
        stream = helper.run_stream(task="Weather in Oslo?")
        async for _message in stream:
            break
        _span("afterwards")
        await stream.aclose()

    trace = await observed_async(run)

    assert trace.named("afterwards").parent_id is None
    assert trace.named("invoke_agent helper").status.status_code == "UNSET"


def _span(name: str) -> None:
    otel_trace.get_tracer("test").start_span(name).end()


async def test_agents_made_during_the_trace_are_noted_and_make_no_call(client: Client) -> None:
    async def run() -> TaskResult:
        return await AssistantAgent("helper", client).run(task="Hello")

    trace = await observed_async(run)

    assert trace.shape == [
        "virtual-root",
        ["create_agent helper [helper]"],
        ["invoke_agent helper [helper]", ["openai.chat.completion"]],
    ]
    assert called_by(trace) == ["helper"]


# ---------------------------------------------------------------------- teams


@pytest.mark.claim(288, 337)
async def test_team_gives_four_calls_of_its_two_agents(client: Client, stub_model: StubModel) -> None:
    stub_model.script = Script(["Draft.", "Shorter.", "Done.", "APPROVE"])

    trace = await observed_async(pair(client).run, task="Write.")

    assert without_messages(trace.shape) == team_shape("primary", "critic", "primary", "critic")
    assert called_by(trace) == ["primary", "critic", "primary", "critic"]
    critic = trace.triplets(agent_match="^critic$")
    assert [triplet.response["token_ids"][:-1] for triplet in critic] == [encode("Shorter."), encode("APPROVE")]
    assert detect_framework(trace.spans) is Framework.AUTOGEN


async def test_all_messages_of_a_team_belong_to_its_run(client: Client, stub_model: StubModel) -> None:
    stub_model.script = Script(["Draft.", "APPROVE"])

    trace = await observed_async(pair(client).run, task="Write.")

    counts = Counter(span.name.split()[1] for span in trace.spans if span.name.startswith("autogen "))
    assert counts == {"create": 10, "send": 1, "publish": 9, "process": 11, "ack": 1}
    assert len({span.trace_id for span in trace.spans}) == 1
    assert [span.name for span in trace.spans if span.parent_id is None] == ["RoundRobinGroupChat.team"]


async def test_selector_makes_its_own_calls_under_the_name_of_the_manager(
    client: Client, stub_model: StubModel
) -> None:
    stub_model.script = Script(["second", "Draft.", "third", "APPROVE"])
    members: Any = [AssistantAgent(name, client) for name in ("first", "second", "third")]
    team = SelectorGroupChat(members, client, termination_condition=TextMentionTermination("APPROVE"))

    trace = await observed_async(team.run, task="Write.")

    manager = "SelectorGroupChatManager"
    assert called_by(trace) == [manager, "second", manager, "third"]
    assert without_messages(trace.shape)[1] == [process_of(manager), ["openai.chat.completion"]]


@pytest.mark.claim(335)
async def test_swarm_notes_who_hands_over_to_whom(client: Client, stub_model: StubModel) -> None:
    stub_model.script = Script([Answer("", (ToolCall.of("transfer_to_bob"),)), "APPROVE"])
    alice, bob = AssistantAgent("alice", client, handoffs=["bob"]), AssistantAgent("bob", client)
    team = Swarm([alice, bob], termination_condition=TextMentionTermination("APPROVE"))

    trace = await observed_async(team.run, task="Help.")

    assert without_messages(trace.shape)[1][1] == [
        "invoke_agent alice [alice]",
        ["openai.chat.completion"],
        ["execute_tool transfer_to_bob"],
        ["alice.handoff"],
    ]
    between = {"handoff.from_agent": "alice", "handoff.to_agent": "bob"}
    assert trace.named("alice.handoff").attributes == between
    assert called_by(trace) == ["alice", "bob"]
    assert [(handover.from_agent, handover.to_agent) for handover in handovers(trace.spans)] == [("alice", "bob")]


@pytest.mark.claim(335)
async def test_turns_of_a_team_tell_who_spoke_to_whom(client: Client, stub_model: StubModel) -> None:
    stub_model.script = Script(["draft", "no", "again", "APPROVE"])
    trace = await observed_async(pair(client).run, task="Write.")
    between = [(handover.from_agent, handover.to_agent) for handover in handovers(trace.spans)]
    assert between == [("primary", "critic"), ("critic", "primary"), ("primary", "critic")]


async def test_agent_as_a_tool_works_beneath_the_tool(client: Client, stub_model: StubModel) -> None:
    stub_model.script = Script([Answer("", (ToolCall.of("writer", task="A poem."),)), "Roses.", "Here it is."])
    writer = AgentTool(AssistantAgent("writer", client), return_value_as_last_message=True)
    boss = AssistantAgent("boss", client, tools=[writer], reflect_on_tool_use=True)

    trace = await observed_async(boss.run, task="A poem, please.")

    assert trace.shape == [
        "invoke_agent boss [boss]",
        ["openai.chat.completion"],
        ["execute_tool writer", ["invoke_agent writer [writer]", ["openai.chat.completion"]]],
        ["openai.chat.completion"],
    ]
    assert called_by(trace) == ["boss", "writer", "boss"]
    assert trace.tools[0].attributes["tool.result"] == "Roses."


async def test_society_of_mind_answers_in_its_own_name_and_is_reset(client: Client, stub_model: StubModel) -> None:
    stub_model.script = Script(["Draft.", "APPROVE", "We agree.", "Draft.", "APPROVE", "We agree."])
    society = SocietyOfMindAgent("society", pair(client), client)

    trace = await observed_async(society.run, task="Discuss.")
    again = await observed_async(society.run, task="Discuss again.")

    assert called_by(trace) == called_by(again) == ["primary", "critic", "society"]
    assert again.result.messages[-1].content == "We agree."


# ---------------------------------------------------------------------- errors


async def test_failing_model_marks_the_team(client: Client, stub_model: StubModel) -> None:
    stub_model.script = Script(["Draft.", Failure(400, "no such thing")])

    trace = await observed_async(pair(client).run, task="Write.")

    assert isinstance(trace.error, RuntimeError)
    assert trace.named("RoundRobinGroupChat.team").status.status_code == "ERROR"
    assert trace.named("invoke_agent critic").status.status_code == "ERROR"
    assert trace.named("invoke_agent primary").status.status_code == "UNSET"


# ---------------------------------------------------------------------- runtimes and MCP


async def test_agent_of_the_core_api_is_named_by_its_type(client: Client) -> None:
    runtime = SingleThreadedAgentRuntime()
    await Poet.register(runtime, "poet", lambda: Poet(client))

    async def run() -> Any:
        runtime.start()
        answer = await runtime.send_message(TextMessage(content="Roses", source="user"), AgentId("poet", "default"))
        await runtime.stop_when_idle()
        return answer

    trace = await observed_async(run)

    assert trace.result.content == "Roses"
    assert called_by(trace) == ["poet"]


async def test_traces_that_share_a_runtime_keep_their_spans_apart(client: Client, stub_model: StubModel) -> None:
    stub_model.script = Script(approve_second)
    runtime = SingleThreadedAgentRuntime()
    runtime.start()
    first, second = pair(client, runtime=runtime), pair(client, runtime=runtime)

    traces = await asyncio.gather(observed_async(first.run, task="one"), observed_async(second.run, task="two"))
    await runtime.stop_when_idle()

    assert [tasks_of(trace) for trace in traces] == [{"one"}, {"two"}]
    assert [without_messages(trace.shape) for trace in traces] == [team_shape("primary", "critic")] * 2


async def test_team_within_a_team_is_beneath_it(client: Client, stub_model: StubModel) -> None:
    stub_model.script = Script(["Draft.", "APPROVE", "DONE"])
    runtime = SingleThreadedAgentRuntime()
    runtime.start()
    members: Any = [pair(client, runtime=runtime, name="inner"), AssistantAgent("boss", client)]
    outer = RoundRobinGroupChat(members, name="outer", runtime=runtime, max_turns=2)

    trace = await observed_async(outer.run, task="Write.")
    await runtime.stop_when_idle()

    within = [process_of("inner"), team_shape("primary", "critic", team="inner")]
    assert without_messages(trace.shape) == [*team_shape(team="outer"), within, *team_shape("boss")[1:]]
    assert called_by(trace) == ["primary", "critic", "boss"]


@pytest.mark.skipif(not speaks_mcp(), reason="AutoGen 0.7 needs mcp below 2")
async def test_tool_of_an_mcp_server_is_a_tool(client: Client, stub_model: StubModel) -> None:
    mcp = importlib.import_module("autogen_ext.tools.mcp")
    stub_model.script = Script([ASK_WEATHER])
    server = mcp.StdioServerParams(command=sys.executable, args=["-c", MCP_SERVER])
    async with mcp.McpWorkbench(server) as workbench:
        agent = AssistantAgent("helper", client, workbench=workbench)

        trace = await observed_async(agent.run, task="Weather in Oslo?")

    assert trace.shape == TOOL_RUN
    assert trace.tools[0].attributes["tool.parameters"] == '{"city":"Oslo"}'
    assert trace.tools[0].attributes["tool.result"] == "rain in Oslo"
    assert called_by(trace) == ["helper"]


# ---------------------------------------------------------------------- applying and undoing


PROGRAM = """
    import asyncio, json, sys
    from tests.instrumentation.traces import observed_async
    from tests.stub_model.script import Script
    from tests.stub_model.server import running

    def made():
        from tests.frameworks.autogen_teams import client_of, pair
        return pair(client_of(model))

    async def main(is_early):
        team = made() if is_early else None
        assert is_early == ("autogen_core" in sys.modules)
        trace = await observed_async(lambda: (team or made()).run(task="Write."))
        roots = [span.name for span in trace.spans if span.parent_id is None and "create_agent" not in span.name]
        print(json.dumps([roots, [triplet.metadata["agent_name"] for triplet in trace.triplets()]]))

    with running(Script(["Draft.", "APPROVE"])) as model:
        asyncio.run(main(sys.argv[1] == "early"))
"""


@pytest.mark.parametrize("when", ["early", "late"])
def test_team_may_be_made_before_the_provider_or_imported_after_the_patch(when: str) -> None:
    assert told_by(PROGRAM, when) == [["RoundRobinGroupChat.team"], ["primary", "critic"]]
