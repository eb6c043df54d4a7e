"""Agents of smolagents: `agentlightning.instrumentation.frameworks.smolagents`."""

import json
import os
import re
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
from smolagents import (
    CodeAgent,
    LiteLLMModel,
    LogLevel,
    MultiStepAgent,
    OpenAIServerModel,
    Tool,
    ToolCallingAgent,
    tool,
)
from smolagents.local_python_executor import LocalPythonExecutor
from smolagents.remote_executors import RemotePythonExecutor
from smolagents.utils import AgentToolCallError

from agentlightning.adapter import Framework
from agentlightning.instrumentation.frameworks.smolagents import SmolagentsPatch
from tests.frameworks.contract import CALL, FrameworkContract, collect_clients, weather_in
from tests.instrumentation.traces import observed
from tests.stub_model.script import Answer, Request, Script, Turn
from tests.stub_model.server import StubModel
from tests.stub_model.words import ToolCall

RUNS_IN = ("openai2", "openai3", "lowest")

LOOKING = ["python_interpreter.tool", ["weather.tool"]]
ANSWERING = ["python_interpreter.tool", ["final_answer.tool"]]


@tool
def weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: Its name.
    """
    return weather_in(city)


def calling(request: Request) -> Turn:
    """Looks up the city that was asked for, then answers with what it found."""
    found = re.search(r"rain in \w+", request.text)
    if found:
        return Answer("", (ToolCall.of("final_answer", answer=found.group()),))
    return Answer("", (ToolCall.of("weather", city=_asked(request)),))


def coding(request: Request) -> Turn:
    """The same in code."""
    found = re.search(r"rain in \w+", request.text)
    code = f"final_answer('{found.group()}')" if found else f"print(weather(city='{_asked(request)}'))"
    return f"Thought: I know how.\n<code>\n{code}\n</code>"


def _asked(request: Request) -> str:
    return re.findall(r"New task:\s*(\w+)", request.prompt)[-1]


class Company:
    """Makes agents that share a model, whose client is closed in the end."""

    def __init__(self, stub_model: StubModel) -> None:
        self.model = OpenAIServerModel(
            "stub-model",
            api_base=stub_model.openai_url,
            api_key="any",
            retry=False,  # it would wait for a minute
            client_kwargs={"max_retries": 0},
            extra_body={"return_token_ids": True},
        )

    def caller(self, name: str | None = "forecaster", **options: Any) -> ToolCallingAgent:
        return ToolCallingAgent(tools=[weather], model=self.model, name=name, verbosity_level=LogLevel.OFF, **options)

    def coder(self, name: str | None = "forecaster", **options: Any) -> CodeAgent:
        return CodeAgent(tools=[weather], model=self.model, name=name, verbosity_level=LogLevel.OFF, **options)


@pytest.fixture
def company(stub_model: StubModel) -> Iterator[Company]:
    stub_model.script = Script(calling)
    company = Company(stub_model)
    yield company
    company.model.client.close()


def run(agent: MultiStepAgent, task: str = "Oslo") -> Any:
    return agent.run(task)


def run_streamed(agent: MultiStepAgent, task: str = "Oslo") -> Any:
    return list(agent.run(task, stream=True))[-1].output


def run_with_streamed_outputs(agent: Any, task: str = "Oslo") -> Any:
    agent.stream_outputs = True
    return run_streamed(agent, task)


class TestCallingAgent(FrameworkContract):
    package, patch, framework = "smolagents", SmolagentsPatch, Framework.SMOLAGENTS
    owners = (MultiStepAgent, ToolCallingAgent, Tool, LocalPythonExecutor, RemotePythonExecutor)
    ways = (run, run_streamed, run_with_streamed_outputs)
    script = staticmethod(calling)
    final: ClassVar[Any] = ["final_answer.tool"]

    def agent(self, model: StubModel, name: str) -> MultiStepAgent:
        return Company(model).caller(name)

    def shape(self, name: str, *tools: Any) -> Any:
        return [*super().shape(name, *tools), self.final]

    def answer(self, city: str) -> str:
        return f"rain in {city}"

    def close(self, agent: MultiStepAgent) -> None:
        agent.model.client.close()


@pytest.mark.skipif(os.environ["AGL_FRAMEWORK_GROUP"] == "openai3", reason="LiteLLM needs openai 2")
@pytest.mark.filterwarnings("ignore:Item 'summary' on TypedDict class:UserWarning", "ignore:unclosed:ResourceWarning")
class TestCallingAgentWithLiteLLM(TestCallingAgent):
    def agent(self, model: StubModel, name: str) -> MultiStepAgent:
        options: dict[str, Any] = {"retry": False, "num_retries": 0, "extra_body": {"return_token_ids": True}}
        llm = LiteLLMModel("hosted_vllm/stub-model", model.openai_url, "any", **options)
        return ToolCallingAgent(tools=[weather], model=llm, name=name, verbosity_level=LogLevel.OFF)

    def close(self, agent: MultiStepAgent) -> None:
        collect_clients()


class TestCodingAgent(TestCallingAgent):
    script = staticmethod(coding)
    final = ANSWERING
    test_tool_has_its_parameters_and_its_result = None  # as code, which is tested below
    test_parallel_tools_are_kept_apart = None  # code calls one after the other

    def agent(self, model: StubModel, name: str) -> MultiStepAgent:
        return Company(model).coder(name)

    def looked_up(self, *cities: str) -> list[Any]:
        return [LOOKING]


# ---------------------------------------------------------------------- steps and tools


def test_code_and_the_tools_it_calls_say_what_they_did(stub_model: StubModel, company: Company) -> None:
    stub_model.script = Script(coding)

    trace = observed(run, company.coder())

    code, tool_in_code = (tool.attributes for tool in trace.tools[:2])
    assert json.loads(str(code["tool.parameters"])) == {"code": "print(weather(city='Oslo'))"}
    assert json.loads(str(code["tool.result"])) == {"logs": "rain in Oslo\n", "output": None}
    assert json.loads(str(tool_in_code["tool.parameters"])) == {"city": "Oslo"}
    assert "tool.call.id" not in tool_in_code


def test_tool_that_calls_itself_has_a_step_for_each_call(stub_model: StubModel, company: Company) -> None:
    @tool
    def count(down_from: int) -> str:
        """Counts down.

        Args:
            down_from: Where to begin.
        """
        return "liftoff" if down_from == 0 else count(down_from - 1)

    turns = [ToolCall.of("count", down_from=1), ToolCall.of("final_answer", answer="ok")]
    stub_model.script = Script([Answer("", (turn,)) for turn in turns])
    agent = company.caller()
    agent.tools["count"] = count

    trace = observed(run, agent)

    assert trace.shape[2] == ["count.tool", ["count.tool"]]
    assert trace.tools[1].attributes["tool.parameters"] == '{"down_from":0}'


def test_agent_without_a_name_is_called_as_its_kind(company: Company) -> None:
    trace = observed(run, company.caller(name=None))
    assert trace.shape[0] == "ToolCallingAgent.agent [ToolCallingAgent]"


def test_steps_between_which_the_program_works_are_not_its_parents(company: Company) -> None:
    def watch() -> None:
        for number, _ in enumerate(company.caller().run("Oslo", stream=True)):
            if number == 0:
                weather("Rome")

    trace = observed(watch)

    between = [tool for tool in trace.tools if tool.attributes["tool.result"] == "rain in Rome"]
    assert [tool.parent_id for tool in between] == [None]
    assert trace.named("forecaster.agent").status.status_code == "UNSET"


# ---------------------------------------------------------------------- several agents


def manage_by_call(is_done: bool) -> Turn:
    call = ToolCall.of("final_answer", answer="wet") if is_done else ToolCall.of("forecaster", task="Oslo")
    return Answer("", (call,))


def manage_by_code(is_done: bool) -> Turn:
    code = "final_answer('wet')" if is_done else "print(forecaster(task='Oslo'))"
    return f"Thought: Ask.\n<code>\n{code}\n</code>"


@pytest.mark.parametrize(
    ("kind", "manage", "step", "final"),
    [
        ("caller", manage_by_call, "forecaster.tool", ["final_answer.tool"]),
        ("coder", manage_by_code, "python_interpreter.tool", ANSWERING),
    ],
    ids=["call", "code"],
)
def test_managed_agent_works_beneath_the_step_of_its_manager(
    stub_model: StubModel, company: Company, kind: str, manage: Any, step: str, final: Any
) -> None:
    def react(request: Request) -> Turn:
        is_manager = "forecaster" in str(request.body.get("tools")) or "def forecaster" in request.prompt
        return manage("rain in" in request.text) if is_manager else calling(request)

    stub_model.script = Script(react)
    manager = getattr(company, kind)("manager", managed_agents=[company.caller(description="Knows the weather.")])

    trace = observed(run, manager)

    work = ["forecaster.agent [forecaster]", CALL, ["weather.tool"], CALL, ["final_answer.tool"]]
    assert trace.shape == ["manager.agent [manager]", CALL, [step, work], CALL, final]
    names = [triplet.metadata["agent_name"] for triplet in trace.triplets()]
    assert names == ["manager", "forecaster", "forecaster", "manager"]


# ---------------------------------------------------------------------- failures


def test_tool_that_was_called_wrongly_is_seen_the_next_time(company: Company) -> None:
    def look_twice() -> Any:
        with pytest.raises(AgentToolCallError):
            company.caller().execute_tool_call("weather", {"town": "Oslo"})
        return weather("Rome")

    trace = observed(look_twice)

    assert [tool.status.status_code for tool in trace.tools] == ["ERROR", "UNSET"]
    assert trace.tools[1].attributes["tool.result"] == trace.result == "rain in Rome"


def test_stream_that_is_left_early_is_closed(company: Company) -> None:
    def glance() -> Any:
        steps = company.caller("first").run("Oslo", stream=True)
        list(steps)
        unread = company.caller("unread").run("Oslo", stream=True)
        unread.close()
        return company.caller("second").run("Oslo")

    trace = observed(glance)

    assert [part[0] for part in trace.shape[1:]] == ["first.agent [first]", "second.agent [second]"]
