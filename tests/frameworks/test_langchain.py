"""LangChain's models, chains, tools and retrievers: `agentlightning.instrumentation.frameworks.langchain`."""

import asyncio
import copy
import pickle
from collections.abc import Callable
from typing import Any

import openai
import pytest
from langchain_anthropic import ChatAnthropic
from langchain_core.callbacks import AsyncCallbackHandler, BaseCallbackHandler, CallbackManager, manager
from langchain_core.documents import Document
from langchain_core.language_models.fake_chat_models import FakeListChatModel, FakeMessagesListChatModel
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.outputs import LLMResult
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableLambda, RunnableParallel, chain, config
from langchain_core.tools import ToolException, tool
from langchain_core.tracers import context as hooks
from langchain_openai import OpenAI
from opentelemetry import context as otel_context

from agentlightning.adapter import TraceToMessages
from agentlightning.adapter.triplet import Framework, detect_framework
from agentlightning.instrumentation.frameworks.langchain import LangChainPatch
from agentlightning.tracer import OtelTracer
from tests.frameworks.contract import trace_of
from tests.frameworks.langchain_agents import (
    CALL,
    agents_of,
    ask_without_langchain,
    assert_ids_are_those_of,
    chat,
    weather,
)
from tests.instrumentation.traces import observed, observed_async
from tests.stub_model.script import Failure, Script
from tests.stub_model.server import StubModel

RUNS_IN = ("openai2", "openai3", "lowest")

TEXT_CALL = ["chat_model.llm", ["openai.completion"]]


def text_model(stub_model: StubModel) -> OpenAI:
    headers = {"Connection": "close"}
    url = stub_model.openai_url
    return OpenAI(model="stub-model", base_url=url, api_key="any", max_retries=0, default_headers=headers, batch_size=1)


# ---------------------------------------------------------------------- chat models


def read_all(model: Any, asked: Any) -> str:
    return "".join(chunk.content for chunk in model.stream(asked))


async def read_all_async(model: Any, asked: Any) -> str:
    return "".join([chunk.content async for chunk in model.astream(asked)])


def invoke(model: Any, asked: Any) -> str:
    return str(model.invoke(asked).content)


async def invoke_async(model: Any, asked: Any) -> str:
    return str((await model.ainvoke(asked)).content)


@pytest.mark.parametrize("way", [invoke, read_all, invoke_async, read_all_async])
@pytest.mark.claim(287, 334)
def test_model_call_has_a_step_above_it(stub_model: StubModel, way: Callable[..., Any]) -> None:
    trace = trace_of(way, chat(stub_model), "Hello there")

    assert trace.result == "Hello there"
    assert trace.shape == CALL
    assert_ids_are_those_of(trace, stub_model)
    assert trace.named("chat_model.llm").attributes == {"langchain.llm.name": "ChatOpenAI"}
    assert detect_framework(trace.spans) is Framework.LANGCHAIN


CONVERSATIONS = [[HumanMessage("one")], [HumanMessage("two")]]


def assert_each_has_its_own(trace: Any, asked: list[str]) -> None:
    assert trace.shape == ["virtual-root", CALL, CALL]
    parents = [span.span_id for span in trace.spans if span.name == "chat_model.llm"]
    assert sorted(call.parent_id for call in trace.model_calls) == sorted(parents)
    assert sorted(call.attributes["gen_ai.prompt.0.content"] for call in trace.model_calls) == sorted(asked)


@pytest.mark.parametrize("method", ["generate", "agenerate"])
def test_conversations_that_begin_at_once_are_told_apart(stub_model: StubModel, method: str) -> None:
    trace = trace_of(getattr(chat(stub_model), method), CONVERSATIONS)
    assert_each_has_its_own(trace, ["one", "two"])


@pytest.mark.claim(345)
def test_streams_that_are_read_in_turns_are_told_apart(stub_model: StubModel) -> None:
    model = chat(stub_model)
    trace = observed(lambda: list(zip(model.stream("one two"), model.stream("six ten"), strict=True)))
    assert_each_has_its_own(trace, ["one two", "six ten"])


def test_responses_api_has_a_step_above_it(stub_model: StubModel) -> None:
    trace = observed(chat(stub_model, use_responses_api=True).invoke, "Hello there")
    assert trace.shape == ["chat_model.llm", ["openai.responses"]]
    assert_ids_are_those_of(trace, stub_model)


