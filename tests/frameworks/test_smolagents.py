"""Agents of smolagents: `agentlightning.instrumentation.smolagents`."""

import asyncio
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from smolagents import CodeAgent, LogLevel, MultiStepAgent, OpenAIServerModel, Tool, ToolCallingAgent, tool
from smolagents.local_python_executor import LocalPythonExecutor
from smolagents.remote_executors import RemotePythonExecutor
from smolagents.utils import AgentGenerationError, AgentToolCallError

from agentlightning.adapter import TraceToMessages
from agentlightning.instrumentation import instrument_all, uninstrument_all
from agentlightning.instrumentation.smolagents import SmolagentsPatch
from tests.frameworks.fresh_process import told_by
from tests.instrumentation.observing import Trace, observed, observed_async
from tests.stub_model.script import Answer, Failure, Request, Script, Turn
from tests.stub_model.server import StubModel
from tests.stub_model.words import ToolCall

CALL = ["openai.chat.completion"]
LOOKING = ["python_interpreter.tool", ["weather.tool"]]
ANSWERING = ["python_interpreter.tool", ["final_answer.tool"]]


@tool
def weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: Its name.
    """
    if city == "Atlantis":
        raise LookupError("no such city")
    return f"rain in {city}"


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


# ---------------------------------------------------------------------- an agent with a tool


def assert_is_forecast(trace: Trace, stub_model: StubModel, looking: Any, answering: Any) -> None:
    """The whole trace of one run of the forecaster, token ids included."""
    assert trace.result == "rain in Oslo"
    assert trace.shape == ["forecaster.agent [forecaster]", CALL, looking, CALL, answering]
    triplets = trace.triplets()
    assert [triplet.metadata["agent_name"] for triplet in triplets] == ["forecaster", "forecaster"]
    prompts = [tuple(triplet.prompt["token_ids"]) for triplet in triplets]
    assert prompts == [request.prompt_token_ids for request in stub_model.requests]
    assert all(triplet.response["token_ids"] for triplet in triplets)


@pytest.mark.parametrize("streams_outputs", [False, True])
@pytest.mark.parametrize("way", [run, run_streamed])
def test_run_of_a_calling_agent_is_one_tree(
    stub_model: StubModel, company: Company, way: Any, streams_outputs: bool
) -> None:
    agent = company.caller(stream_outputs=streams_outputs)

    trace = observed(way, agent)

    assert_is_forecast(trace, stub_model, ["weather.tool"], ["final_answer.tool"])


@pytest.mark.parametrize("streams_outputs", [False, True])
@pytest.mark.parametrize("way", [run, run_streamed])
def test_run_of_a_coding_agent_is_one_tree(
    stub_model: StubModel, company: Company, way: Any, streams_outputs: bool
) -> None:
    stub_model.script = Script(coding)
    agent = company.coder(stream_outputs=streams_outputs)

    trace = observed(way, agent)

    assert_is_forecast(trace, stub_model, LOOKING, ANSWERING)


@pytest.mark.parametrize(("script", "kind"), [(calling, Company.caller), (coding, Company.coder)])
def test_run_is_read_as_messages(stub_model: StubModel, company: Company, script: Any, kind: Any) -> None:
    stub_model.script = Script(script)

    conversations = TraceToMessages().adapt(observed(run, kind(company)).spans)

    assert [conversation["messages"][0]["role"] for conversation in conversations] == ["system", "system"]
    assert [conversation["messages"][-1]["role"] for conversation in conversations] == ["assistant", "assistant"]


def test_tool_says_what_it_was_asked_and_answered(company: Company) -> None:
    trace = observed(run, company.caller())

    assert trace.tools[0].attributes == {
        "tool.name": "weather",
        "tool.call.type": "function",
        "tool.call.id": "call_1_0_0",
        "tool.parameters": '{"city":"Oslo"}',
        "tool.result": "rain in Oslo",
    }


def test_code_and_the_tools_it_calls_say_what_they_did(stub_model: StubModel, company: Company) -> None:
    stub_model.script = Script(coding)

    trace = observed(run, company.coder())

    code, tool_in_code = (tool.attributes for tool in trace.tools[:2])
    assert json.loads(str(code["tool.parameters"])) == {"code": "print(weather(city='Oslo'))"}
    assert json.loads(str(code["tool.result"])) == {"logs": "rain in Oslo\n", "output": None}
    assert json.loads(str(tool_in_code["tool.parameters"])) == {"city": "Oslo"}
    assert "tool.call.id" not in tool_in_code


def test_parallel_tools_are_told_apart(stub_model: StubModel, company: Company) -> None:
    cities = ("Oslo", "Rome", "Oslo")
    together = Answer("", tuple(ToolCall.of("weather", city=city) for city in cities))
    stub_model.script = Script([together, Answer("", (ToolCall.of("final_answer", answer="wet"),))])

    trace = observed(run, company.caller())

    told = {str(tool.attributes["tool.call.id"]): tool.attributes["tool.result"] for tool in trace.tools[:3]}
    assert told.keys() == {"call_1_0_0", "call_1_0_1", "call_1_0_2"}
    assert told["call_1_0_1"] == "rain in Rome"
    assert trace.shape[:-1] == ["forecaster.agent [forecaster]", CALL, *[["weather.tool"]] * 3, CALL]


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


def managing(call_or_code: Any) -> Any:
    """Leaves the work to the agent it manages; what that says is found in the report."""

    def react(request: Request) -> Turn:
        is_manager = "forecaster" in str(request.body.get("tools")) or "def forecaster" in request.prompt
        if not is_manager:
            return calling(request)
        return call_or_code("rain in" in request.text)

    return react


def test_managed_agent_works_beneath_the_call_of_its_manager(stub_model: StubModel, company: Company) -> None:
    def turn(is_done: bool) -> Turn:
        final = ToolCall.of("final_answer", answer="wet")
        return Answer("", (final if is_done else ToolCall.of("forecaster", task="Oslo"),))

    stub_model.script = Script(managing(turn))
    member = company.caller(description="Knows the weather.")
    manager = company.caller("manager", managed_agents=[member])

    trace = observed(run, manager)

    work = ["forecaster.agent [forecaster]", CALL, ["weather.tool"], CALL, ["final_answer.tool"]]
    assert trace.shape == ["manager.agent [manager]", CALL, ["forecaster.tool", work], CALL, ["final_answer.tool"]]
    assert len(trace.triplets(agent_match="forecaster")) == 2


def test_managed_agent_works_beneath_the_code_of_its_manager(stub_model: StubModel, company: Company) -> None:
    def turn(is_done: bool) -> Turn:
        code = "final_answer('wet')" if is_done else "print(forecaster(task='Oslo'))"
        return f"Thought: Ask.\n<code>\n{code}\n</code>"

    stub_model.script = Script(managing(turn))
    member = company.caller(description="Knows the weather.")
    manager = company.coder("manager", managed_agents=[member])

    trace = observed(run, manager)

    work = ["forecaster.agent [forecaster]", CALL, ["weather.tool"], CALL, ["final_answer.tool"]]
    assert trace.shape == ["manager.agent [manager]", CALL, ["python_interpreter.tool", work], CALL, ANSWERING]
    names = [triplet.metadata["agent_name"] for triplet in trace.triplets()]
    assert names == ["manager", "forecaster", "forecaster", "manager"]


# ---------------------------------------------------------------------- failures


def test_failing_tool_is_marked_and_the_agent_goes_on(stub_model: StubModel, company: Company) -> None:
    turns = [ToolCall.of("weather", city="Atlantis"), ToolCall.of("nonsense"), ToolCall.of("final_answer", answer="!")]
    stub_model.script = Script([Answer("", (turn,)) for turn in turns])

    trace = observed(run, company.caller())

    assert trace.result == "!"
    assert [span.name for span in trace.tools] == ["weather.tool", "nonsense.tool", "final_answer.tool"]
    assert [span.status.status_code for span in trace.tools] == ["ERROR", "ERROR", "UNSET"]
    assert "LookupError: no such city" in (trace.tools[0].status.description or "")


def test_failing_code_is_marked_and_the_agent_goes_on(stub_model: StubModel, company: Company) -> None:
    codes = ["weather(city='Atlantis')", "final_answer('!')"]
    stub_model.script = Script([f"Thought: So.\n<code>\n{code}\n</code>" for code in codes])

    trace = observed(run, company.coder())

    assert trace.result == "!"
    assert [span.status.status_code for span in trace.tools] == ["ERROR", "ERROR", "UNSET", "UNSET"]
    assert trace.tools[1].status.description == "LookupError: no such city"


def test_tool_that_was_called_wrongly_is_seen_the_next_time(company: Company) -> None:
    def look_twice() -> Any:
        with pytest.raises(AgentToolCallError):
            company.caller().execute_tool_call("weather", {"town": "Oslo"})
        return weather("Rome")

    trace = observed(look_twice)

    assert [tool.status.status_code for tool in trace.tools] == ["ERROR", "UNSET"]
    assert trace.tools[1].attributes["tool.result"] == trace.result == "rain in Rome"


@pytest.mark.parametrize("way", [run, run_streamed])
def test_failing_model_reaches_the_program_unchanged(stub_model: StubModel, company: Company, way: Any) -> None:
    stub_model.script = Script([Failure(500)])

    trace = observed(way, company.caller())

    assert isinstance(trace.error, AgentGenerationError)
    assert trace.shape == ["forecaster.agent [forecaster]", CALL]
    assert [span.status.status_code for span in trace.spans] == ["ERROR", "ERROR"]


def test_stream_that_is_left_early_is_closed(company: Company) -> None:
    def glance() -> Any:
        steps = company.caller("first").run("Oslo", stream=True)
        list(steps)
        unread = company.caller("unread").run("Oslo", stream=True)
        unread.close()
        return company.caller("second").run("Oslo")

    trace = observed(glance)

    assert [part[0] for part in trace.shape[1:]] == ["first.agent [first]", "second.agent [second]"]


def test_mistake_of_ours_does_not_reach_the_agent(
    company: Company, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("agentlightning.instrumentation.smolagents.agent_step", None)
    monkeypatch.setattr("agentlightning.instrumentation.smolagents.tool_step", None)

    results = [observed(way, company.caller()).result for way in (run, run_streamed)]

    assert results == ["rain in Oslo"] * 2
    assert caplog.text.count("A step of smolagents could not be recorded.") == 6


# ---------------------------------------------------------------------- at the same time


async def test_agents_at_the_same_time_keep_their_own_steps(company: Company) -> None:
    members = [company.caller(name) for name in ("north", "south")]

    async def both() -> Any:
        return await asyncio.gather(*(asyncio.to_thread(run, agent, agent.name) for agent in members))

    trace = await observed_async(both)

    assert sorted(trace.shape[1:]) == [
        [f"{name}.agent [{name}]", CALL, ["weather.tool"], CALL, ["final_answer.tool"]] for name in ("north", "south")
    ]
    for found in (span for span in trace.tools if span.name == "weather.tool"):
        assert trace.named(str(found.attributes["tool.result"]).split()[-1] + ".agent").span_id == found.parent_id


def test_threads_do_not_mix(stub_model: StubModel, company: Company) -> None:
    stub_model.script = Script(coding)
    names = ("north", "south", "east", "west")

    with ThreadPoolExecutor(len(names)) as pool:
        traces = list(pool.map(lambda name: observed(run, company.coder(name), name), names))

    for name, trace in zip(names, traces, strict=True):
        assert trace.result == f"rain in {name}"
        assert trace.shape == [f"{name}.agent [{name}]", CALL, LOOKING, CALL, ANSWERING]


# ---------------------------------------------------------------------- applying and undoing


def test_undone_patch_leaves_smolagents_as_it_was() -> None:
    owners = [MultiStepAgent, ToolCallingAgent, Tool, LocalPythonExecutor, RemotePythonExecutor]
    before = [dict(vars(owner)) for owner in owners]

    with SmolagentsPatch() as patch:
        assert patch.is_applied
        assert all(dict(vars(owner)) != was for owner, was in zip(owners, before, strict=True))

    assert [dict(vars(owner)) for owner in owners] == before


def test_nothing_is_recorded_once_undone(company: Company) -> None:
    def run_unpatched() -> Any:
        uninstrument_all()
        try:
            return run(company.caller())
        finally:
            instrument_all()

    trace = observed(run_unpatched)

    assert (trace.result, trace.spans) == ("rain in Oslo", [])


def test_smolagents_may_be_imported_later(stub_model: StubModel) -> None:
    stub_model.script = Script(calling)
    program = """
        import json, sys
        from agentlightning.tracer import OtelTracer
        tracer = OtelTracer()
        tracer.init_worker(0)
        assert "smolagents" not in sys.modules
        from tests.frameworks.test_smolagents import Company, run
        class Model: openai_url = sys.argv[1]
        with tracer._trace_context_sync():
            run(Company(Model()).caller())
        print(json.dumps(sorted(span.name for span in tracer.get_last_trace())))
    """

    names = told_by(program, stub_model.openai_url)

    assert names == ["final_answer.tool", "forecaster.agent", *CALL, *CALL, "weather.tool"]
