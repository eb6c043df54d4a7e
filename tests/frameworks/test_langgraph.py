"""Graphs and agents of LangGraph: `agentlightning.instrumentation.frameworks.langchain`."""

import functools
import operator
from collections.abc import Iterator
from typing import Annotated, Any

import openai
import pytest
from langchain.agents import create_agent
from langchain_core.callbacks import AsyncCallbackManager, AsyncCallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, BaseLLM
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.runnables import RunnableConfig, config
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.func import entrypoint, task
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from langgraph.types import Command, Send, interrupt
from opentelemetry import trace as trace_api
from typing_extensions import TypedDict

from agentlightning.adapter import Framework
from agentlightning.emitter import emit_reward
from agentlightning.instrumentation.frameworks.langchain import LangChainPatch
from tests.frameworks.contract import FrameworkContract, forecast, trace_of
from tests.frameworks.langchain_agents import (
    CALL,
    agents_of,
    ask_without_langchain,
    assert_ids_are_those_of,
    chat,
    question,
    weather,
)
from tests.instrumentation.traces import Trace, observed, observed_async
from tests.stub_model.script import Answer, Failure, Request, Script, Turn
from tests.stub_model.server import StubModel
from tests.stub_model.words import ToolCall

RUNS_IN = ("openai2", "openai3", "lowest")

# ---------------------------------------------------------------------- a graph that asks a database


@tool
def get_schema(table: str) -> str:
    """The columns of a table."""
    return f"{table}(name, city)"


@tool
def query(sql: str) -> str:
    """The rows that a query finds."""
    return "Ada, Oslo"


def sql_turn(request: Request) -> Turn:
    """What comes next follows from what was said last."""
    turns: dict[str, Turn] = {
        "Oslo": Answer("", (ToolCall.of("get_schema", table="people"),)),
        "people(name, city)": Answer("", (ToolCall.of("query", sql="select name form people"),)),
        "select name form people": Answer("", (ToolCall.of("query", sql="select name from people"),)),
        "Ada, Oslo": "Ada lives in Oslo.",
    }
    return turns.get(request.text, Failure(400, f"nobody says {request.text}"))


def sql_graph(stub_model: StubModel) -> Any:
    """As the documentation writes one: nodes that call the model, and nodes that run tools."""
    stub_model.script = Script(sql_turn)
    llm = chat(stub_model)

    def call_get_schema(state: MessagesState) -> Any:
        return {"messages": [llm.bind_tools([get_schema], tool_choice="any").invoke(state["messages"])]}

    def generate_query(state: MessagesState) -> Any:
        return {"messages": [llm.bind_tools([query]).invoke(state["messages"])]}

    def check_query(state: MessagesState) -> Any:
        asked = state["messages"][-1]
        checked = llm.bind_tools([query], tool_choice="any").invoke([("user", asked.tool_calls[0]["args"]["sql"])])
        return {"messages": [AIMessage(id=asked.id, content="", tool_calls=checked.tool_calls)]}

    def should_continue(state: MessagesState) -> str:
        return "check_query" if state["messages"][-1].tool_calls else END

    builder = StateGraph(MessagesState)
    for node in (call_get_schema, generate_query, check_query):
        builder.add_node(node)
    builder.add_node("get_schema", ToolNode([get_schema]))
    builder.add_node("run_query", ToolNode([query]))
    builder.add_edge(START, "call_get_schema")
    builder.add_edge("call_get_schema", "get_schema")
    builder.add_edge("get_schema", "generate_query")
    builder.add_conditional_edges("generate_query", should_continue, ["check_query", END])
    builder.add_edge("check_query", "run_query")
    builder.add_edge("run_query", "generate_query")
    return builder.compile()


def node(name: str, *beneath: Any) -> list[Any]:
    """A node of a graph that gives its name to the calls beneath it."""
    return [f"{name}.chain [{name}]", *beneath]


def streamed(graph: Any, *args: Any, **options: Any) -> Any:
    return list(graph.stream(*args, **options))


async def streamed_async(graph: Any, *args: Any, **options: Any) -> Any:
    return [part async for part in graph.astream(*args, **options)]


def assert_is_sql_run(trace: Trace, stub_model: StubModel) -> None:
    assert trace.error is None
    assert trace.shape == [
        "LangGraph.chain",
        node("call_get_schema", CALL),
        node("get_schema", ["tool.tool"]),
        node("generate_query", CALL),
        node("check_query", CALL),
        node("run_query", ["tool.tool"]),
        node("generate_query", CALL),
    ]
    assert agents_of(trace) == ["call_get_schema", "generate_query", "check_query", "generate_query"]
    assert_ids_are_those_of(trace, stub_model)


