"""Events of the notes: what is emitted, traced, recognised, matched and followed."""

import asyncio
import inspect
from typing import Any

import openai
import pytest
from opentelemetry.sdk.trace import ReadableSpan

import agentlightning as agl
from agentlightning.adapter import Transition, auto_adapter, detect_framework, read_jsonl, write_jsonl
from agentlightning.adapter.triplet import Framework
from agentlightning.events import (
    AgentEvent,
    AgentReply,
    BinaryReward,
    CompleteEvent,
    ConfigEvent,
    DataEvent,
    ErrorEvent,
    MessageEvent,
    NamedReward,
    NumericReward,
    ObjectEvent,
    RewardEvent,
    SequenceReward,
    StartEvent,
    StateEvent,
    StreamOptions,
    ToolCall,
    UserMessage,
    by_agent,
    by_task,
    events_of_spans,
    mapped,
    of_kind,
    pipeline,
    span_of,
    stream_events,
    suggestions,
)
from agentlightning.store import InMemoryLightningStore, LightningStore
from agentlightning.types import (
    LLM,
    AgentMatcher,
    AgentRule,
    NamedResources,
    PromptTemplate,
    Rollout,
    Span,
    TraceStatus,
)
from tests.stub_model.server import StubModel


async def _traced(body: Any) -> list[Span]:
    """What a store has after the body ran in the trace of an attempt."""
    store, tracer = InMemoryLightningStore(), agl.OtelTracer()
    started = await store.start_rollout("task")
    place = {"rollout_id": started.rollout_id, "attempt_id": started.attempt.attempt_id}
    with tracer.lifespan(store):
        async with tracer.trace_context("trace", store=store, **place):
            result = body()
            if inspect.isawaitable(result):
                await result
    return list(await store.query_spans(started.rollout_id))


def _span(name: str, attributes: dict[str, Any], **fields: Any) -> Span:
    owner = {"rollout_id": "ro-1", "attempt_id": "at-1", "sequence_id": 1}
    return Span.from_attributes(name=name, attributes=attributes, **{**owner, **fields})


_CALL = {
    "gen_ai.request.model": "m",
    "prompt_token_ids": [1, 2],
    "response_token_ids": [3],
    "gen_ai.response.id": "r-1",
}


# ------------------------------------------------------------------ emission


@pytest.mark.parametrize(
    ("emit", "name"),
    [
        pytest.param(lambda: agl.emit_message("hello"), "agentlightning.message", marks=pytest.mark.claim(102, 106)),
        pytest.param(lambda: agl.emit_object({"a": 1}), "agentlightning.object", marks=pytest.mark.claim(103)),
        pytest.param(
            lambda: agl.emit_exception(ValueError("x")), "agentlightning.exception", marks=pytest.mark.claim(104)
        ),
        pytest.param(lambda: agl.emit_reward(0.8), "agentlightning.reward", marks=pytest.mark.claim(105, 107)),
    ],
)
@pytest.mark.claim(108, 109, 110, 269, 285, 294)
async def test_what_is_emitted_is_a_span_of_its_attempt(emit: Any, name: str) -> None:
    emitted: list[Any] = []

    [span] = await _traced(lambda: emitted.append(emit()))

    assert isinstance(emitted[0], ReadableSpan)
    assert span.name == emitted[0].name == name
    assert span.rollout_id.startswith("ro-")
    assert span.attempt_id.startswith("at-")
    assert span.sequence_id == 1


@pytest.mark.claim(107)
async def test_a_reward_is_an_attribute() -> None:
    [span] = await _traced(lambda: agl.emit_reward(0.8))

    assert span.attributes["reward"] == 0.8
    assert agl.get_reward_value(span) == 0.8


@pytest.mark.claim(111, 277)
async def test_what_is_emitted_is_returned_and_soon_in_the_store() -> None:
    store, tracer = InMemoryLightningStore(), agl.OtelTracer()
    started = await store.start_rollout("task")
    place = {"rollout_id": started.rollout_id, "attempt_id": started.attempt.attempt_id}
    notices = store.subscribe(["span"])
    with tracer.lifespan(store):
        async with tracer.trace_context("trace", store=store, **place):
            emitted = agl.emit_object({"a": [1]})
            notice = await asyncio.wait_for(anext(notices), 60)  # while the trace is open

    assert notice.rollout_id == started.rollout_id
    assert emitted is not None
    assert (emitted.rollout_id, emitted.attempt_id) == (started.rollout_id, started.attempt.attempt_id)
    assert agl.get_object_value(emitted) == {"a": [1]}
    await notices.aclose()  # type: ignore[attr-defined] # a generator