@pytest.mark.parametrize("how", ["invoke", "stream"])
def test_anthropic_call_has_a_step_above_it(stub_model: StubModel, how: str) -> None:
    headers = {"Connection": "close"}
    model = ChatAnthropic(model="stub-model", base_url=stub_model.url, max_retries=0, default_headers=headers)

    trace = observed(lambda: list(getattr(model, how)("Hello there")))

    assert trace.error is None
    assert trace.shape == ["chat_model.llm", ["anthropic.messages"]]
    assert agents_of(trace) == ["*"]


# ---------------------------------------------------------------------- text models


def test_text_model_has_a_step_above_its_call(stub_model: StubModel) -> None:
    model = text_model(stub_model)
    for way in (model.invoke, model.ainvoke, lambda text: "".join(model.stream(text))):
        trace = trace_of(way, "Hello there")
        assert (trace.result, trace.shape) == ("Hello there", TEXT_CALL)


@pytest.mark.parametrize("how", ["generate", "agenerate"])
def test_several_prompts_share_the_calls_that_are_made_for_them(stub_model: StubModel, how: str) -> None:
    trace = trace_of(getattr(text_model(stub_model), how), ["one", "two"])

    assert trace.error is None
    step, *calls = TEXT_CALL
    assert trace.shape == ["virtual-root", [step, *calls, *calls], ["chat_model.llm"]]
    assert not [span for span in trace.spans if span.name == "chat_model.llm" and "gen_ai.system" in span.attributes]


# ---------------------------------------------------------------------- models without an SDK that we know


class OwnModel(FakeMessagesListChatModel):
    """A model of a provider we do not know, which counts its tokens."""

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        described = {"name": "weather", "description": "The weather.", "parameters": {"type": "object"}}
        return self.bind(tools=[{"type": "function", "function": described}], temperature=0.5)


def test_step_of_an_unknown_model_tells_of_the_call_itself() -> None:
    usage = {"input_tokens": 7, "output_tokens": 2, "total_tokens": 9}
    answer = AIMessage(
        "Rain.", usage_metadata=usage, response_metadata={"model_name": "own-1", "finish_reason": "stop"}
    )
    history = [
        SystemMessage("Be brief."),
        HumanMessage("Oslo?"),
        AIMessage("", tool_calls=[{"name": "weather", "args": {"city": "Oslo"}, "id": "c1"}]),
        ToolMessage("rain", tool_call_id="c1"),
    ]

    trace = observed(OwnModel(responses=[answer]).bind_tools([weather]).invoke, history)

    (conversation,) = TraceToMessages().adapt(trace.spans)
    asked = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Oslo"}'}}
    assert conversation["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Oslo?"},
        {"role": "assistant", "content": None, "tool_calls": [asked]},
        {"role": "tool", "content": "rain", "tool_call_id": "c1"},
        {"role": "assistant", "content": "Rain."},
    ]
    assert [tool["function"]["name"] for tool in conversation["tools"] or ()] == ["weather"]
    told = trace.named("chat_model.llm").attributes
    assert (told["gen_ai.response.model"], told["gen_ai.usage.total_tokens"]) == ("own-1", 9)
    assert (told["gen_ai.request.temperature"], told["gen_ai.completion.0.finish_reason"]) == (0.5, "stop")
    assert "gen_ai.response.id" not in told


async def test_streamed_unknown_model_tells_when_its_answer_began() -> None:
    trace = await observed_async(read_all_async, FakeListChatModel(responses=["Hello"]), "Hi")
    told = trace.named("chat_model.llm").attributes
    assert (told["gen_ai.prompt.0.content"], told["gen_ai.completion.0.content"]) == ("Hi", "Hello")
    assert told["gen_ai.streaming.time_to_first_token"] > 0


def test_unknown_model_that_fails_tells_what_it_was_asked() -> None:
    class Broken(FakeListChatModel):
        def _call(self, *args: Any, **kwargs: Any) -> str:
            raise RuntimeError("no answer")

    trace = observed(Broken(responses=[]).invoke, "Hi")

    step = trace.named("chat_model.llm")
    assert str(trace.error) == "no answer"
    assert (step.attributes["gen_ai.prompt.0.content"], step.status.status_code) == ("Hi", "ERROR")


@pytest.mark.parametrize("is_known", [True, False], ids=["with_sdk", "without_sdk"])
def test_model_made_of_another_is_told_of_once(stub_model: StubModel, is_known: bool) -> None:
    class Twice(FakeListChatModel):
        def _call(self, messages: Any, *args: Any, **kwargs: Any) -> str:
            inner = chat(stub_model) if is_known else FakeListChatModel(responses=["Hi"])
            return str(inner.invoke(messages).content)

    trace = observed(Twice(responses=["unused"]).invoke, "Hi")

    assert trace.result.content == "Hi"
    assert trace.shape == ["chat_model.llm", CALL if is_known else ["chat_model.llm"]]
    assert len(TraceToMessages().adapt(trace.spans)) == 1


