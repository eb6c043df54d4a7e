"""Agents and chains of the first LangChain, which live on in langchain-classic: `instrumentation.langchain`."""

import warnings
from typing import Any

import pytest
from langchain_core.callbacks import AsyncCallbackManager
from langchain_core.language_models import BaseChatModel, BaseLLM
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.runnables import config
from langchain_core.tools import Tool

from agentlightning.adapter import Framework
from agentlightning.instrumentation.frameworks.langchain import LangChainPatch
from tests.frameworks.contract import FrameworkContract
from tests.frameworks.langchain_agents import CALL, agents_of, assert_ids_are_those_of, chat, weather
from tests.instrumentation.traces import Trace, observed
from tests.stub_model.script import Request, Script, Turn
from tests.stub_model.server import StubModel

RUNS_IN = ("openai2", "openai3", "lowest")

with warnings.catch_warnings():  # langchain-community, where it is installed, announces its end
    warnings.filterwarnings("ignore", "`langchain-community` is being sunset", DeprecationWarning)
    from langchain_classic.agents import AgentExecutor, AgentType, create_tool_calling_agent, initialize_agent
    from langchain_classic.chains import LLMChain

pytestmark = pytest.mark.filterwarnings("ignore::langchain_core._api.deprecation.LangChainDeprecationWarning")


def react(request: Request) -> Turn:
    """Thinks, acts and answers in the words of a ReAct prompt."""
    if "Observation: rain" in request.prompt:
        return "I know it now. Final Answer: It rains."
    return "I should look.\nAction: weather\nAction Input: Oslo"


def look(city: str) -> str:
    """The weather of a city."""
    return weather.func(city.strip())


def react_agent(stub_model: StubModel) -> Any:
    """As the old samples make one."""
    stub_model.script = Script(react)
    tools = [Tool(name="weather", func=look, description="The weather of a city.")]
    return initialize_agent(tools, chat(stub_model), agent=AgentType.ZERO_SHOT_REACT_DESCRIPTION)


def run(agent: AgentExecutor, city: str) -> Any:
    return agent.invoke({"input": city})["output"]


async def run_async(agent: AgentExecutor, city: str) -> Any:
    return (await agent.ainvoke({"input": city}))["output"]


def run_streamed(agent: AgentExecutor, city: str) -> Any:
    return list(agent.stream({"input": city}))[-1]["output"]


async def run_streamed_async(agent: AgentExecutor, city: str) -> Any:
    return [part async for part in agent.astream({"input": city})][-1]["output"]


class TestToolCallingAgent(FrameworkContract):
    package, patch, framework = "langchain_classic", LangChainPatch, Framework.LANGCHAIN
    owners = (BaseChatModel, BaseLLM, AsyncCallbackManager, config)
    module, steps = "agentlightning.instrumentation.frameworks.langchain", ("Step",)
    ways = (run, run_async, run_streamed, run_streamed_async)
    tool, call, tool_error = "tool.tool", CALL, LookupError
    has_call_ids = False

    def agent(self, model: StubModel, name: str) -> AgentExecutor:
        prompt = ChatPromptTemplate.from_messages([("user", "{input}"), ("placeholder", "{agent_scratchpad}")])
        agent = create_tool_calling_agent(chat(model), [weather], prompt)
        return AgentExecutor(agent=agent, tools=[weather], name=name)

    def shape(self, name: str, *tools: Any) -> Any:
        return [f"{name}.chain [{name}]", CALL, *tools, CALL]

    def failed_shape(self, name: str) -> Any:
        return [f"{name}.chain", CALL]


def assert_is_run(trace: Trace, stub_model: StubModel, *, has_chain: bool = False) -> None:
    call = ["LLMChain.chain", CALL] if has_chain else CALL
    assert trace.error is None
    assert trace.shape == ["AgentExecutor.chain [AgentExecutor]", call, ["tool.tool"], call]
    assert agents_of(trace) == ["AgentExecutor", "AgentExecutor"]
    assert_ids_are_those_of(trace, stub_model)


def test_react_agent_is_one_tree(stub_model: StubModel) -> None:
    trace = observed(react_agent(stub_model).invoke, {"input": "Oslo?"})

    assert trace.result["output"] == "It rains."
    assert_is_run(trace, stub_model, has_chain=True)
    told = trace.tools[0].attributes
    assert (told["tool.name"], told["tool.parameters"], told["tool.result"]) == ("weather", "Oslo", "rain in Oslo")


@pytest.mark.claim(375)
def test_react_agent_may_be_run_in_the_oldest_way(stub_model: StubModel) -> None:
    trace = observed(react_agent(stub_model).run, "Oslo?")
    assert trace.result == "It rains."
    assert_is_run(trace, stub_model, has_chain=True)


def test_inputs_of_a_chain_are_told_apart(stub_model: StubModel) -> None:
    chain = LLMChain(llm=chat(stub_model), prompt=PromptTemplate.from_template("{text}"))
    trace = observed(chain.apply, [{"text": "one"}, {"text": "two"}])
    assert trace.shape == ["LLMChain.chain", CALL, CALL]
    assert_ids_are_those_of(trace, stub_model)
