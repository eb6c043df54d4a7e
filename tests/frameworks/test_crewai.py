"""Crews of CrewAI: `agentlightning.instrumentation.frameworks.crewai`."""

import asyncio
import json
import os
import threading
import warnings
from pathlib import Path
from typing import Any

os.environ["CREWAI_DISABLE_TELEMETRY"] = "true"  # read when it is imported, too
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # CrewAI warns of itself when it is imported
    from crewai import LLM, Agent, Crew, Flow, Process, Task
    from crewai.events import crewai_event_bus
    from crewai.events.types.task_events import TaskCompletedEvent
    from crewai.flow.flow import listen, start
    from crewai.tools import tool

from agentlightning.adapter import Framework
from agentlightning.events import Progress, progress_of, subtasks, suggestions
from agentlightning.instrumentation.frameworks.crewai import CrewAIPatch, tool_callers
from agentlightning.store import InMemoryLightningStore
from agentlightning.tracer import OtelTracer
from tests.frameworks.contract import CALL, FrameworkContract, look_up, weather_in
from tests.instrumentation.traces import Trace, observed, observed_async
from tests.stub_model.script import Answer, Request, Script, Turn
from tests.stub_model.server import StubModel
from tests.stub_model.words import ToolCall

RUNS_IN = ("openai2", "lowest")
IS_LOWEST = os.environ["AGL_FRAMEWORK_GROUP"] == "lowest"

pytestmark = pytest.mark.filterwarnings(
    "ignore:(.* is )?deprecated:DeprecationWarning",  # CrewAI uses fields it has deprecated
    "ignore:Item 'summary' on TypedDict class:UserWarning",  # of LiteLLM
    "ignore:unclosed:ResourceWarning",  # neither closes its clients
)

LOOK_UP = Answer("", (ToolCall.of("weather", city="Oslo"),))
FORECAST = [LOOK_UP, "It is sunny.", "Take a hat."]
"""The three answers that a crew of two needs."""
FORECASTER = ["Forecaster.agent [Forecaster]", CALL, ["weather.tool"], CALL]
WRITER = ["Writer.agent [Writer]", CALL]
CREW = ["crew.crew", ["look.task", FORECASTER], ["write.task", WRITER]]