@pytest.mark.claim(276)
@pytest.mark.parametrize("value", [{"a": [1, None]}, [1, "b"], "text", 3, 2.5, True, None])
async def test_any_object_of_json_is_emitted(value: Any) -> None:
    [span] = await _traced(lambda: agl.emit_object(value))

    assert agl.get_object_value(span) == value


@pytest.mark.claim(278, 279, 280, 282)
async def test_a_conversation_is_recorded_with_sender_content_and_time() -> None:
    def talk() -> None:
        agl.emit_message("Is it raining?", sender="ada", role="user")
        agl.emit_message("Yes.", sender="forecaster", role="assistant")

    spans = await _traced(talk)
    events = [event for event in events_of_spans(spans) if isinstance(event, MessageEvent)]

    assert [agl.get_message_value(span) for span in spans] == ["Is it raining?", "Yes."]
    assert [event.sender for event in events] == ["ada", "forecaster"]
    assert all(span.start_time for span in spans)


@pytest.mark.claim(283)
async def test_a_reward_belongs_to_its_context() -> None:
    def work() -> None:
        with agl.operation(name="step"):
            agl.emit_reward(1.0)

    spans = {span.name: span for span in await _traced(work)}

    assert spans["agentlightning.reward"].parent_id == next(
        span.span_id for name, span in spans.items() if name != "agentlightning.reward"
    )


# ------------------------------------------------------------------ tracing


@pytest.mark.claim(286, 360, 369)
async def test_a_trace_begins_records_and_ends() -> None:
    tracer = agl.OtelTracer()
    with tracer.lifespan():
        async with tracer.trace_context("one"):
            assert agl.get_active_tracer() is tracer
            agl.emit_message("inside")

        assert agl.get_active_tracer() is None
        assert [span.name for span in tracer.get_last_trace()] == ["agentlightning.message"]


@pytest.mark.claim(270, 271, 273, 516)
def test_the_layers_have_their_classes() -> None:
    from agentlightning.runner.legacy import LegacyAgentRunner

    assert issubclass(agl.OtelTracer, agl.Tracer)
    assert issubclass(agl.AgentOpsTracer, agl.Tracer)
    assert issubclass(agl.TraceToTriplet, agl.TraceAdapter)
    assert issubclass(agl.LlmProxyTraceToTriplet, agl.TraceAdapter)
    assert issubclass(agl.LitAgentRunner, agl.Runner)
    assert callable(LegacyAgentRunner.run)
    assert LegacyAgentRunner is agl.LegacyAgentRunner


@pytest.mark.claim(275, 290, 292, 298)
async def test_calls_of_an_unchanged_agent_are_seen(stub_model: StubModel) -> None:
    answers: list[str | None] = []

    def agent() -> None:
        client = openai.OpenAI(base_url=f"{stub_model.url}/v1", api_key="none")
        answer = client.chat.completions.create(model="stub-model", messages=[{"role": "user", "content": "hello"}])
        answers.append(answer.choices[0].message.content)

    [span] = await _traced(agent)

    assert span.attributes["gen_ai.prompt.0.content"] == "hello"
    assert span.attributes["gen_ai.completion.0.content"] == answers[0]


# ------------------------------------------------------------------ recognising


_OWNER: dict[str, Any] = {"rollout_id": "ro-1", "attempt_id": "at-1", "sequence_id": 1, "time": 5.0, "agent": "a"}