def test_graph_is_one_tree(stub_model: StubModel) -> None:
    trace = observed(sql_graph(stub_model).invoke, question())
    assert_is_sql_run(trace, stub_model)
    assert len(trace.triplets(agent_match="generate|check")) == 3
    assert [span.attributes["tool.name"] for span in trace.tools] == ["get_schema", "query"]


@pytest.mark.parametrize("mode", ["updates", "messages"])
@pytest.mark.parametrize("way", [streamed, streamed_async])
def test_streamed_graph_is_one_tree(stub_model: StubModel, way: Any, mode: str) -> None:
    trace = trace_of(functools.partial(way, stream_mode=mode), sql_graph(stub_model), question())
    assert_is_sql_run(trace, stub_model)


async def test_events_of_a_graph_can_be_read(stub_model: StubModel) -> None:
    async def read() -> list[str]:
        return [event["event"] async for event in sql_graph(stub_model).astream_events(question(), version="v2")]

    trace = await observed_async(read)

    assert "on_chat_model_stream" in trace.result
    assert_is_sql_run(trace, stub_model)


# ---------------------------------------------------------------------- agents


def run(agent: Any, city: str) -> Any:
    return agent.invoke(question(city))["messages"][-1].content


async def run_async(agent: Any, city: str) -> Any:
    return (await agent.ainvoke(question(city)))["messages"][-1].content


def run_streamed(agent: Any, city: str) -> Any:
    return streamed(agent, question(city))[-1]["model"]["messages"][-1].content


async def run_streamed_async(agent: Any, city: str) -> Any:
    return (await streamed_async(agent, question(city)))[-1]["model"]["messages"][-1].content


class TestLangGraph(FrameworkContract):
    package, patch, framework = "langgraph", LangChainPatch, Framework.LANGCHAIN
    owners = (BaseChatModel, BaseLLM, AsyncCallbackManager, AsyncCallbackManagerForLLMRun, config)
    module, steps = "agentlightning.instrumentation.frameworks.langchain", ("Step",)
    ways = (run, run_async, run_streamed, run_streamed_async)
    tool, tool_error = "tool.tool", LookupError

    def agent(self, model: StubModel, name: str) -> Any:
        return create_agent(chat(model), [weather], name=name)

    def shape(self, name: str, *tools: Any) -> Any:
        return [*self.failed_shape(name), *(["tools.chain", tool] for tool in tools), ["model.chain", CALL]]

    def failed_shape(self, name: str) -> Any:
        return [f"{name}.chain [{name}]", ["model.chain", CALL]]


def test_agent_without_a_name_is_called_by_its_nodes(stub_model: StubModel) -> None:
    stub_model.script = Script(forecast)

    trace = observed(create_agent(chat(stub_model), [weather]).invoke, question())

    assert trace.shape == [
        "LangGraph.chain",
        node("model", CALL),
        node("tools", ["tool.tool"]),
        node("model", CALL),
    ]


def test_agent_as_a_tool_works_beneath_that_tool(stub_model: StubModel) -> None:
    poet = create_agent(chat(stub_model), name="poet")

    @tool
    def write(about: str) -> str:
        """Write a poem."""
        return str(poet.invoke(question(about))["messages"][-1].content)

    stub_model.script = Script([Answer("", (ToolCall.of("write", about="sea"),)), "Waves.", "Printed."])

    trace = observed(create_agent(chat(stub_model), [write], name="editor").invoke, question())

    assert trace.shape == [
        "editor.chain [editor]",
        ["model.chain", CALL],
        ["tools.chain", ["tool.tool", ["poet.chain [poet]", ["model.chain", CALL]]]],
        ["model.chain", CALL],
    ]
    assert agents_of(trace) == ["editor", "poet", "editor"]


def test_graph_within_the_tool_of_an_agent_names_its_own_nodes(stub_model: StubModel) -> None:
    def think(state: MessagesState) -> Any:
        return {"messages": [chat(stub_model).invoke(state["messages"])]}

    inner = StateGraph(MessagesState).add_node(think).add_edge(START, "think").compile()

    @tool
    def ponder() -> str:
        """Think."""
        return str(inner.invoke(question())["messages"][-1].content)

    stub_model.script = Script([Answer("", (ToolCall.of("ponder"),)), "Hm.", "Done."])

    trace = observed(create_agent(chat(stub_model), [ponder], name="editor").invoke, question())

    assert agents_of(trace) == ["editor", "think", "editor"]


