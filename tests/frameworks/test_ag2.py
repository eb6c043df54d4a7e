"""Chats, group chats and tools of ag2 0.14 (`import autogen`), run unmodified against the stub model."""

import asyncio
import importlib
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest

from agentlightning.adapter import Framework, detect_framework
from agentlightning.events import handovers
from agentlightning.instrumentation.ag2 import AG2Patch
from agentlightning.tracer import OtelTracer
from tests.instrumentation.observing import Trace, observed, observed_async
from tests.stub_model.script import Answer, Failure, Request, Script, Turn
from tests.stub_model.server import StubModel
from tests.stub_model.words import ToolCall, encode

with warnings.catch_warnings():  # it uses what its own dependencies call deprecated
    warnings.simplefilter("ignore", DeprecationWarning)
    autogen: Any = importlib.import_module("autogen")

ASK_WEATHER = Answer("", (ToolCall.of("weather", city="Oslo"),))
ANSWER = "It rains. TERMINATE"
ASSISTANT = ["assistant.agent [assistant]", ["openai.chat.completion"]]
USER = ["user.agent [user]"]
TOOL_CHAT = ["user.chat", ASSISTANT, [*USER, ["weather.tool"]], ASSISTANT, USER]


def weather(city: str) -> str:
    return f"rain in {city}"


def config_of(model: StubModel, **options: Any) -> dict[str, Any]:
    """As the documentation has it; without cache, from which a second call would be answered."""
    entry = {
        "model": "stub-model",
        "base_url": model.openai_url,
        "api_key": "any",
        "price": [0, 0],
        "max_retries": 0,
        "extra_body": {"return_token_ids": True},
        **options,
    }
    return {"config_list": [entry], "cache_seed": None}


def is_end(message: dict[str, Any]) -> bool:
    return "TERMINATE" in (message.get("content") or "")


def pair(model: StubModel, tool: Any = weather, **options: Any) -> tuple[Any, Any]:
    """A user who runs the tool and an assistant who asks for it."""
    assistant = autogen.AssistantAgent("assistant", llm_config=config_of(model, **options))
    user = autogen.UserProxyAgent(
        "user", human_input_mode="NEVER", code_execution_config=False, is_termination_msg=is_end
    )
    autogen.register_function(tool, caller=assistant, executor=user, name="weather", description="The weather.")
    return user, assistant


def tool_then_answer(request: Request) -> Turn:
    """Asks for the weather of the place it is asked about, and tells it when it knows."""
    if request.messages[-1].role == "tool":
        return f"{request.text} TERMINATE"
    return Answer("", (ToolCall.of("weather", city=request.text),))


def called_by(trace: Trace) -> list[str]:
    return [triplet.metadata["agent_name"] for triplet in trace.triplets(repair_hierarchy=False)]


# ---------------------------------------------------------------------- chats


@pytest.mark.claim(376)
def test_chat_is_a_tree_of_replies_with_their_calls_and_tools(stub_model: StubModel) -> None:
    stub_model.script = Script([ASK_WEATHER, ANSWER])
    user, assistant = pair(stub_model)

    trace = observed(lambda: user.initiate_chat(assistant, message="Weather in Oslo?"))

    assert trace.shape == TOOL_CHAT
    assert trace.result.summary == "It rains. "
    assert called_by(trace) == ["assistant", "assistant"]
    assert trace.named("user.chat").attributes == {"ag2.chat.sender": "user", "ag2.chat.recipient": "assistant"}


@pytest.mark.claim(335, 295)
def test_a_chat_tells_who_spoke_to_whom_and_by_which_framework(stub_model: StubModel) -> None:
    stub_model.script = Script([ASK_WEATHER, ANSWER])
    user, assistant = pair(stub_model)

    trace = observed(lambda: user.initiate_chat(assistant, message="Weather in Oslo?"))

    between = [(handover.from_agent, handover.to_agent) for handover in handovers(trace.spans)]
    assert between == [("user", "assistant"), ("assistant", "user")] * 2
    assert detect_framework(trace.spans) is Framework.AG2