@pytest.mark.claim(293, 347, 354)
@pytest.mark.parametrize(
    ("event", "family"),
    [
        pytest.param(DataEvent(value={"a": 1}, **_OWNER), ObjectEvent, marks=pytest.mark.claim(348)),
        pytest.param(ConfigEvent(value={"a": 1}, **_OWNER), ObjectEvent, marks=pytest.mark.claim(348)),
        pytest.param(UserMessage(text="hi", **_OWNER), MessageEvent, marks=pytest.mark.claim(349)),
        pytest.param(AgentReply(text="hi", **_OWNER), MessageEvent, marks=pytest.mark.claim(349)),
        pytest.param(ToolCall(tool="add", text="{}", **_OWNER), MessageEvent, marks=pytest.mark.claim(349)),
        pytest.param(NumericReward(value=0.5, **_OWNER), RewardEvent, marks=pytest.mark.claim(350)),
        pytest.param(BinaryReward(value=1.0, **_OWNER), RewardEvent, marks=pytest.mark.claim(350)),
        pytest.param(
            SequenceReward(value=1.0, rewards=(NamedReward("a", 1.0), NamedReward("b", 0.5)), **_OWNER),
            RewardEvent,
            marks=pytest.mark.claim(350),
        ),
        pytest.param(StartEvent(**_OWNER), StateEvent, marks=pytest.mark.claim(351)),
        pytest.param(CompleteEvent(**_OWNER), StateEvent, marks=pytest.mark.claim(351)),
        pytest.param(ErrorEvent(message="broken", **_OWNER), StateEvent, marks=pytest.mark.claim(351)),
    ],
)
def test_an_event_is_stored_as_a_span_and_read_back(event: AgentEvent, family: type) -> None:
    read = [one for one in events_of_spans([span_of(event)]) if type(one) is type(event)]

    assert [(one.agent, one.rollout_id) for one in read] == [("a", "ro-1")]
    assert isinstance(event, family)
    assert isinstance(event, AgentEvent)


@pytest.mark.claim(350)
@pytest.mark.parametrize(
    ("given", "kind"),
    [(0.5, NumericReward), (True, BinaryReward), ({"a": 1.0, "b": 0.5}, SequenceReward)],
    ids=["numeric", "binary", "sequence"],
)
async def test_a_reward_is_read_as_what_it_is(given: Any, kind: type) -> None:
    options = {"primary_key": "a"} if isinstance(given, dict) else {}

    spans = await _traced(lambda: agl.emit_reward(given, **options))

    assert [type(event) for event in events_of_spans(spans) if isinstance(event, RewardEvent)] == [kind]


@pytest.mark.claim(295)
@pytest.mark.parametrize(
    ("name", "framework"),
    [
        ("crewai.task.description", Framework.CREWAI),
        ("langchain.node", Framework.LANGCHAIN),
        ("recipient_agent_type", Framework.AUTOGEN),
        ("ag2.chat.sender", Framework.AG2),
        ("other", Framework.OTHER),
    ],
)
def test_a_framework_is_recognised_by_its_spans(name: str, framework: Framework) -> None:
    assert detect_framework([_span("step", {name: "x"})]) is framework


@pytest.mark.claim(296, 297)
@pytest.mark.parametrize(
    "name", ["crewai.agent.role", "langchain.chain.type", "recipient_agent_type", "agent.name", "gen_ai.agent.name"]
)
def test_an_adapter_is_chosen_that_reads_the_calls_of_a_trace_and_whose_they_are(name: str) -> None:
    spans = [
        _span("step", {name: "solver"}, span_id="a", start_time=0.0, end_time=4.0),
        _span("openai.chat.completion", _CALL, span_id="b", parent_id="a", start_time=1.0, end_time=2.0, sequence_id=2),
    ]

    adapter = auto_adapter(spans)

    assert isinstance(adapter, agl.TraceAdapter)
    assert [triplet.metadata["agent_name"] for triplet in adapter.adapt(spans)] == ["solver"]


@pytest.mark.claim(297, 377)
def test_an_adapter_of_ones_own_needs_adapt_only() -> None:
    class CustomAdapter(agl.TraceAdapter[int]):
        def adapt(self, source: Any, /) -> int:
            return len(source)

    assert CustomAdapter()([_span("a", {}), _span("b", {})]) == 2


@pytest.mark.claim(370)
async def test_an_adapter_is_given_the_spans_of_each_trace() -> None:
    seen: list[int] = []
    tracer = agl.OtelTracer()
    tracer.add_listener(lambda spans: seen.append(len(spans)))
    with tracer.lifespan():
        async with tracer.trace_context("one"):
            agl.emit_message("a")
            agl.emit_message("b")

    assert seen == [2]


# ------------------------------------------------------------------ selected agents


def _two_agents() -> list[Span]:
    return [
        _span("agent", {"agent.name": "solver"}, span_id="a", start_time=0.0, end_time=4.0),
        _span("openai.chat.completion", _CALL, span_id="b", parent_id="a", start_time=1.0, end_time=2.0, sequence_id=2),
        _span("agent", {"agent.name": "critic"}, span_id="c", start_time=5.0, end_time=9.0, sequence_id=3),
        _span(
            "openai.chat.completion",
            {**_CALL, "gen_ai.response.id": "r-2"},
            span_id="d",
            parent_id="c",
            start_time=6.0,
            end_time=7.0,
            sequence_id=4,
        ),
        _span("agentlightning.reward", {"reward": 1.0}, span_id="e", start_time=8.0, end_time=8.0, sequence_id=5),
    ]