# ---------------------------------------------------------------------- chains


def test_parts_of_a_sequence_are_left_out(stub_model: StubModel) -> None:
    prompt = ChatPromptTemplate.from_messages([("system", "Be brief."), ("user", "{question}")])
    sequence = prompt | chat(stub_model) | StrOutputParser() | RunnableLambda(str.upper)

    trace = observed(sequence.invoke, {"question": "hi"})

    assert (trace.result, trace.shape) == ("HI", ["RunnableSequence.chain", CALL])
    assert agents_of(trace) == ["*"]


@pytest.mark.claim(345)
async def test_branches_lie_beneath_their_chain(stub_model: StubModel) -> None:
    model = chat(stub_model) | StrOutputParser()
    both = RunnableParallel(left=model, right=model)
    trace = await observed_async(both.ainvoke, "hi")
    assert trace.shape == ["RunnableParallel<left,right>.chain", CALL, CALL]


def test_call_without_langchain_lies_beneath_the_chain_that_makes_it(stub_model: StubModel) -> None:
    @chain
    def ask(text: str) -> str | None:
        chat(stub_model).invoke(text)
        return ask_without_langchain(stub_model, text)

    trace = observed(ask.invoke, "hi")

    assert trace.shape == ["ask.chain", CALL, ["openai.chat.completion"]]


def test_config_can_be_copied_and_sent_away(stub_model: StubModel) -> None:
    @chain
    def ask(text: str) -> Any:
        copied = copy.deepcopy(config.ensure_config())
        sent = pickle.loads(pickle.dumps(copied["callbacks"]))
        return chat(stub_model).invoke(text, copied), sent

    trace = observed(ask.invoke, "hi")

    assert trace.error is None
    assert trace.shape == ["ask.chain", CALL]


async def test_run_that_ends_in_another_task_is_left_when_the_next_begins() -> None:
    """Such as those of the third version of streamed events."""
    model = FakeListChatModel(responses=["one", "two"])

    async def work() -> None:
        started = await manager.AsyncCallbackManager.configure().on_chat_model_start({}, [[]], batch_size=1)
        await asyncio.create_task(started[0].on_llm_end(LLMResult(generations=[])))
        await model.ainvoke("hi")

    trace = await observed_async(work)

    assert trace.shape == ["virtual-root", ["chat_model.llm"], ["chat_model.llm"]]


def test_reader_of_a_stream_does_not_work_beneath_it(stub_model: StubModel) -> None:
    sequence = ChatPromptTemplate.from_template("{text}") | chat(stub_model)

    def read() -> None:
        for chunk in sequence.stream({"text": "hi"}):
            if chunk.content:
                ask_without_langchain(stub_model, "between")

    trace = observed(read)

    assert trace.shape == ["virtual-root", ["RunnableSequence.chain", CALL], ["openai.chat.completion"]]


async def test_nothing_is_current_after_asynchronous_work(stub_model: StubModel) -> None:
    async def work() -> None:
        await chat(stub_model).ainvoke("one")
        await text_model(stub_model).ainvoke("two")
        await weather.ainvoke({"city": "Oslo"})
        ask_without_langchain(stub_model, "three")

    trace = await observed_async(work)

    assert trace.shape == ["virtual-root", CALL, TEXT_CALL, ["tool.tool"], ["openai.chat.completion"]]


def test_stream_that_is_left_is_no_failure(stub_model: StubModel) -> None:
    sequence = ChatPromptTemplate.from_template("{text}") | chat(stub_model)
    trace = observed(lambda: next(sequence.stream({"text": "one two three"})))
    assert trace.shape == ["RunnableSequence.chain", CALL]
    assert {span.status.status_code for span in trace.spans} == {"UNSET"}


def test_suppressed_work_is_not_recorded(stub_model: StubModel) -> None:
    def work() -> Any:
        token = otel_context.attach(otel_context.set_value(otel_context._SUPPRESS_INSTRUMENTATION_KEY, value=True))
        answer = (RunnableLambda(str.upper) | chat(stub_model)).invoke("hi")
        weather.invoke({"city": "Oslo"})
        otel_context.detach(token)
        return answer

    trace = observed(work)

    assert (trace.result.content, trace.spans) == ("HI", [])


# ---------------------------------------------------------------------- tools and retrievers