def test_calls_carry_the_token_ids_of_the_model(stub_model: StubModel) -> None:
    stub_model.script = Script([ASK_WEATHER, ANSWER])
    user, assistant = pair(stub_model)

    trace = observed(lambda: user.initiate_chat(assistant, message="Weather in Oslo?"))

    first, second = trace.triplets()
    assert first.prompt["token_ids"] == list(stub_model.requests[0].prompt_token_ids)
    assert second.prompt["token_ids"] == list(stub_model.requests[1].prompt_token_ids)
    assert second.response["token_ids"][:-1] == encode(ANSWER)


def test_tool_span_says_what_was_asked_and_answered(stub_model: StubModel) -> None:
    stub_model.script = Script([ASK_WEATHER, ANSWER])
    user, assistant = pair(stub_model)

    trace = observed(lambda: user.initiate_chat(recipient=assistant, message="Weather in Oslo?"))

    assert trace.named("weather.tool").attributes == {
        "tool.name": "weather",
        "tool.call.type": "function",
        "tool.parameters": '{"city": "Oslo"}',
        "tool.call.id": "call_1_0_0",
        "tool.result": "rain in Oslo",
    }


async def test_asynchronous_chat_gives_the_same_tree_though_it_calls_the_model_in_a_pool(
    stub_model: StubModel,
) -> None:
    stub_model.script = Script([ASK_WEATHER, ANSWER])
    user, assistant = pair(stub_model)

    async def chat() -> Any:
        return await user.a_initiate_chat(assistant, message="Weather in Oslo?")

    trace = await observed_async(chat)

    assert trace.shape == TOOL_CHAT
    assert called_by(trace) == ["assistant", "assistant"]


@pytest.mark.parametrize("is_async_chat", [False, True], ids=["chat", "async-chat"])
async def test_asynchronous_tool_is_one_tool(stub_model: StubModel, is_async_chat: bool) -> None:
    async def tool(city: str) -> str:
        return f"rain in {city}"

    stub_model.script = Script([ASK_WEATHER, ANSWER])
    user, assistant = pair(stub_model, tool)

    async def chat() -> Any:
        if is_async_chat:
            return await user.a_initiate_chat(assistant, message="Weather in Oslo?")
        return user.initiate_chat(assistant, message="Weather in Oslo?")

    trace = await observed_async(chat)

    assert trace.shape == TOOL_CHAT
    assert trace.tools[0].attributes["tool.result"] == "rain in Oslo"


def test_streamed_answers_give_the_same_tree(stub_model: StubModel) -> None:
    stub_model.script = Script([ASK_WEATHER, ANSWER])
    user, assistant = pair(stub_model, stream=True)

    trace = observed(lambda: user.initiate_chat(assistant, message="Weather in Oslo?"))

    assert trace.shape == TOOL_CHAT
    assert stub_model.requests[1].is_streaming
    assert trace.triplets()[1].response["token_ids"][:-1] == encode(ANSWER)


def test_run_works_in_a_thread_of_its_own_and_belongs_to_the_trace(stub_model: StubModel) -> None:
    stub_model.script = Script([ASK_WEATHER, ANSWER])
    user, assistant = pair(stub_model)

    def run() -> list[str]:
        response = user.run(assistant, message="Weather in Oslo?")
        return [type(event).__name__ for event in response.events]

    trace = observed(run)

    assert trace.shape == TOOL_CHAT
    assert "ExecutedFunctionEvent" in trace.result


def test_single_reply_names_its_agent(stub_model: StubModel) -> None:
    _user, assistant = pair(stub_model)

    trace = observed(lambda: assistant.generate_reply(messages=[{"role": "user", "content": "Hello"}]))

    assert trace.shape == ASSISTANT
    assert trace.result == "Hello"