@pytest.mark.parametrize(
    ("match", "agents"),
    [
        pytest.param("^sol", ["solver"], marks=pytest.mark.claim(303), id="regex"),
        pytest.param(AgentMatcher.glob("c*"), ["critic"], marks=pytest.mark.claim(304), id="wildcard"),
        pytest.param(
            AgentMatcher([AgentRule("critic", include=False, priority=9), AgentRule("*")]),
            ["solver"],
            marks=pytest.mark.claim(305),
            id="priority",
        ),
        pytest.param(None, ["solver", "critic"], id="all"),
    ],
)
@pytest.mark.claim(302, 306, 336)
def test_agents_are_matched_by_name(match: Any, agents: list[str]) -> None:
    triplets = agl.TraceToTriplet(agent_match=match).adapt(_two_agents())

    assert [triplet.metadata["agent_name"] for triplet in triplets] == agents


@pytest.mark.parametrize(
    ("name", "resource"),
    [
        pytest.param("llm", LLM(endpoint="http://localhost:1/v1", model="own"), marks=pytest.mark.claim(307)),
        pytest.param(
            "llm",
            LLM(endpoint="http://localhost:1/v1", model="m", sampling_parameters={"temperature": 0.1}),
            marks=pytest.mark.claim(309),
        ),
        pytest.param("prompt", PromptTemplate(template="own", engine="f-string"), marks=pytest.mark.claim(308)),
    ],
)
@pytest.mark.claim(515)
def test_what_is_an_agents_own_goes_before_what_is_common(name: str, resource: Any) -> None:
    common: NamedResources = {
        "llm": LLM(endpoint="http://localhost:1/v1", model="common"),
        "prompt": PromptTemplate(template="common", engine="f-string"),
    }

    own = agl.resources_for("solver", {**common, f"solver/{name}": resource})
    others = agl.resources_for("critic", {**common, f"solver/{name}": resource})

    assert own[name] == resource
    assert others == common


class _Named(agl.LitAgent[Any]):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def rollout(self, task: Any, resources: NamedResources, rollout: Rollout) -> float:
        prompt = resources.get("prompt")
        agl.emit_message(f"{self.name} {prompt.template if isinstance(prompt, PromptTemplate) else '-'}")
        return 1.0


async def _routed(router: Any, task: Any, store: LightningStore, resources_id: str | None = None) -> list[Span]:
    runner = agl.LitAgentRunner[Any](agl.OtelTracer(), max_rollouts=1)
    queued = await store.enqueue_rollout(task, resources_id=resources_id)
    with runner.run_context(agent=router, store=store):
        await runner.iter()
    return list(await store.query_spans(queued.rollout_id))


@pytest.mark.claim(311, 312)
async def test_a_router_sends_a_task_to_the_agent_that_it_is_for() -> None:
    router = agl.AgentRouter({"sql": (lambda task: "query" in task, _Named("sql"))}, default=_Named("chat"))
    store = InMemoryLightningStore()
    await store.add_resources({})

    spans = await _routed(router, {"query": "select"}, store)

    assert "sql -" in [agl.get_message_value(span) for span in spans]
    assert "sql" in {span.attributes.get("gen_ai.agent.name") for span in spans}


@pytest.mark.claim(310)
async def test_an_agent_is_pinned_to_a_version() -> None:
    store = InMemoryLightningStore()
    old = await store.add_resources({"prompt": PromptTemplate(template="old", engine="f-string")})
    await store.add_resources({"prompt": PromptTemplate(template="new", engine="f-string")})
    pinned = agl.AgentRouter([agl.Route("a", _Named("a"), lambda task: True, resources_id=old.resources_id)])
    free = agl.AgentRouter([agl.Route("a", _Named("a"), lambda task: True)])

    assert "a old" in [agl.get_message_value(span) for span in await _routed(pinned, 1, store)]
    assert "a new" in [agl.get_message_value(span) for span in await _routed(free, 1, store)]


# ------------------------------------------------------------------ from spans to data


