"""Chats, group chats and tools of ag2 0.14 (`import autogen`), run unmodified against the stub model."""

import importlib
import warnings
from pathlib import Path
from typing import Any, ClassVar

import pytest

from agentlightning.adapter import Framework, detect_framework
from agentlightning.events import handovers
from agentlightning.instrumentation.frameworks.autogen import AG2Patch
from tests.frameworks.contract import CALL, FrameworkContract, forecast, weather_in
from tests.instrumentation.traces import Trace, observed, observed_async
from tests.stub_model.script import Answer, Request, Script, Turn
from tests.stub_model.server import StubModel
from tests.stub_model.words import ToolCall, encode

RUNS_IN = ("openai2", "lowest")

# Its early releases copy their configuration so.
pytestmark = pytest.mark.filterwarnings("ignore:The `copy` method is deprecated:DeprecationWarning")

with warnings.catch_warnings():  # it uses what its own dependencies call deprecated
    warnings.simplefilter("ignore", DeprecationWarning)
    autogen: Any = importlib.import_module("autogen")

ASK_WEATHER = Answer("", (ToolCall.of("weather", city="Oslo"),))
ANSWER = "It rains. TERMINATE"
ASSISTANT = ["assistant.agent [assistant]", ["openai.chat.completion"]]
USER = ["user.agent [user]"]
TOOL_CHAT = ["user.chat", ASSISTANT, [*USER, ["weather.tool"]], ASSISTANT, USER]


def weather(city: str) -> str:
    return weather_in(city)


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


def pair(model: StubModel, tool: Any = weather, name: str = "assistant", **options: Any) -> tuple[Any, Any]:
    """A user who runs the tool and an assistant who asks for it."""
    assistant = autogen.AssistantAgent(name, llm_config=config_of(model, **options))
    user = autogen.UserProxyAgent(
        "user", human_input_mode="NEVER", code_execution_config=False, is_termination_msg=is_end
    )
    autogen.register_function(tool, caller=assistant, executor=user, name="weather", description="The weather.")
    return user, assistant


def forecast_and_end(request: Request) -> Turn:
    turn = forecast(request)
    return f"{turn} TERMINATE" if isinstance(turn, str) else turn


def chat(agents: Any, city: str) -> str:
    user, assistant = agents
    return str(user.initiate_chat(assistant, message=city).summary).strip()


async def chat_async(agents: Any, city: str) -> str:
    user, assistant = agents
    return str((await user.a_initiate_chat(assistant, message=city)).summary).strip()


class TestAG2(FrameworkContract):
    package, patch, framework = "autogen", AG2Patch, Framework.AG2
    owners = (
        autogen.ConversableAgent,
        autogen.OpenAIWrapper,
        autogen.UserProxyAgent,
        autogen.AssistantAgent,
        autogen.GroupChatManager,
    )
    ways = (chat, chat_async)
    script = staticmethod(forecast_and_end)
    options: ClassVar[Any] = {"repair_hierarchy": False}

    def agent(self, model: StubModel, name: str) -> Any:
        return pair(model, name=name)

    def shape(self, name: str, *tools: Any) -> Any:
        return [*self.failed_shape(name), [*USER, *tools], [f"{name}.agent [{name}]", CALL], USER]

    def failed_shape(self, name: str) -> Any:
        return ["user.chat", [f"{name}.agent [{name}]", CALL]]


def called_by(trace: Trace) -> list[str]:
    return [triplet.metadata["agent_name"] for triplet in trace.triplets(repair_hierarchy=False)]


# ---------------------------------------------------------------------- chats


@pytest.mark.claim(376, 335, 295)
def test_chat_is_a_tree_of_replies_that_tells_who_spoke_to_whom_and_by_which_framework(stub_model: StubModel) -> None:
    stub_model.script = Script([ASK_WEATHER, ANSWER])
    user, assistant = pair(stub_model)

    trace = observed(lambda: user.initiate_chat(assistant, message="Weather in Oslo?"))

    assert trace.shape == TOOL_CHAT
    assert called_by(trace) == ["assistant", "assistant"]
    assert trace.named("user.chat").attributes == {"ag2.chat.sender": "user", "ag2.chat.recipient": "assistant"}
    between = [(handover.from_agent, handover.to_agent) for handover in handovers(trace.spans)]
    assert between == [("user", "assistant"), ("assistant", "user")] * 2
    assert detect_framework(trace.spans) is Framework.AG2


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
