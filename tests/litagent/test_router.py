"""AgentRouter: the right agent, called as it is written, with its own resources, under its own name."""

import asyncio
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest

from agentlightning.adapter import TracerTraceToTriplet
from agentlightning.emitter import emit_message
from agentlightning.errors import ConfigurationError, RolloutFailed
from agentlightning.litagent import LitAgent, rollout
from agentlightning.litagent.command import CommandAgent
from agentlightning.litagent.invocation import AgentRouter, Route
from agentlightning.tracer import get_active_tracer
from agentlightning.types import LLM, NamedResources, PromptTemplate, RolloutConfig
from tests.litagent.workbench import Workbench

TALK = {"gen_ai.prompt.0.content": "Hi", "gen_ai.completion.0.content": "Ho", "gen_ai.request.model": "m"}


class Plain(LitAgent[Any]):
    """Notes how it was called; written plainly."""

    def __init__(self, result: float = 1.0) -> None:
        super().__init__()
        self.result = result
        self.seen: list[tuple[str, NamedResources, bool]] = []

    def training_rollout(self, task: Any, resources: NamedResources, rollout: Any) -> float:
        return self.note("training", resources)

    def validation_rollout(self, task: Any, resources: NamedResources, rollout: Any) -> float:
        return self.note("validation", resources)

    def note(self, kind: str, resources: NamedResources) -> float:
        emit_message(f"{kind} of {self.result}")
        self.seen.append((kind, resources, threading.current_thread() is threading.main_thread()))
        return self.result


class Coroutine(Plain):
    """The same, as coroutines."""

    async def training_rollout_async(self, task: Any, resources: NamedResources, rollout: Any) -> float:
        await asyncio.sleep(0)
        return self.note("training", resources)

    async def validation_rollout_async(self, task: Any, resources: NamedResources, rollout: Any) -> float:
        await asyncio.sleep(0)
        return self.note("validation", resources)


class TakesOnlyATask(LitAgent[Any]):
    def rollout(self, task: Any) -> float:  # type: ignore[override]
        return 1.0


def kind_is(kind: str) -> Callable[[Any], bool]:
    return lambda task: bool(task["kind"] == kind)


def router_of(plain: LitAgent[Any], coroutine: LitAgent[Any], **options: Any) -> AgentRouter[Any]:
    return AgentRouter({"sql": (kind_is("sql"), plain), "math": (kind_is("math"), coroutine)}, **options)


async def test_the_first_route_that_matches_is_taken(workbench: Workbench) -> None:
    routes = [Route("never", Plain(0.1), lambda task: False), Route("first", Plain(0.2), lambda task: True)]
    outcome = await workbench.run(AgentRouter([*routes, Route("second", Plain(0.3), lambda task: True)]))
    assert outcome.reward == 0.2


@pytest.mark.parametrize(("mode", "kind"), [("train", "training"), ("val", "validation"), (None, "validation")])
@pytest.mark.parametrize("make", [Plain, Coroutine])
async def test_the_mode_reaches_the_agent(workbench: Workbench, make: Any, mode: Any, kind: str) -> None:
    agent = make()
    await workbench.run(AgentRouter({"it": (lambda task: True, agent)}), mode=mode)
    assert [seen[0] for seen in agent.seen] == [kind]


async def test_functions_and_programs_are_agents_too(workbench: Workbench, llm: LLM) -> None:
    @rollout
    def plain(task: Any, llm: LLM) -> float:
        return 0.1

    @rollout
    async def coroutine(task: Any, llm: LLM) -> float:
        return 0.2

    program = CommandAgent(["sh", "-c", "echo 0.3"])
    router = router_of(plain, coroutine, default=program)

    outcomes = [await workbench.run(router, {"kind": k}, resources={"llm": llm}) for k in ("sql", "math", "other")]

    assert [outcome.reward for outcome in outcomes] == [0.1, 0.2, 0.3]


async def test_the_trace_is_tagged_with_the_agent(workbench: Workbench) -> None:
    outcome = await workbench.run(router_of(Plain(), Coroutine()), {"kind": "math"})
    tag = outcome.span("math.agent")
    assert tag.attributes == {"gen_ai.agent.name": "math"}
    assert outcome.span("agentlightning.message").parent_id == tag.span_id