@pytest.mark.claim(314, 315, 316, 317, 318, 328, 361)
def test_a_trace_becomes_triplets_transitions_and_trajectories(tmp_path: Any) -> None:
    from agentlightning.adapter import TraceTree

    spans = _two_agents()
    tree = TraceTree.from_spans(spans)
    triplets = agl.TraceToTriplet().adapt(spans)
    transition = Transition.from_triplet(triplets[-1])
    trajectory = agl.TraceToTrajectory().adapt(spans)
    write_jsonl(tmp_path / "one.jsonl", [trajectory])

    assert len(list(tree.traverse())) >= len(spans)
    assert [triplet.reward for triplet in triplets] == [None, 1.0]
    assert (transition.state, transition.action, transition.agent_name) == ([1, 2], [3], "critic")
    assert read_jsonl(tmp_path / "one.jsonl") == [trajectory]
    assert trajectory.final_reward == 1.0


@pytest.mark.claim(338, 339)
def test_rewards_are_added_up_by_agent_and_task() -> None:
    events = [
        NumericReward(value=1.0, **{**_OWNER, "agent": "solver"}),
        NumericReward(value=0.5, **{**_OWNER, "agent": "solver"}),
        NumericReward(value=0.0, **{**_OWNER, "agent": "critic"}),
    ]

    assert {name: one.rewards.mean for name, one in by_agent(events).items()} == {"solver": 0.75, "critic": 0.0}
    assert by_task(events)["ro-1"].rewards.total == 1.5


@pytest.mark.claim(339)
def test_an_algorithm_optimises_the_agent_whose_rewards_are_lowest() -> None:
    chosen: list[tuple[str, float | None]] = []

    @agl.algo
    async def improve_the_weakest(*, store: LightningStore) -> None:
        prompts: dict[str, Any] = {f"{name}/prompt": _prompt(name) for name in ("writer", "critic", "editor")}
        for _ in range(3):
            await store.add_resources(prompts)
            queued = await store.enqueue_rollout("task")
            await store.wait_for_rollouts(rollout_ids=[queued.rollout_id], timeout=60)
            teams = by_agent(events_of_spans(await store.query_spans(queued.rollout_id)))
            rewards = {name: team.rewards.mean or 0.0 for name, team in teams.items() if name is not None}
            weakest = min(rewards, key=lambda name: rewards[name])
            chosen.append((weakest, rewards[weakest]))
            prompts[f"{weakest}/prompt"] = _prompt(f"{weakest}, carefully")

    @agl.rollout
    def team(task: str, resources: NamedResources) -> None:
        for member, reward in (("writer", 0.5), ("critic", 0.25), ("editor", 0.75)):
            prompt = agl.resources_for(member, resources)["prompt"]
            tracer = agl.get_active_tracer()
            assert tracer is not None
            assert isinstance(prompt, PromptTemplate)
            with tracer.operation_context(f"invoke_agent {member}", {"gen_ai.agent.name": member}):
                agl.emit_reward(1.0 if "carefully" in prompt.template else reward)

    agl.Trainer(algorithm=improve_the_weakest, strategy="shm", progress="off").fit(team)

    assert chosen == [("critic", 0.25), ("writer", 0.5), ("editor", 0.75)]


def _prompt(text: str) -> PromptTemplate:
    return PromptTemplate(template=text, engine="f-string")


def _crew_task(name: str, role: str, **fields: Any) -> Span:
    attributes = {"crewai.task.name": name, "crewai.task.description": name, "crewai.task.agent_role": role}
    return _span(f"{name}.task", attributes, span_id=name, **fields)


def _failed(reason: str) -> TraceStatus:
    return TraceStatus(status_code="ERROR", description=reason)