# ---------------------------------------------------------------------- what graphs are made of


class Notes(TypedDict):
    notes: Annotated[list[str], operator.add]


async def raw_answer_async(stub_model: StubModel, text: str) -> str:
    headers = {"Connection": "close"}
    async with openai.AsyncOpenAI(base_url=stub_model.openai_url, api_key="any", default_headers=headers) as client:
        told = await client.chat.completions.create(model="stub-model", messages=[{"role": "user", "content": text}])
    return str(told.choices[0].message.content)


def fan(stub_model: StubModel) -> Any:
    """Two nodes at the same time, then a third; none of them uses a model of LangChain alone."""

    def left(state: Notes) -> Any:
        chat(stub_model).invoke("left")
        return {"notes": [ask_without_langchain(stub_model, "left")]}

    def right(state: Notes) -> Any:
        return {"notes": [ask_without_langchain(stub_model, "right")]}

    def judge(state: Notes) -> Any:
        emit_reward(1.0)
        return {"notes": [ask_without_langchain(stub_model, "judge")]}

    builder = StateGraph(Notes).add_node(left).add_node(right).add_node(judge)
    builder.add_edge(START, "left").add_edge(START, "right").add_edge(["left", "right"], "judge")
    return builder.compile()


RAW_CALL = ["openai.chat.completion"]


def sorted_children(trace: Trace) -> list[Any]:
    """The children of the root, in an order that does not depend on threads."""
    return sorted(trace.shape[1:])


def test_calls_without_langchain_lie_beneath_their_node(stub_model: StubModel) -> None:
    trace = observed(fan(stub_model).invoke, {"notes": []})

    assert sorted(trace.result["notes"]) == ["judge", "left", "right"]
    assert sorted_children(trace) == [
        node("judge", ["agentlightning.reward"], RAW_CALL),
        node("left", CALL, RAW_CALL),
        node("right", RAW_CALL),
    ]


async def test_asynchronous_calls_without_langchain_lie_beneath_their_node(stub_model: StubModel) -> None:
    async def left(state: Notes) -> Any:
        await chat(stub_model).ainvoke("left")
        return {"notes": [await raw_answer_async(stub_model, "left")]}

    async def right(state: Notes) -> Any:
        return {"notes": [await raw_answer_async(stub_model, "right")]}

    builder = StateGraph(Notes).add_node(left).add_node(right).add_edge(START, "left").add_edge(START, "right")

    trace = await observed_async(builder.compile().ainvoke, {"notes": []})

    assert sorted_children(trace) == [node("left", CALL, RAW_CALL), node("right", RAW_CALL)]


def test_span_of_the_program_stays_between_node_and_call(stub_model: StubModel) -> None:
    def think(state: MessagesState) -> Any:
        with trace_api.get_tracer(__name__).start_as_current_span("careful"):
            return {"messages": [chat(stub_model).invoke(state["messages"])]}

    graph = StateGraph(MessagesState).add_node(think).add_edge(START, "think").compile()

    trace = observed(graph.invoke, question())

    assert trace.shape == ["LangGraph.chain", node("think", ["careful", CALL])]


def test_sub_graph_works_beneath_its_node(stub_model: StubModel) -> None:
    def think(state: MessagesState) -> Any:
        return {"messages": [chat(stub_model).invoke(state["messages"])]}

    inner = StateGraph(MessagesState).add_node(think).add_edge(START, "think").compile()
    outer = StateGraph(MessagesState).add_node("team", inner).add_node("last", think)
    outer.add_edge(START, "team").add_edge("team", "last")

    trace = observed(outer.compile(name="company").invoke, question())

    assert trace.shape == ["company.chain [company]", node("team", node("think", CALL)), node("last", CALL)]


def test_agents_that_are_nodes_give_their_names(stub_model: StubModel) -> None:
    stub_model.script = Script(forecast)
    agent = create_agent(chat(stub_model), [weather], name="forecaster")
    outer = StateGraph(MessagesState).add_node("weather_desk", agent).add_edge(START, "weather_desk")

    trace = observed(outer.compile().invoke, question())

    work = [["model.chain", CALL], ["tools.chain", ["tool.tool"]], ["model.chain", CALL]]
    assert trace.shape == ["LangGraph.chain", node("weather_desk", node("forecaster", *work))]
    assert agents_of(trace) == ["forecaster", "forecaster"]


