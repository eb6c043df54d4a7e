"""AgentOps' callback handler for LangChain, and LangChain agents beside AgentOps."""

from typing import Any

from agentops.integration.callbacks.langchain import LangchainCallbackHandler
from langchain.agents import create_agent
from langchain_core.runnables import RunnableLambda
from langchain_openai import ChatOpenAI

from agentlightning.tracer import AgentOpsTracer
from tests.instrumentation.traces import Trace, spans_of
from tests.stub_model.script import Answer, Script
from tests.stub_model.server import StubModel
from tests.stub_model.words import ToolCall

RUNS_IN = ("agentops",)


def weather(city: str) -> str:
    """The weather in a city."""
    return f"Sunny in {city}."


def run_agent(tracer: AgentOpsTracer, model: StubModel) -> Trace:
    model.script = Script([Answer(tool_calls=(ToolCall.of("weather", city="Oslo"),)), "It is sunny."])
    chat: Any = ChatOpenAI(model="stub-model", base_url=model.openai_url, extra_body={"return_token_ids": True})
    agent: Any = create_agent(chat, tools=[weather], name="forecaster")
    with tracer._trace_context_sync():
        handler = tracer.get_langchain_handler(tags=["mine"])
        agent.invoke({"messages": [("user", "Weather?")]}, config={"callbacks": [handler]})
    return Trace(spans_of(tracer))


def test_an_agent_with_the_handler_is_recorded_once(stub_model: StubModel) -> None:
    with AgentOpsTracer().lifespan() as tracer:
        assert isinstance(tracer.get_langchain_handler(), LangchainCallbackHandler)
        with_handler = run_agent(tracer, stub_model)

    assert [span.name for span in with_handler.model_calls] == ["openai.chat.completion"] * 2
    assert [span.attributes["tool.name"] for span in with_handler.tools] == ["weather"]
    assert not [span.name for span in with_handler.spans if span.name.startswith("session")]
    assert {len(triplet.prompt["token_ids"]) > 0 for triplet in with_handler.triplets()} == {True}


def test_without_our_instrumentation_the_handler_is_agentops_own(stub_model: StubModel) -> None:
    with AgentOpsTracer(instrument_managed=False).lifespan() as tracer:
        handler = tracer.get_langchain_handler(tags=["mine"])
        with tracer._trace_context_sync():
            RunnableLambda(str, name="chained").invoke(1, config={"callbacks": [handler]})

    (chain,) = spans_of(tracer)
    assert (type(handler), chain.name) == (LangchainCallbackHandler, "chain.chain")
