"""Agents of ag2 from 1.0 on (`import ag2`): `agentlightning.instrumentation.frameworks.autogen`."""

from collections.abc import Iterator
from typing import Any

import ag2
import pytest
from ag2.config import OpenAIConfig
from ag2.tools import executor

from agentlightning.adapter import Framework, detect_framework
from agentlightning.instrumentation.frameworks.autogen import NewerAG2Patch
from tests.frameworks.contract import CALL, FrameworkContract, collect_clients, weather_in
from tests.instrumentation.traces import observed_async
from tests.stub_model.script import Answer, Request, Script, Turn
from tests.stub_model.server import StubModel
from tests.stub_model.words import ToolCall

RUNS_IN = ("openai3",)

pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # it makes a client for each turn


@pytest.fixture(scope="module", autouse=True)
def clients_are_collected() -> Iterator[None]:
    """What ag2 did not close is not blamed on the tests that come after."""
    yield
    collect_clients()


@ag2.tool
def weather(city: str) -> str:
    """The weather of a city."""
    return weather_in(city)


def forecaster(model: StubModel, name: str = "forecaster", **options: Any) -> ag2.Agent[Any]:
    config = OpenAIConfig(
        "stub-model",
        api_key="any",
        base_url=model.openai_url,
        max_retries=0,
        streaming=options.pop("streaming", False),
        extra_body={"return_token_ids": True},
    )
    return ag2.Agent(name, config=config, tools=options.pop("tools", [weather]), **options)


async def ask(agent: ag2.Agent[Any], city: str) -> Any:
    return (await agent.ask(city)).body


async def run(agent: ag2.Agent[Any], city: str) -> Any:
    async with agent.run(city) as turn:
        return (await turn.result()).body


async def ask_streamed(agent: ag2.Agent[Any], city: str) -> Any:
    return (await agent.ask(city, config=agent.config.copy(streaming=True))).body


class TestNewerAG2(FrameworkContract):
    package, patch, framework = "ag2", NewerAG2Patch, Framework.AG2
    owners = (ag2.Agent, executor)
    ways = (ask, run, ask_streamed)

    def agent(self, model: StubModel, name: str) -> Any:
        return forecaster(model, name)


async def test_agent_as_a_tool_works_beneath_the_tool(stub_model: StubModel) -> None:
    def manage(request: Request) -> Turn:
        is_done = request.messages[-1].role == "tool"
        if "task_forecaster" in str(request.body.get("tools")):
            return "Take an umbrella." if is_done else Answer("", (ToolCall.of("task_forecaster", objective="Oslo"),))
        return f"I found {request.text}." if is_done else Answer("", (ToolCall.of("weather", city="Oslo"),))

    stub_model.script = Script(manage)
    manager = forecaster(
        stub_model, "manager", tools=[forecaster(stub_model).as_tool(description="Knows the weather.")]
    )

    trace = await observed_async(ask, manager, "Oslo")

    work = ["forecaster.agent [forecaster]", CALL, ["weather.tool"], CALL]
    assert trace.shape == ["manager.agent [manager]", CALL, ["task_forecaster.tool", work], CALL]
    assert len(trace.triplets(agent_match="forecaster")) == 2
    assert detect_framework(trace.spans) is Framework.AG2
