"""What every agent framework owes: the same promises for each, run by a driver of its own.

A driver is a subclass of `FrameworkContract` whose name begins with `Test`. It makes the forecaster, an agent with the
tool `weather` that looks up the city of its task and answers with what it found, and says what a run of it looks like.
What only one framework has is tested beside its driver.
"""

import asyncio
import gc
import json
import os
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from inspect import iscoroutinefunction
from typing import Any, ClassVar

import pytest

from agentlightning.adapter import Framework, TraceToMessages, auto_adapter, detect_framework
from agentlightning.instrumentation.patch import Patch
from agentlightning.litagent import FunctionalLitAgent
from agentlightning.runner import LitAgentRunner
from agentlightning.store import InMemoryLightningStore
from agentlightning.tracer import OtelTracer
from tests.frameworks.fresh_process import told_by
from tests.instrumentation.traces import Trace, observed, observed_async
from tests.stub_model.script import Answer, Failure, Request, Script, Turn
from tests.stub_model.server import StubModel, running
from tests.stub_model.words import ToolCall

CALL = ["openai.chat.completion"]
BACKEND_ERRORS: dict[str, Turn] = {
    "bad-request": Failure(400, "no such luck"),
    "rate-limit": Failure(429, "no such luck", retry_after_seconds=0.01),
    "server-error": Failure(500, "no such luck"),
    "cut-off": Answer("These words are never read.", cut_after_events=1),
}
MANY = 8


def forecast(request: Request) -> Turn:
    """Look up the city of the task, and answer with the tool's result."""
    if request.messages[-1].role == "tool":
        return f"I found {request.text}."
    return Answer("", (ToolCall.of("weather", city=request.text),))


def look_up(request: Request) -> Turn:
    """As `forecast`, where the framework writes the task into a prompt of its own."""
    if request.messages[-1].role == "tool":
        return forecast(request)
    return Answer("", (ToolCall.of("weather", city=re.findall(r"Look at (\w+)", request.prompt)[-1]),))


def weather_in(city: str) -> str:
    """What the tool returns."""
    if city == "Atlantis":
        raise LookupError("no such city")
    return f"rain in {city}"


def trace_of(way: Callable[..., Any], *args: Any) -> Trace:
    return asyncio.run(observed_async(way, *args)) if iscoroutinefunction(way) else observed(way, *args)


def evidence_of(error: BaseException | None) -> tuple[Any, ...]:
    """What a program may know of an error of the model's server."""
    response = getattr(error, "response", None)
    return getattr(error, "status_code", None), getattr(response, "headers", {}).get("retry-after")