def test_summary_by_the_model_is_a_call_of_the_agent_that_makes_it(stub_model: StubModel) -> None:
    stub_model.script = Script([ANSWER, "Rain."])
    user, assistant = pair(stub_model)

    trace = observed(
        lambda: user.initiate_chat(assistant, message="Weather?", summary_method="reflection_with_llm", max_turns=1)
    )

    assert trace.result.summary == "Rain."
    assert trace.shape == ["user.chat", ASSISTANT, [*USER, ["openai.chat.completion"]]]


def test_answer_from_the_cache_is_no_model_call(stub_model: StubModel, tmp_path: Path) -> None:
    _user, assistant = pair(stub_model)
    question = [{"role": "user", "content": "Hello"}]

    def ask_twice() -> None:
        with autogen.Cache.disk(cache_path_root=str(tmp_path)) as cache:
            assistant.client_cache = cache
            assert [assistant.generate_reply(messages=question) for _ in range(2)] == ["Hello", "Hello"]

    trace = observed(ask_twice)

    assert trace.shape == ["virtual-root", ASSISTANT, ["assistant.agent [assistant]"]]


# ---------------------------------------------------------------------- several agents


def test_group_chat_names_who_speaks_and_who_chooses(stub_model: StubModel) -> None:
    stub_model.script = Script(["poet", "Roses.", "critic", "TERMINATE"])
    user, assistant = pair(stub_model)
    poet, critic = (autogen.AssistantAgent(name, llm_config=config_of(stub_model)) for name in ("poet", "critic"))
    group = autogen.GroupChat([user, assistant, poet, critic], messages=[], max_round=4)
    manager = autogen.GroupChatManager(group, llm_config=config_of(stub_model), is_termination_msg=is_end)

    trace = observed(lambda: user.initiate_chat(manager, message="A poem."))

    choosing = [
        "checking_agent.chat",
        ["speaker_selection_agent.agent [speaker_selection_agent]", ["openai.chat.completion"]],
        ["checking_agent.agent [checking_agent]"],
    ]
    speaking = [[f"{name}.agent [{name}]", ["openai.chat.completion"]] for name in ("poet", "critic")]
    assert trace.shape == [
        "user.chat",
        ["chat_manager.agent [chat_manager]", choosing, speaking[0], choosing, speaking[1]],
    ]
    assert called_by(trace) == ["speaker_selection_agent", "poet", "speaker_selection_agent", "critic"]


def test_nested_chat_is_beneath_the_agent_that_holds_it(stub_model: StubModel) -> None:
    stub_model.script = Script(["Inner answer."])
    user, assistant = pair(stub_model)
    writer = autogen.AssistantAgent("writer", llm_config=config_of(stub_model))
    assistant.register_nested_chats([{"recipient": writer, "max_turns": 1, "summary_method": "last_msg"}], trigger=user)

    trace = observed(lambda: user.initiate_chat(assistant, message="Write.", max_turns=1))

    assert trace.shape == [
        "user.chat",
        [
            "assistant.agent [assistant]",
            ["assistant.chat", ["writer.agent [writer]", ["openai.chat.completion"]]],
        ],
    ]
    assert called_by(trace) == ["writer"]


# ---------------------------------------------------------------------- errors


def test_failing_model_marks_agent_and_chat_and_raises_what_the_library_raises(stub_model: StubModel) -> None:
    stub_model.script = Script([Failure(400, "no such thing")])
    user, assistant = pair(stub_model)

    trace = observed(lambda: user.initiate_chat(assistant, message="Weather?"))

    assert type(trace.error).__name__ == "BadRequestError"
    assert trace.shape == ["user.chat", ASSISTANT]
    assert {span.status.status_code for span in trace.spans} == {"ERROR"}


def test_failing_tool_is_marked_and_the_chat_goes_on(stub_model: StubModel) -> None:
    def tool(city: str) -> str:
        raise LookupError(f"no {city}")

    stub_model.script = Script([ASK_WEATHER, ANSWER])
    user, assistant = pair(stub_model, tool)

    trace = observed(lambda: user.initiate_chat(assistant, message="Weather in Oslo?"))

    failed = trace.named("weather.tool")
    assert (failed.status.status_code, failed.status.description) == ("ERROR", "Error: no Oslo")
    assert trace.shape == TOOL_CHAT
    assert [span.status.status_code for span in trace.spans if span is not failed] == ["UNSET"] * 7