def test_nodes_that_are_sent_to_are_told_apart(stub_model: StubModel) -> None:
    def work(state: Notes) -> Any:
        return {"notes": [str(chat(stub_model).invoke(state["notes"][0]).content)]}

    builder = StateGraph(Notes).add_node(work)
    builder.add_conditional_edges(START, lambda _: [Send("work", {"notes": [text]}) for text in "abc"], ["work"])

    trace = observed(builder.compile().invoke, {"notes": []})

    assert trace.result["notes"] == ["a", "b", "c"]
    assert trace.shape == ["LangGraph.chain", *[node("work", CALL)] * 3]


def test_command_to_the_parent_is_no_failure(stub_model: StubModel) -> None:
    def hand_over(state: MessagesState) -> Any:
        return Command(goto="next", graph=Command.PARENT)

    def next_agent(state: MessagesState) -> Any:
        return {"messages": [chat(stub_model).invoke("hi")]}

    inner = StateGraph(MessagesState).add_node(hand_over).add_edge(START, "hand_over").compile()
    outer = StateGraph(MessagesState).add_node("first", inner, destinations=("next",)).add_node("next", next_agent)

    trace = observed(outer.add_edge(START, "first").compile().invoke, question())

    assert trace.shape == ["LangGraph.chain", node("first", node("hand_over")), node("next", CALL)]
    assert {span.status.status_code for span in trace.spans} == {"UNSET"}


def test_interrupt_is_no_failure_and_work_goes_on(stub_model: StubModel) -> None:
    def ask(state: MessagesState) -> Any:
        return {"messages": [chat(stub_model).invoke(str(interrupt("Which city?")))]}

    graph = StateGraph(MessagesState).add_node(ask).add_edge(START, "ask").compile(checkpointer=InMemorySaver())
    thread: RunnableConfig = {"configurable": {"thread_id": "1"}}

    def work() -> None:
        graph.invoke(question(), thread)
        graph.invoke(Command(resume="Oslo"), thread)

    trace = observed(work)

    assert trace.shape == ["virtual-root", ["LangGraph.chain", node("ask")], ["LangGraph.chain", node("ask", CALL)]]
    assert {span.status.status_code for span in trace.spans} == {"UNSET"}


def test_tasks_of_a_workflow_are_nodes(stub_model: StubModel) -> None:
    @task
    def write(about: str) -> str:
        return str(chat(stub_model).invoke(about).content)

    @entrypoint()
    def workflow(about: str) -> list[str]:
        both = [write(about), write("again")]
        return [one.result() for one in both]

    trace = observed(workflow.invoke, "sea")

    assert trace.result == ["sea", "again"]
    assert trace.shape == ["LangGraph.chain", node("workflow", node("write", CALL), node("write", CALL))]


def test_reader_of_a_graph_does_not_work_beneath_it(stub_model: StubModel) -> None:
    def read() -> None:
        parts: Iterator[Any] = fan(stub_model).stream({"notes": []}, stream_mode="values")
        for _ in parts:
            ask_without_langchain(stub_model, "between")

    trace = observed(read)

    graphs = [shape for shape in trace.shape[1:] if shape[0] == "LangGraph.chain"]
    assert len(graphs) == 1
    assert [shape for shape in trace.shape[1:] if shape not in graphs] == [RAW_CALL] * 3


async def test_reader_of_an_asynchronous_graph_does_not_work_beneath_it(stub_model: StubModel) -> None:
    async def think(state: MessagesState) -> Any:
        return {"messages": [await chat(stub_model).ainvoke("hi")]}

    graph = StateGraph(MessagesState).add_node(think).add_edge(START, "think").compile()

    async def read() -> None:
        async for _ in graph.astream(question()):
            ask_without_langchain(stub_model, "between")
        ask_without_langchain(stub_model, "after")

    trace = await observed_async(read)

    assert trace.shape == ["virtual-root", ["LangGraph.chain", node("think", CALL)], RAW_CALL, RAW_CALL]


# ---------------------------------------------------------------------- failures


def test_failing_tool_that_the_graph_handles_is_marked(stub_model: StubModel) -> None:
    stub_model.script = Script(forecast)
    tools = ToolNode([weather], handle_tool_errors=True)
    call = AIMessage("", tool_calls=[{"name": "weather", "args": {"city": "Atlantis"}, "id": "c1"}])
    graph = StateGraph(MessagesState).add_node("tools", tools).add_edge(START, "tools").compile()

    trace = observed(graph.invoke, {"messages": [call]})

    assert isinstance(trace.result["messages"][-1], ToolMessage)
    assert trace.shape == ["LangGraph.chain", node("tools", ["tool.tool"])]
    assert trace.tools[0].status.status_code == "ERROR"
    assert trace.named("tools.chain").status.status_code == "UNSET"