@pytest.mark.parametrize(("match", "expected"), [("sql", ["sql"]), ("math", []), (None, ["sql"])])
async def test_agent_match_finds_the_calls_of_the_agent(
    workbench: Workbench, match: str | None, expected: list[str]
) -> None:
    class Talking(LitAgent[Any]):
        def rollout(self, task: Any, resources: NamedResources, rollout: Any) -> float:
            tracer = get_active_tracer()
            assert tracer is not None
            tracer.create_span("openai.chat.completion", {**TALK})
            return 1.0

    outcome = await workbench.run(router_of(Talking(), Coroutine()), {"kind": "sql"})
    triplets = TracerTraceToTriplet(agent_match=match).adapt(outcome.spans)

    assert [triplet.metadata["agent_name"] for triplet in triplets] == expected


async def test_each_agent_gets_the_resources_of_its_scope(workbench: Workbench, llm: LLM) -> None:
    agent = Plain()
    own = PromptTemplate(template="Write SQL.", engine="f-string")
    resources: NamedResources = {"llm": llm, "sql/prompt": own, "math/prompt": own.model_copy()}

    await workbench.run(router_of(agent, Coroutine()), {"kind": "sql"}, resources=resources)

    assert agent.seen[0][1] == {"prompt": own, "llm": llm}


@pytest.mark.parametrize("is_in_metadata", [True, False], ids=["by the rollout", "by the route"])
async def test_a_pinned_agent_gets_the_resources_it_is_pinned_to(
    workbench: Workbench, llm: LLM, is_in_metadata: bool
) -> None:
    agent = Plain()
    old = await workbench.store.add_resources({"llm": llm})
    route = Route("it", agent, lambda task: True, resources_id=None if is_in_metadata else old.resources_id)
    metadata = {"pinned_resources": {"it": old.resources_id}} if is_in_metadata else None

    outcome = await workbench.run(AgentRouter([route]), metadata=metadata)

    assert outcome.error is None
    assert agent.seen[0][1] == {"llm": llm}


async def test_a_pin_to_resources_that_do_not_exist_fails_the_rollout(workbench: Workbench) -> None:
    outcome = await workbench.run(AgentRouter([Route("it", Plain(), lambda task: True, resources_id="rs-0")]))
    assert "Agent 'it' is pinned to the resources 'rs-0', which the store does not have" in outcome.message


async def test_predicates_may_be_coroutines(workbench: Workbench) -> None:
    async def asks_a_model(task: Any) -> bool:
        await asyncio.sleep(0)
        return False

    outcome = await workbench.run(AgentRouter({"it": (asks_a_model, Plain(0.1))}, default=Plain(0.2)))

    assert outcome.reward == 0.2


async def test_routers_nest(workbench: Workbench, llm: LLM) -> None:
    inner = Plain()
    team = AgentRouter[Any]({"writer": (lambda task: True, inner)})

    outcome = await workbench.run(AgentRouter({"team": (lambda task: True, team)}), resources={"team/writer/llm": llm})

    assert outcome.span("writer.agent").parent_id == outcome.span("team.agent").span_id
    assert inner.seen[0][1] == {"llm": llm}


# ---------------------------------------------------------------------- names and defaults


@pytest.mark.parametrize(
    ("task", "expected"),
    [({"agent": "math"}, 0.2), ({"agent": "sql", "kind": "math"}, 0.1), ({"kind": "math"}, 0.2), ({"kind": "?"}, 0.3)],
    ids=["name", "name before rule", "rule", "default"],
)
async def test_a_task_may_name_its_agent(workbench: Workbench, task: Any, expected: float) -> None:
    routes = [
        Route("sql", Plain(0.1), lambda task: task.get("kind") == "sql"),
        Route("math", Plain(0.2), lambda task: task.get("kind") == "math"),
        Route("rest", Plain(0.3)),
    ]

    outcome = await workbench.run(AgentRouter(routes, default="rest", by_name=True), task)

    assert outcome.reward == expected


async def test_names_in_tasks_mean_nothing_unless_asked_for(workbench: Workbench) -> None:
    router = AgentRouter[Any]({"sql": (lambda task: False, Plain(0.1))}, default=Plain(0.2))
    assert (await workbench.run(router, {"agent": "sql"})).reward == 0.2