def collect_clients() -> None:
    """Close what a framework left open, so that it is not blamed on the tests that come after."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()


def unobserved(way: Callable[..., Any], *args: Any) -> Any:
    return asyncio.run(way(*args)) if iscoroutinefunction(way) else way(*args)


class FrameworkContract:
    """The promises; a driver fills in what stands above them."""

    package: str
    """The first module of the framework."""
    framework: Framework
    patch: type[Patch]
    owners: Sequence[Any]
    """The classes and modules of the framework that the patch changes."""
    steps: Sequence[str] = ("agent_step", "tool_step")
    """Names in our module without which nothing can be recorded."""
    module: str | None = None
    """That module, if it is not the patch's."""
    ways: Sequence[Callable[..., Any]]
    """Each runs an agent with a task and returns its answer; the first is the usual one."""
    script: Callable[[Request], Turn] = staticmethod(forecast)
    tool = "weather.tool"
    """The span of the tool."""
    call: ClassVar[Any] = CALL
    name = "forecaster"
    """Which agent makes the calls, unless the test names it."""
    has_call_ids = True
    """Whether its tools know the ids of their calls."""
    tool_error: type[BaseException] | None = None
    """What a failing tool raises out of a run; None if the agent goes on."""
    tool_failure = "no such city"
    """What the span of a failing tool says."""
    left_behind: Sequence[str] = ()
    """The framework's own spans of a run that nothing of ours sees."""
    options: ClassVar[dict[str, Any]] = {}
    """Of the adapter."""

    def agent(self, model: StubModel, name: str) -> Any:
        raise NotImplementedError

    def shape(self, name: str, *tools: Any) -> Any:
        """A run of the agent of this name, with these tools between its calls."""
        return [f"{name}.agent [{name}]", self.call, *tools, self.call]

    def failed_shape(self, name: str) -> Any:
        """A run whose model fails at once."""
        return [f"{name}.agent [{name}]", self.call]

    def answer(self, city: str) -> str:
        return f"I found rain in {city}."

    def looked_up(self, *cities: str) -> list[Any]:
        """The spans of the tools that found these."""
        return [[self.tool] for _ in cities]

    def close(self, agent: Any) -> None:
        """Let go of what an agent holds open."""

    @pytest.fixture
    def model(self, stub_model: StubModel) -> StubModel:
        stub_model.script = Script(self.script)
        return stub_model

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "failure" in metafunc.fixturenames:  # of some failures, one way tells enough
            names = {way: BACKEND_ERRORS if way is self.ways[0] else ("bad-request", "cut-off") for way in self.ways}
            cases = {f"{way.__name__}-{name}": (way, BACKEND_ERRORS[name]) for way in names for name in names[way]}
            metafunc.parametrize(("way", "failure"), cases.values(), ids=cases)
        elif "way" in metafunc.fixturenames:
            metafunc.parametrize("way", self.ways)

    def run(self, model: StubModel, way: Callable[..., Any] | None = None, city: str = "Oslo") -> Trace:
        """The trace of one run of the forecaster."""
        agent = self.agent(model, self.name)
        try:
            return trace_of(way or self.ways[0], agent, city)
        finally:
            self.close(agent)

    # ------------------------------------------------------------------ an agent with a tool

    def test_every_way_to_run_is_one_tree(self, model: StubModel, way: Callable[..., Any]) -> None:
        trace = self.run(model, way)
        assert (trace.result, trace.error) == (self.answer("Oslo"), None)
        assert trace.shape == self.shape(self.name, *self.looked_up("Oslo"))

    @pytest.mark.claim(295, 296, 297)
    def test_adapters_read_the_framework_agents_token_ids_and_messages(
        self, model: StubModel, way: Callable[..., Any]
    ) -> None:
        trace = self.run(model, way)

        triplets = trace.triplets(**self.options)
        prompts = [tuple(triplet.prompt["token_ids"]) for triplet in triplets]
        assert prompts == [request.prompt_token_ids for request in model.requests]
        assert all(triplet.response["token_ids"] for triplet in triplets)
        for found in (triplets, auto_adapter(trace.spans).adapt(trace.spans)):
            assert [triplet.metadata["agent_name"] for triplet in found] == [self.name, self.name]
        assert detect_framework(trace.spans) is self.framework
        conversations = TraceToMessages().adapt(trace.spans)
        assert [conversation["messages"][-1]["role"] for conversation in conversations] == ["assistant"] * 2

    def test_tool_has_its_parameters_and_its_result(self, model: StubModel) -> None:
        tool = self.run(model).tools[0].attributes

        assert (tool["tool.name"], tool["tool.call.type"]) == ("weather", "function")
        assert (tool.get("tool.call.id") == "call_1_0_0") is self.has_call_ids
        assert tool["tool.result"] == "rain in Oslo"
        assert json.loads(str(tool["tool.parameters"])) == {"city": "Oslo"}

    def test_parallel_tools_are_kept_apart(self, model: StubModel) -> None:
        cities = ("Oslo", "Rome")
        both = Answer("", tuple(ToolCall.of("weather", city=city) for city in cities))
        model.script = Script(lambda request: both if len(model.requests) == 1 else self.script(request))

        trace = self.run(model)

        results = {tool.attributes["tool.result"]: tool.attributes.get("tool.call.id") for tool in trace.tools[:2]}
        ids = ("call_1_0_0", "call_1_0_1") if self.has_call_ids else (None, None)
        assert results == dict(zip(("rain in Oslo", "rain in Rome"), ids, strict=True))
        assert trace.shape == self.shape(self.name, *self.looked_up(*cities))

    # ------------------------------------------------------------------ failures

    def test_failing_tool_is_marked(self, model: StubModel) -> None:
        model.script = Script(lambda request: self.script(request) if len(model.requests) == 1 else "I do not know.")

        trace = self.run(model, city="Atlantis")

        assert (type(trace.error) if trace.error else None) is self.tool_error
        assert trace.tools[0].status.status_code == "ERROR"
        assert self.tool_failure in (trace.tools[0].status.description or "")
        if self.tool_error is not None:  # the whole run has failed
            [root] = [span for span in trace.spans if span.parent_id is None]
            assert self.tool_failure in (root.status.description or "")

    def test_backend_error_reaches_the_program_unchanged(
        self, model: StubModel, way: Callable[..., Any], failure: Turn
    ) -> None:
        model.script = Script(lambda request: failure)
        agent = self.agent(model, self.name)
        with pytest.raises(Exception) as plain:  # noqa: PT011 # each framework has its own
            unobserved(way, agent, "Oslo")
        self.close(agent)
        request_count = len(model.requests)

        trace = self.run(model, way)

        assert type(trace.error) is plain.type
        assert evidence_of(trace.error) == evidence_of(plain.value)
        assert len(model.requests) == 2 * request_count  # it is sent again as often as without us
        assert {span.status.status_code for span in trace.spans} == {"ERROR"}
        assert len(trace.model_calls) == request_count
        if failure is BACKEND_ERRORS["bad-request"]:  # after others some frameworks try once more
            assert trace.shape == self.failed_shape(self.name)

    def test_rollout_of_a_failing_model_has_failed(self, model: StubModel) -> None:
        model.script = Script(lambda request: Failure(429, "no such luck", retry_after_seconds=0.01))
        agent, way = self.agent(model, self.name), self.ways[0]
        store, runner = InMemoryLightningStore(), LitAgentRunner[Any](OtelTracer())

        async def rollout_async(task: str) -> Any:
            return await way(agent, task)

        work = rollout_async if iscoroutinefunction(way) else lambda task: way(agent, task)
        with runner.run_context(agent=FunctionalLitAgent(work), store=store), pytest.raises(Exception) as raised:  # noqa: PT011
            asyncio.run(runner.step("Oslo"))
        self.close(agent)

        (rollout,) = asyncio.run(store.query_rollouts())
        (attempt,) = asyncio.run(store.query_attempts(rollout.rollout_id))
        assert (rollout.status, attempt.status) == ("failed", "failed")
        assert (attempt.metadata or {})["error"]["type"] == raised.type.__name__

    def test_mistake_of_ours_does_not_reach_the_agent(
        self, model: StubModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        for step in self.steps:
            monkeypatch.setattr(f"{self.module or self.patch.__module__}.{step}", None)
        assert self.run(model).result == self.answer("Oslo")
        assert f"A step of {self.patch.name} could not be recorded." in caplog.text

    # ------------------------------------------------------------------ many at once

    def test_many_agents_at_once_keep_their_own_steps(self, model: StubModel) -> None:
        names = [f"agent{number}" for number in range(MANY)]
        agents = [self.agent(model, name) for name in names]
        way = self.ways[0]

        async def work() -> None:
            run = way if iscoroutinefunction(way) else lambda *args: asyncio.to_thread(way, *args)
            await asyncio.gather(*(run(agent, name) for agent, name in zip(agents, names, strict=True)))

        trace = asyncio.run(observed_async(work))

        for agent in agents:
            self.close(agent)
        assert sorted(trace.shape[1:]) == sorted(self.shape(name, *self.looked_up(name)) for name in names)

    def test_traces_of_threads_do_not_mix(self, model: StubModel) -> None:
        names = [f"agent{number}" for number in range(4)]

        agents = [self.agent(model, name) for name in names]

        with ThreadPoolExecutor(len(names)) as pool:
            traces = list(pool.map(partial(trace_of, self.ways[0]), agents, names))

        for agent in agents:
            self.close(agent)
        assert [trace.result for trace in traces] == [self.answer(name) for name in names]
        assert [trace.shape for trace in traces] == [self.shape(name, *self.looked_up(name)) for name in names]

    # ------------------------------------------------------------------ applying and undoing

    def test_undone_patch_leaves_the_framework_as_it_was(self) -> None:
        before = [dict(vars(owner)) for owner in self.owners]

        with self.patch() as patch:
            assert patch.is_applied
            assert [dict(vars(owner)) for owner in self.owners] != before

        assert [dict(vars(owner)) for owner in self.owners] == before

    def test_nothing_is_recorded_once_undone(self, model: StubModel) -> None:
        agent = self.agent(model, self.name)
        tracer = OtelTracer(instrument=False)

        recorded = trace_of(self.ways[0], agent, "Oslo")
        model.requests.clear()
        with tracer.lifespan(), tracer._trace_context_sync():
            result = unobserved(self.ways[0], agent, "Oslo")
        self.close(agent)

        assert recorded.spans
        assert result == self.answer("Oslo")
        assert [span.name for span in tracer.get_last_trace()] == list(self.left_behind)

    def test_framework_may_be_imported_later(self) -> None:
        place = [type(self).__module__, type(self).__name__, self.package]
        program = "from tests.frameworks.contract import main; main()"
        assert told_by(program, *place) == self.shape(self.name, *self.looked_up("Oslo"))


def main() -> None:
    """Trace a run of a framework that is imported only then, and print its shape."""
    module, kind, package = sys.argv[1:]
    tracer = OtelTracer()
    with running() as model, tracer.lifespan():
        assert package not in sys.modules
        driver: FrameworkContract = getattr(import_module(module), kind)()
        model.script = Script(driver.script)
        agent = driver.agent(model, driver.name)
        trace = trace_of(driver.ways[0], agent, "Oslo")
        driver.close(agent)
        print("\n" + json.dumps(trace.shape), flush=True)
        os._exit(0)  # CrewAI prints more at the end of its first program
