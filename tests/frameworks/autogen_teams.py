"""The small agents and teams of the tests of AutoGen, and what their traces look like."""

import importlib.metadata
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.conditions import TextMentionTermination
from autogen_agentchat.messages import TextMessage
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_core import MessageContext, RoutedAgent, message_handler
from autogen_core.models import UserMessage
from autogen_ext.models.openai import OpenAIChatCompletionClient as Client

from tests.frameworks.contract import weather_in
from tests.instrumentation.traces import Trace
from tests.stub_model.script import Answer, Request, Script
from tests.stub_model.server import StubModel
from tests.stub_model.words import ToolCall

ASK_WEATHER = Answer("", (ToolCall.of("weather", city="Oslo"),))
TOOL_RUN: Any = ["invoke_agent helper [helper]", ["openai.chat.completion"], ["execute_tool weather"]]
TEAM_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
MODEL: Any = {
    "vision": False,
    "function_calling": True,
    "json_output": False,
    "family": "unknown",
    "structured_output": False,
    "multiple_system_messages": True,
}


async def weather(city: str) -> str:
    """The weather of a city."""
    return weather_in(city)


def client_of(model: StubModel, **options: Any) -> Client:
    # A connection that is kept would outlive the event loop of its test.
    wish: Any = {"extra_body": {"return_token_ids": True}, "default_headers": {"Connection": "close"}}
    wish["max_retries"] = 0
    return Client(model="stub-model", base_url=model.openai_url, api_key="any", model_info=MODEL, **wish, **options)


def pair(client: Client, **options: Any) -> RoundRobinGroupChat:
    """A writer and a critic, who goes on until it approves."""
    members: Any = [AssistantAgent("primary", client), AssistantAgent("critic", client)]
    return RoundRobinGroupChat(members, termination_condition=TextMentionTermination("APPROVE"), **options)


def without_messages(shape: Any) -> Any:
    """A tree without AutoGen's own spans of sending and handling messages, except those with other work beneath."""
    name, *children = shape
    kept = [part for child in children for part in _kept(without_messages(child))]
    return [TEAM_ID.sub("ID", name), *kept]


def _kept(shape: Any) -> Iterator[Any]:
    name, *children = shape
    if not name.startswith("autogen ") or (name.startswith("autogen process") and children):
        yield shape
    else:
        yield from children


def called_by(trace: Trace) -> list[str]:
    """The agents of the model calls, in the order of the calls."""
    by_id = {triplet.metadata["response_id"]: triplet.metadata["agent_name"] for triplet in trace.triplets()}
    return [by_id[call.attributes["gen_ai.response.id"]] for call in trace.model_calls]


def process_of(name: str) -> str:
    return f"autogen process {name}_ID.(ID)-A [{name}]"


def team_shape(*turns: str, team: str = "RoundRobinGroupChat") -> Any:
    """The run of a team, with a model call in the turn of each of these agents."""
    work = [[process_of(name), [f"invoke_agent {name} [{name}]", ["openai.chat.completion"]]] for name in turns]
    return [f"{team}.team", *work]


def tasks_of(trace: Trace) -> set[Any]:
    """What the model was asked first, in any of its calls."""
    return {call.attributes["gen_ai.prompt.1.content"] for call in trace.model_calls}


def approve_second(request: Request) -> str:
    """What was said, and then approval."""
    return "APPROVE" if len(request.messages) > 2 else request.text


@pytest.fixture
async def client(stub_model: StubModel) -> AsyncIterator[Client]:
    client = client_of(stub_model)
    yield client
    await client.close()


@pytest.fixture
def helper(client: Client, stub_model: StubModel) -> AssistantAgent:
    """An agent of two turns and a tool."""
    stub_model.script = Script([ASK_WEATHER, "It rains."])
    return AssistantAgent("helper", client, tools=[weather], reflect_on_tool_use=True)


class Poet(RoutedAgent):
    """An agent of the core API, which speaks to the model itself."""

    def __init__(self, client: Client) -> None:
        super().__init__("A poet")
        self._client = client

    @message_handler
    async def on_text(self, message: TextMessage, ctx: MessageContext) -> TextMessage:
        told = await self._client.create([UserMessage(content=message.content, source="user")])
        return TextMessage(content=str(told.content), source="poet")


# ---------------------------------------------------------------------- MCP

MCP_SERVER = """
from mcp.server.fastmcp import FastMCP
server = FastMCP("weather", log_level="ERROR")
@server.tool()
def weather(city: str) -> str:
    return f"rain in {city}"
server.run()
"""


def speaks_mcp() -> bool:
    return int(importlib.metadata.version("mcp").partition(".")[0]) < 2