def test_a_default_must_be_among_the_routes() -> None:
    with pytest.raises(ConfigurationError, match=r"The default 'b' names no route; the routes are \['a'\]"):
        AgentRouter([Route("a", Plain())], default="b")


# ---------------------------------------------------------------------- callbacks


class WithCallbacks(Plain):
    """Notes its callbacks; plain ones."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def on_rollout_start(self, task: Any, runner: Any, tracer: Any) -> None:
        self.calls.append("start")

    def on_rollout_end(self, task: Any, rollout: Any, runner: Any, tracer: Any) -> None:
        self.calls.append("end")


async def test_callbacks_pass_through_nested_routers(workbench: Workbench) -> None:
    inner, other = WithCallbacks(), WithCallbacks()
    team = AgentRouter[Any]({"writer": (lambda task: True, inner)})
    await workbench.run(AgentRouter({"team": (lambda task: True, team)}, default=other))
    assert (inner.calls, other.calls) == (["start", "end"], [])


async def test_no_callback_comes_to_anybody_if_no_agent_is_chosen(workbench: Workbench) -> None:
    agent = WithCallbacks()
    outcome = await workbench.run(AgentRouter({"it": (lambda task: False, agent)}))
    assert (outcome.attempt.status, agent.calls) == ("failed", [])


# ---------------------------------------------------------------------- what goes wrong


async def test_a_task_that_no_route_takes_is_told_with_keys_and_routes(workbench: Workbench) -> None:
    outcome = await workbench.run(router_of(Plain(), Coroutine()), {"kind": "poem", "text": "a secret"})

    assert isinstance(outcome.error, RolloutFailed)
    assert outcome.message == (
        "No route takes a task with the keys 'kind', 'text'; the routes are 'sql', 'math'. "
        "Add one that matches, or a default."
    )


async def test_a_predicate_that_fails_is_named(workbench: Workbench) -> None:
    outcome = await workbench.run(router_of(Plain(), Coroutine()), "not a mapping")
    assert "The predicate of route 'sql' raised TypeError for a task of type str" in outcome.message


async def test_a_plain_agent_that_hangs_is_left_behind(workbench: Workbench) -> None:
    may_end = threading.Event()

    class Hanging(LitAgent[Any]):
        def rollout(self, task: Any, resources: NamedResources, rollout: Any) -> None:
            threads.append(threading.current_thread())
            may_end.wait()

    threads: list[threading.Thread] = []
    router = AgentRouter[Any]({"it": (lambda task: True, Hanging())})
    outcome = await workbench.run(router, config=RolloutConfig(timeout_seconds=0.2))
    (thread,) = threads
    was_alive = thread.is_alive()
    may_end.set()

    assert outcome.attempt.status == "timeout"
    assert was_alive
    assert thread.daemon


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        ({}, "AgentRouter has no routes"),
        ({"a/b": (bool, Plain())}, "An agent cannot be called 'a/b'"),
        ({"a": Plain()}, r"The route 'a' must be a pair \(predicate, agent\)"),
        ({"a": (Plain(), bool)}, "The route 'a' needs a predicate, .* it has a Plain and a type"),
        ([Route("a", Plain(), bool), Route("a", Plain(), bool)], "Two routes are called 'a'"),
        ({"a": (bool, TakesOnlyATask())}, r"TakesOnlyATask.rollout\(.* cannot be called with"),
        ({"a": (bool, rollout(lambda task, llm, database: 1.0))}, "asks for database"),
    ],
    ids=["none", "scope in name", "no pair", "wrong order", "twice", "wrong method", "wrong function"],
)
def test_wrong_routes_are_refused(routes: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        AgentRouter(routes)


def test_the_default_must_be_callable_too() -> None:
    with pytest.raises(ConfigurationError, match="TakesOnlyATask"):
        AgentRouter({"a": (bool, Plain())}, default=TakesOnlyATask())


async def test_a_router_with_a_default_travels_to_another_process(workbench: Workbench) -> None:
    router = AgentRouter[Any]({"a": (bool, Plain(0.1))}, default=Plain(0.2))
    copy: AgentRouter[Any] = pickle.loads(pickle.dumps(router))
    assert [(await workbench.run(copy, task)).reward for task in ("text", "")] == [0.1, 0.2]