@pytest.fixture(autouse=True)
def at_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """CrewAI keeps files in the user's home, and asks on the terminal whether it may trace."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setenv("CREWAI_TRACING_ENABLED", "false")


@tool("weather")
def weather(city: str) -> str:
    """The weather of a city."""
    return weather_in(city)


class Team:
    """Makes agents that share a model."""

    def __init__(self, stub_model: StubModel, model: str = "openai/stub-model", **options: Any) -> None:
        asked_for = {"extra_body": {"return_token_ids": True}, "max_retries": 0, **options}
        self.llm = LLM(model=model, base_url=stub_model.openai_url, api_key="any", **asked_for)

    def agent(self, role: str, *tools: Any, **options: Any) -> Agent:
        return Agent(role=role, goal="to help", backstory="long", llm=self.llm, tools=list(tools), **options)

    def crew(self, **options: Any) -> Crew:
        """Two agents and two tasks, the second of which writes about what the first found."""
        forecaster, writer = self.agent("Forecaster", weather), self.agent("Writer")
        look = Task(name="look", description="Look at {city}.", expected_output="the weather", agent=forecaster)
        write = Task(name="write", description="Write.", expected_output="advice", agent=writer)
        return Crew(agents=[forecaster, writer], tasks=[look, write], **options)

    def crew_of_one(self, *tools: Any, role: str = "Forecaster", **options: Any) -> Crew:
        agent = self.agent(role, *tools)
        task = Task(name="look", description="Look.", expected_output="the weather", agent=agent, **options)
        return Crew(agents=[agent], tasks=[task])


@pytest.fixture
def team(stub_model: StubModel) -> Team:
    stub_model.script = Script(FORECAST)
    return Team(stub_model)


INPUTS = {"city": "Oslo"}


def agents_of(trace: Trace) -> list[str]:
    return [triplet.metadata["agent_name"] for triplet in trace.triplets()]


def run(crew: Crew, method: str) -> Trace:
    """Runs a crew from a program that has no event loop, or one."""
    return asyncio.run(observed_async(crew.akickoff)) if method == "akickoff" else observed(crew.kickoff)


def check_token_ids(trace: Trace, stub_model: StubModel) -> None:
    """Every call has the ids of its prompt as the model read it, and those of its answer."""
    triplets = trace.triplets()
    assert [t.prompt["token_ids"] for t in triplets] == [list(r.prompt_token_ids) for r in stub_model.requests]
    assert all(triplet.response["token_ids"] for triplet in triplets)


def kick_off(crew: Crew, city: str) -> str:
    return str(crew.kickoff(inputs={"city": city}).raw)


async def kick_off_in_thread(crew: Crew, city: str) -> str:
    return str((await crew.kickoff_async(inputs={"city": city})).raw)


async def kick_off_async(crew: Crew, city: str) -> str:
    return str((await crew.akickoff(inputs={"city": city})).raw)


def kick_off_streamed(crew: Crew, city: str) -> str:
    crew.stream = True
    streaming = crew.kickoff(inputs={"city": city})
    list(streaming)
    return str(streaming.result.raw)


async def kick_off_streamed_async(crew: Crew, city: str) -> str:
    crew.stream = True
    streaming = await crew.akickoff(inputs={"city": city})
    [chunk async for chunk in streaming]
    return str(streaming.result.raw)


class TestCrewAI(FrameworkContract):
    package, patch, framework = "crewai", CrewAIPatch, Framework.CREWAI
    owners = (type(crewai_event_bus), Crew, Task, Agent, Flow, *(owner for owner, _ in tool_callers()))
    steps = ("tool_step",)
    ways = (kick_off, kick_off_in_thread, kick_off_async, kick_off_streamed, kick_off_streamed_async)
    script = staticmethod(look_up)

    def team(self, model: StubModel) -> Team:
        return Team(model)

    def agent(self, model: StubModel, name: str) -> Crew:
        agent = self.team(model).agent(name, weather)
        look = Task(name="look", description="Look at {city}.", expected_output="the weather", agent=agent)
        return Crew(agents=[agent], tasks=[look])

    def shape(self, name: str, *tools: Any) -> Any:
        return ["crew.crew", ["look.task", [f"{name}.agent [{name}]", CALL, *tools, CALL]]]

    def failed_shape(self, name: str) -> Any:
        attempt = [f"{name}.agent [{name}]", CALL]
        if IS_LOWEST:  # it begins again beneath the attempt that failed
            return ["crew.crew", ["look.task", [*attempt, [*attempt, attempt]]]]
        return ["crew.crew", ["look.task", attempt, attempt, attempt]]


class TestCrewAIWithLiteLLM(TestCrewAI):
    ways = (kick_off, kick_off_in_thread, kick_off_async)  # in streams of LiteLLM it loses the ids of tool calls

    def team(self, model: StubModel) -> Team:
        team = Team(model, "hosted_vllm/stub-model", is_litellm=True)
        object.__setattr__(team.llm, "supports_function_calling", lambda: True)  # which LiteLLM does not know of it
        return team

    def failed_shape(self, name: str) -> Any:
        """CrewAI does not try again what LiteLLM refuses."""
        return ["crew.crew", ["look.task", [f"{name}.agent [{name}]", CALL]]]


# ---------------------------------------------------------------------- crews and their tasks


@pytest.mark.claim(289, 341)
def test_a_crew_gives_a_tree_of_tasks_agents_tools_and_calls(team: Team, stub_model: StubModel) -> None:
    trace = observed(team.crew().kickoff, inputs=INPUTS)

    assert trace.result.raw == "Take a hat."
    assert trace.shape == CREW
    assert agents_of(trace) == ["Forecaster", "Forecaster", "Writer"]
    check_token_ids(trace, stub_model)


def test_tasks_say_what_they_are_and_what_came_out(team: Team) -> None:
    trace = observed(team.crew().kickoff, inputs=INPUTS)

    crew, task = trace.named("crew.crew").attributes, trace.named("look.task").attributes
    assert (crew["crewai.crew.tasks"], crew["crewai.crew.process"], crew["crewai.crew.output"]) == (
        2,
        "sequential",
        "Take a hat.",
    )
    assert (task["crewai.task.name"], task["crewai.task.description"]) == ("look", "Look at Oslo.")
    assert (task["crewai.task.expected_output"], task["crewai.task.output"]) == ("the weather", "It is sunny.")
    assert task["crewai.task.agent_role"] == "Forecaster"
    assert trace.named("write.task").attributes["crewai.task.context"] == "It is sunny."


@pytest.mark.claim(342)
async def test_a_crew_is_half_done_while_its_second_task_of_two_runs(team: Team, stub_model: StubModel) -> None:
    answers, has_been_seen = iter(FORECAST), threading.Event()

    def answer(_request: Request) -> Turn:
        turn = next(answers)
        if turn == FORECAST[-1]:
            has_been_seen.wait(60)
        return turn

    stub_model.script = Script(answer)
    store = InMemoryLightningStore()
    rollout = await store.start_rollout("task")
    ids = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
    progress = Progress()
    with OtelTracer().lifespan() as tracer:
        async with tracer.trace_context(store=store, **ids):
            running = asyncio.create_task(team.crew().kickoff_async(inputs=INPUTS))
            while (progress.completed, progress.open) != (1, 1) and not running.done():
                await asyncio.sleep(0.02)
                spans = await store.query_spans(rollout.rollout_id), await store.query_open_spans(rollout.rollout_id)
                progress = progress_of(subtasks([*spans[0], *spans[1]]))
            has_been_seen.set()
            await running

    assert (progress.completed, progress.open, progress.total, progress.fraction) == (1, 1, 2, 0.5)


@pytest.mark.claim(340)
def test_roles_written_in_yaml_are_stripped(team: Team) -> None:
    trace = observed(team.crew_of_one(weather, role="Forecaster of {city}\n").kickoff, inputs=INPUTS)
    assert agents_of(trace) == ["Forecaster of Oslo"] * 2


@pytest.mark.parametrize("method", ["kickoff", "akickoff"])
def test_tasks_at_the_same_time_stand_beside_each_other(stub_model: StubModel, method: str) -> None:
    team = Team(stub_model)
    agents = [team.agent("Forecaster"), team.agent("Writer")]
    tasks = [
        Task(name=a.role, description=a.role, expected_output="all", agent=a, async_execution=True) for a in agents
    ]
    last = Task(name="last", description="last", expected_output="all", agent=agents[0])
    crew = Crew(agents=agents, tasks=[*tasks, last])

    trace = run(crew, method)

    one, two = ["Forecaster.agent [Forecaster]", CALL], ["Writer.agent [Writer]", CALL]
    name, *found = trace.shape
    assert (name, sorted(found)) == ("crew.crew", [["Forecaster.task", one], ["Writer.task", two], ["last.task", one]])


# ---------------------------------------------------------------------- several agents


HAND_OVER = Answer("", (ToolCall.of("delegate_work_to_coworker", task="look", context="now", coworker="Forecaster"),))


def boss(name: str) -> list[Any]:
    return [f"{name}.agent [{name}]", CALL, ["delegate_work_to_coworker.tool", FORECASTER], CALL]


@pytest.mark.parametrize("method", ["kickoff", "akickoff"])
def test_a_hierarchical_crew_has_a_manager(team: Team, stub_model: StubModel, method: str) -> None:
    stub_model.script = Script([HAND_OVER, *FORECAST])
    task = Task(name="t", description="d", expected_output="e")
    agents = [team.agent("Forecaster", weather)]
    crew = Crew(agents=agents, tasks=[task], process=Process.hierarchical, manager_llm=team.llm)

    trace = run(crew, method)

    assert trace.shape == ["crew.crew", ["t.task", boss("Crew Manager")]]
    assert trace.named("t.task").attributes["crewai.task.agent_role"] == "Crew Manager"


def test_an_agent_without_a_crew_is_recorded(team: Team) -> None:
    trace = observed(team.agent("Forecaster", weather).kickoff, "What is the weather?")
    assert trace.shape == FORECASTER


def test_a_flow_gives_its_methods(team: Team) -> None:
    class Advice(Flow):
        @start()
        def look(self) -> str:
            return str(team.agent("Forecaster", weather).kickoff("What is the weather?").raw)

        @listen(look)
        async def write(self, found: str) -> str:
            return str((await team.agent("Writer").kickoff_async(found)).raw)

    trace = observed(lambda: Advice().kickoff())

    assert trace.shape == ["Advice.flow", ["look.method", FORECASTER], ["write.method", WRITER]]
    assert trace.named("Advice.flow").attributes["crewai.flow.output"] == "Take a hat."


# ---------------------------------------------------------------------- tools, guardrails and models of other kinds


def test_tools_that_are_called_in_plain_text_are_recorded(team: Team, stub_model: StubModel) -> None:
    call = 'Thought: I look\nAction: weather\nAction Input: {"city": "Oslo"}'
    stub_model.script = Script([call, "Thought: I now know\nFinal Answer: It is sunny."])
    object.__setattr__(team.llm, "supports_function_calling", lambda: False)

    trace = observed(team.crew_of_one(weather).kickoff)

    assert trace.shape == ["crew.crew", ["look.task", FORECASTER]]
    assert json.loads(str(trace.tools[0].attributes["tool.parameters"])) == {"city": "Oslo"}
    assert "tool.call.id" not in trace.tools[0].attributes


@pytest.mark.claim(343, 344)
def test_a_guardrail_that_refuses_makes_the_agent_try_again(team: Team, stub_model: StubModel) -> None:
    def is_good(output: Any) -> tuple[bool, Any]:
        return (True, output.raw) if output.raw == "good" else (False, "not good")

    stub_model.script = Script(["bad", "good"])

    trace = observed(team.crew_of_one(guardrail=is_good).kickoff)

    attempt = ["Forecaster.agent [Forecaster]", CALL]
    assert trace.shape == ["crew.crew", ["look.task", attempt, ["guardrail"], attempt, ["guardrail"]]]
    verdicts = [span.attributes for span in trace.spans if span.name == "guardrail"]
    assert [verdict["crewai.guardrail.success"] for verdict in verdicts] == [False, True]
    assert verdicts[0]["crewai.guardrail.error"] == "not good"
    [suggestion] = suggestions(trace.spans)
    assert suggestion.sentence.startswith("A guardrail refused the answers of 'look' in 1 of 2 cases")


def test_a_guardrail_that_asks_a_model_has_an_agent_of_its_own(team: Team, stub_model: StubModel) -> None:
    stub_model.script = Script(["fine", '{"valid": true, "feedback": null}'])
    trace = observed(team.crew_of_one(guardrail="It must be fine.").kickoff)
    assert agents_of(trace) == ["Forecaster", "Guardrail Agent"]
    assert trace.shape[1][2] == ["guardrail", ["Guardrail Agent.agent [Guardrail Agent]", CALL]]


# ---------------------------------------------------------------------- failures


async def test_a_crew_that_is_cancelled_ends_its_spans(team: Team, stub_model: StubModel) -> None:
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()

    def hesitate(request: Request) -> Turn:
        loop.call_soon_threadsafe(asked.set)
        return Answer("too late", latency_seconds=1)

    async def give_up() -> None:
        running = asyncio.create_task(team.crew_of_one().akickoff())
        await asked.wait()
        running.cancel()
        await asyncio.wait([running])

    stub_model.script = Script(hesitate)
    trace = await observed_async(give_up)

    steps = [span for span in trace.spans if span.name != CALL[0]]  # the call is made on a thread, which goes on
    assert [span.name for span in steps] == ["Forecaster.agent", "look.task", "crew.crew"]
    assert {span.status.status_code for span in steps} == {"ERROR"}


# ---------------------------------------------------------------------- applied and undone


def test_listeners_of_the_program_hear_what_they_heard(team: Team) -> None:
    heard: list[str] = []

    def hear(source: Any, event: Any) -> None:
        heard.append(source.name)

    with crewai_event_bus.scoped_handlers():
        crewai_event_bus.on(TaskCompletedEvent)(hear)
        observed(team.crew().kickoff, inputs=INPUTS)
        crewai_event_bus.flush()

    assert sorted(heard) == ["look", "write"]