@pytest.mark.claim(344, 339)
@pytest.mark.parametrize(
    ("spans", "about", "shown", "advised"),
    [
        pytest.param(
            [_crew_task("look", "Looker", status=_failed("no such page")), _crew_task("write", "Writer")],
            *("look", "failed in 1 of 1 runs, most often with: no such page.", "Fix the error"),
            id="a task fails",
        ),
        pytest.param(
            [
                _crew_task("write", "Writer"),
                _span("guardrail", {"crewai.guardrail.success": True}, parent_id="write"),
                _span(
                    "guardrail",
                    {"crewai.guardrail.success": False, "crewai.guardrail.error": "too long"},
                    parent_id="write",
                ),
            ],
            *("write", "in 1 of 2 cases, most often with: too long.", "expected output"),
            id="an answer is refused",
        ),
        pytest.param(
            [
                _span("weather.tool", {"tool.name": "weather"}),
                _span("weather.tool", {"tool.name": "weather"}, status=_failed("KeyError: 'city'")),
            ],
            *("weather", "failed in 1 of 2 calls, most often with: KeyError: 'city'.", "arguments"),
            id="a tool fails",
        ),
        pytest.param(
            [
                _crew_task("look", "Looker"),
                _crew_task("write", "Writer"),
                _span("agentlightning.reward", {"reward": 0.9}, parent_id="look"),
                _span("agentlightning.reward", {"reward": 0.2}, parent_id="write"),
            ],
            *("Writer", "0.20 in the mean of 1, where the others have 0.90", "Writer/prompt"),
            id="an agent has the lowest reward",
        ),
    ],
)
def test_a_crew_is_given_suggestions_what_to_optimise(spans: list[Span], about: str, shown: str, advised: str) -> None:
    [found] = suggestions(spans)

    assert found.about == about
    assert shown in found.sentence
    assert advised in found.advice


@pytest.mark.claim(344)
def test_a_crew_that_works_gets_no_suggestions() -> None:
    rewards = [_span("agentlightning.reward", {"reward": 1.0}, parent_id=name) for name in ("look", "write")]
    tools = [_span("weather.tool", {"tool.name": "weather"})] * 3

    assert suggestions([_crew_task("look", "Looker"), _crew_task("write", "Writer"), *rewards, *tools]) == []


# ------------------------------------------------------------------ following


async def _finished(store: LightningStore, count: int = 4) -> str:
    started = await store.start_rollout("task")
    for number in range(count):
        reward = NumericReward(
            value=float(number),
            rollout_id=started.rollout_id,
            attempt_id=started.attempt.attempt_id,
            sequence_id=number + 1,
            time=float(number),
        )
        await store.add_span(span_of(reward))
    await store.update_attempt(started.rollout_id, "latest", status="succeeded")
    return started.rollout_id


@pytest.mark.parametrize(
    ("mode", "sizes"),
    [
        pytest.param("realtime", [1, 1, 1, 1], marks=pytest.mark.claim(319)),
        pytest.param("batch", [4], marks=pytest.mark.claim(320)),
        pytest.param("hybrid", None, marks=pytest.mark.claim(321)),
    ],
)
@pytest.mark.claim(281, 352, 353, 355)
async def test_events_are_followed_filtered_and_handed_out(mode: Any, sizes: list[int] | None) -> None:
    store = InMemoryLightningStore()
    rollout_id = await _finished(store)
    options = StreamOptions(rollout_ids=[rollout_id], batch_size=4)
    doubled = pipeline(of_kind("reward"), mapped(lambda event: event))

    async with stream_events(store, mode=mode, transform=doubled, options=options) as stream:
        batches = [list(batch) async for batch in stream]

    assert [event.value for batch in batches for event in batch] == [0.0, 1.0, 2.0, 3.0]
    assert sizes is None or [len(batch) for batch in batches] == sizes


@pytest.mark.claim(356, 357)
async def test_consumers_work_at_once_and_their_results_come_together() -> None:
    store = InMemoryLightningStore()
    rollout_id = await _finished(store, count=3)
    all_at_work = asyncio.Barrier(3) if hasattr(asyncio, "Barrier") else None

    async def consume(batch: Any) -> float:
        if all_at_work is not None:
            await asyncio.wait_for(all_at_work.wait(), 60)  # ends only if three work at once
        return sum(event.value for event in batch)

    options = StreamOptions(rollout_ids=[rollout_id])
    async with stream_events(
        store, consume, mode="realtime", consumers=3, transform=of_kind("reward"), options=options
    ) as stream:
        results = [result async for result in stream]

    assert results == [0.0, 1.0, 2.0]


@pytest.mark.claim(284)
async def test_a_reward_makes_an_algorithm_act() -> None:
    store = InMemoryLightningStore()
    rollout_id = await _finished(store)

    async def publish(batch: Any) -> str:
        template = PromptTemplate(template=f"{batch[-1].value}", engine="f-string")
        return (await store.add_resources({"prompt": template})).resources_id

    options = StreamOptions(rollout_ids=[rollout_id], batch_size=4)
    async with stream_events(store, publish, mode="batch", transform=of_kind("reward"), options=options) as stream:
        [published] = [result async for result in stream]

    latest = await store.get_latest_resources()
    assert latest is not None
    assert latest.resources_id == published