# ---------------------------------------------------------------------- at the same time


async def test_two_chats_at_once_keep_their_calls_apart(stub_model: StubModel) -> None:
    stub_model.script = Script(tool_then_answer)

    async def chat(place: str) -> Any:
        user, assistant = pair(stub_model)
        return await user.a_initiate_chat(assistant, message=place)

    async def both() -> None:
        await asyncio.gather(chat("Oslo"), chat("Rome"))

    trace = await observed_async(both)

    _root, *chats = trace.shape
    assert chats == [TOOL_CHAT, TOOL_CHAT]
    told = {(span.trace_id, span.attributes["gen_ai.prompt.1.content"]) for span in trace.model_calls}
    assert {place for _, place in told} == {"Oslo", "Rome"}
    assert len(told) == 2


async def test_two_traces_at_once_keep_their_spans_apart(stub_model: StubModel) -> None:
    stub_model.script = Script(tool_then_answer)

    async def traced(place: str) -> Trace:
        user, assistant = pair(stub_model)
        return await observed_async(lambda: user.a_initiate_chat(assistant, message=place))

    traces = await asyncio.gather(traced("Oslo"), traced("Rome"))

    assert [trace.shape for trace in traces] == [TOOL_CHAT, TOOL_CHAT]
    assert [trace.tools[0].attributes["tool.result"] for trace in traces] == ["rain in Oslo", "rain in Rome"]


def test_two_threads_keep_their_spans_apart(stub_model: StubModel) -> None:
    stub_model.script = Script(tool_then_answer)
    traces: dict[str, Trace] = {}

    def work(place: str) -> None:
        user, assistant = pair(stub_model)
        traces[place] = observed(lambda: user.initiate_chat(assistant, message=place))

    threads = [threading.Thread(target=work, args=(place,)) for place in ("Oslo", "Rome")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    for place, trace in traces.items():
        assert trace.shape == TOOL_CHAT
        assert trace.tools[0].attributes["tool.result"] == f"rain in {place}"


# ---------------------------------------------------------------------- applying and undoing


def test_undoing_leaves_the_library_as_it_was() -> None:
    owners = (
        autogen.ConversableAgent,
        autogen.OpenAIWrapper,
        autogen.UserProxyAgent,
        autogen.AssistantAgent,
        autogen.GroupChatManager,
    )
    before = [dict(vars(owner)) for owner in owners]

    with AG2Patch() as patch:
        assert patch.is_applied
        assert [dict(vars(owner)) for owner in owners] != before

    assert [dict(vars(owner)) for owner in owners] == before


def test_chat_after_undoing_leaves_no_span(stub_model: StubModel) -> None:
    stub_model.script = Script([ASK_WEATHER, ANSWER, ASK_WEATHER, ANSWER])
    user, assistant = pair(stub_model)
    tracer = OtelTracer(instrument=False)

    observed(lambda: user.initiate_chat(assistant, message="Weather in Oslo?"))
    with tracer.lifespan(), tracer._trace_context_sync():
        user.initiate_chat(assistant, message="Weather in Oslo?")

    assert tracer.get_last_trace() == []


PROGRAM = """
import sys
from tests.instrumentation.observing import observed
from tests.stub_model.script import Script
from tests.stub_model.server import running

def chat():
    assert "autogen" not in sys.modules
    from tests.frameworks.test_ag2 import pair
    user, assistant = pair(model)
    user.initiate_chat(assistant, message="Hello", max_turns=1)

with running(Script(["Hi."])) as model:
    print(observed(chat).shape)
"""


def test_library_may_be_imported_after_the_patch_was_applied() -> None:
    root = Path(__file__).parents[2]

    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=root, capture_output=True, text=True, timeout=60, check=True
    )

    assert done.stdout.splitlines()[-1] == str(["user.chat", ASSISTANT])