def test_tool_whose_error_was_told_to_the_model_is_marked() -> None:
    @tool
    def fail() -> str:
        """Fail."""
        raise ToolException("not today")

    fail.handle_tool_error = True

    trace = observed(fail.invoke, {"name": "fail", "args": {}, "id": "c1", "type": "tool_call"})

    assert trace.result.content == "not today"
    assert trace.named("tool.tool").status.description == "not today"


@pytest.mark.parametrize("how", ["invoke", "ainvoke"])
def test_work_of_a_tool_lies_beneath_it(stub_model: StubModel, how: str) -> None:
    @tool
    def consult(text: str) -> str:
        """Ask a model."""
        ask_without_langchain(stub_model, text)
        return str(chat(stub_model).invoke(text).content)

    trace = trace_of(getattr(consult, how), {"text": "hi"})

    assert trace.shape == ["tool.tool", ["openai.chat.completion"], CALL]


class Shelf(BaseRetriever):
    """Finds nothing but bread."""

    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        if query != "bread":
            raise LookupError(query)
        return [Document("flour")]


@pytest.mark.parametrize("how", ["invoke", "ainvoke"])
def test_retriever_says_what_it_found(how: str) -> None:
    trace = trace_of(getattr(Shelf(), how), "bread")
    told = trace.named("retriever.retriever").attributes
    assert (told["langchain.retriever.name"], told["langchain.retriever.query"]) == ("Shelf", "bread")
    assert "flour" in told["langchain.retriever.documents"]


# ---------------------------------------------------------------------- failures


@pytest.mark.parametrize("how", [invoke_async, read_all_async])
async def test_failing_asynchronous_model_leaves_nothing_current(
    stub_model: StubModel, how: Callable[..., Any]
) -> None:
    stub_model.script = Script([Failure(500, "out of order"), "fine"])

    async def work() -> None:
        with pytest.raises(openai.InternalServerError):
            await how(chat(stub_model), "hi")
        ask_without_langchain(stub_model, "again")

    trace = await observed_async(work)

    assert trace.shape == ["virtual-root", CALL, ["openai.chat.completion"]]


# ---------------------------------------------------------------------- the program's own callbacks

EVENTS = [f"on_{kind}_{when}" for kind in ("chain", "llm", "tool") for when in ("start", "end", "error")] + [
    "on_chat_model_start",
    "on_llm_new_token",
]


def listener(base: type) -> Any:
    """A handler that keeps the names of the events it is told."""
    heard: list[str] = []

    def hear(name: str) -> Any:
        async def on_event_async(self: Any, *args: Any, **kwargs: Any) -> None:
            heard.append(name)

        def on_event(self: Any, *args: Any, **kwargs: Any) -> None:
            heard.append(name)

        return on_event_async if base is AsyncCallbackHandler else on_event

    handler = type("Listener", (base,), {name: hear(name) for name in EVENTS})()
    handler.heard = heard
    return handler


@pytest.mark.parametrize("base", [BaseCallbackHandler, AsyncCallbackHandler])
async def test_callbacks_of_the_program_hear_the_same(stub_model: StubModel, base: type) -> None:
    async def work() -> list[str]:
        handler = listener(base)
        for model in (chat(stub_model), text_model(stub_model)):
            sequence = ChatPromptTemplate.from_template("{text}") | model
            await sequence.ainvoke({"text": "one"}, {"callbacks": [handler]})
            [part async for part in sequence.astream({"text": "two"}, {"callbacks": [handler]})]
        await weather.ainvoke({"city": "Oslo"}, {"callbacks": CallbackManager([handler])})
        return list(handler.heard)

    unobserved = await work()
    trace = await observed_async(work)

    assert trace.error is None
    assert trace.result == unobserved
    assert {"on_llm_start", "on_llm_end", "on_tool_end"} <= set(unobserved)


# ---------------------------------------------------------------------- applied and undone


def test_undoing_takes_our_hook_away() -> None:
    before = list(hooks._configure_hooks)
    with LangChainPatch():
        assert len(hooks._configure_hooks) == len(before) + 1
    assert hooks._configure_hooks == before


def test_run_after_undoing_leaves_no_span(stub_model: StubModel) -> None:
    model, handlers = chat(stub_model), []

    @chain
    def ask(text: str) -> str:
        handlers.extend(config.ensure_config()["callbacks"].handlers)
        return str(model.invoke(text).content)

    observed(ask.invoke, "hi")
    (ours,) = handlers
    tracer = OtelTracer(instrument=False)
    with tracer.lifespan(), tracer._trace_context_sync():
        answer = ask.invoke("again", {"callbacks": [ours]})

    assert (answer, tracer.get_last_trace()) == ("again", [])
    assert ours._runs == {}
