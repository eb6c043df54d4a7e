"""Whatever an attempt writes, readers of its spans do not raise: adapters, rewards, events, messages, views."""

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch", reason="the readers of GRPO need torch")

from agentlightning.adapter import (
    LlmProxyTraceToTriplet,
    TracerTraceToTriplet,
    TraceToMessages,
    TraceToTrajectory,
    auto_adapter,
    detect_framework,
)
from agentlightning.algorithm.batches import FinishedRollout, score_of
from agentlightning.algorithm.grpo.progress import reward_means, weighted_rewards, with_trajectories
from agentlightning.algorithm.grpo.samples import batch_of
from agentlightning.algorithm.grpo.settings import SampleSettings
from agentlightning.algorithm.prompts.reflection import reflective_record
from agentlightning.algorithm.sft.examples import Acceptance, examples_of
from agentlightning.emitter import get_message_value, get_object_value
from agentlightning.events.advice import rewards_by_agent, suggestions
from agentlightning.events.event import StartEvent
from agentlightning.events.spans import events_of_spans
from agentlightning.events.views import by_agent, handovers, subtasks, upwards
from agentlightning.llm_proxy.replay import _responses_in
from agentlightning.store import InMemoryLightningStore
from agentlightning.types import EnqueueRolloutRequest, Rollout, Span
from agentlightning.types.rewards import final_reward_of, named_rewards_of
from agentlightning.utils.json_values import MOST_LEVELS, parsed
from agentlightning.verdict.evidence import read_rollout
from tests.adapter.spans import CHAT, reward, span

TOKENS = {"prompt_token_ids": [1, 2], "response_token_ids": [3]}
DEEP = 100_000
MANY = "9" * 5000
NAMES = (
    *("prompt_token_ids", "response_token_ids", "logprobs.content", "agentlightning.weights_version"),
    *("agentlightning.operation.output.response_token_ids.0", "agentlightning.operation.output.choices.0.token_ids"),
    *("llm.x.choices", "llm.x.id", "llm.x.prompt_token_ids", "llm.x.response_token_ids"),
    *("gen_ai.response.id", "gen_ai.response.finish_reasons", "gen_ai.completion.0.finish_reason"),
    *("gen_ai.prompt.0.role", "gen_ai.prompt.0.content", "gen_ai.prompt.0.tool_calls", "gen_ai.prompt.0"),
    *("gen_ai.completion.0.role", "gen_ai.completion.0.content", "gen_ai.completion.0.tool_calls.0.id"),
    *("gen_ai.completion.0.tool_calls.0.name", "gen_ai.completion.1.token_ids", f"gen_ai.completion.{MANY}.role"),
    *("gen_ai.request.model", "gen_ai.request.functions.0.name", "gen_ai.request.functions.0.parameters"),
    *("gen_ai.request.functions", f"gen_ai.prompt{'.0' * 3000}", f"gen_ai.request{'.a' * 3000}"),
    *("agentops.task.output", "agentops.entity.output", "reward", "agentlightning.reward.0.value"),
    *("agentlightning.reward.0.name", "agentlightning.reward.1.value", "agentlightning.reward.1.name"),
    *("agent.name", "gen_ai.agent.name", "recipient_agent_type", "sender_agent_type", "crewai.crew.tasks"),
    *("crewai.task.description", "crewai.task.agent_role", "tool.name", "tool.parameters", "tool.call.id", "tool.call"),
    *("handoff.from_agent", "ag2.chat.recipient", "crewai.guardrail.success", "exception.message"),
    *("agentlightning.object.json", "agentlightning.object.literal", "agentlightning.object.type", "object"),
    *("agentlightning.message.body", "message", "agentlightning.event.kind", "agentlightning.proxy.recorded_as"),
    *("agentlightning.proxy.outcome", "agentlightning.proxy.request_body", "agentlightning.proxy.response_body"),
    *("agentlightning.proxy.dialect", "agentlightning.proxy.requested_model", "agentlightning.redirect.is_excluded"),
)
TEXTS = (
    *(
        "[" * DEEP,
        '{"a":' * DEEP,
        "(" * DEEP,
        "-" * DEEP + "1",
        "[" * 900 + "]" * 900,
        "{[]: 1}",
        "{1: 2}",
        "1" + "+1j" * DEEP,
    ),
    *(MANY, f"[{MANY}]", "9" * 400, f"[-{'9' * 400}]", f'{{"type": "reward", "value": {"9" * 400}}}', "NaN", "[NaN]"),
    *(
        '{"type": "reward", "value": Infinity}',
        '{"type": "reward", "value": -Infinity}',
        '{"type": "reward", "value": {}}',
    ),
    *('{"type": []}', '["\\ud800"]', '[{"logprob": "x"}]', "[1, 2]", "[[1], 2]", "[1.5]", "[true]", "[]", "", "int"),
    *(
        '[{"type": "text", "text": 1}]',
        '[{"type": "image_url", "image_url": [1]}]',
        "reward",
        "assistant",
        "tool",
        "answered",
        "chat",
    ),
)
VALUES: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from(TEXTS),
    st.sampled_from([0, 1, -1, 2**63 - 1, -(2**63), 1.7e308, -1.7e308, 1e-300, True, False]),
    st.sampled_from([[], [1, 2], [-1], [2**63 - 1], [0.5], ["a"], [True], [1] * 5000]),
)
SPAN_NAMES = (
    *(
        CHAT,
        "litellm_request",
        "raw_gen_ai_request",
        "agentlightning.reward",
        "agentlightning.object",
        "openai.responses",
    ),
    *(
        "agentlightning.message",
        "agentlightning.exception",
        "agentlightning.virtual",
        "agentlightning.operation",
        "step",
    ),
)
IDS = ("s0", "s1", "s2", "s3", "gone")


@st.composite
def traces(draw: st.DrawFn) -> list[Span]:
    """A few spans, each with hostile values under names that readers know; parents may form circles."""
    return [
        span(
            f"s{number}",
            draw(st.sampled_from([None, *IDS])),
            name=draw(st.sampled_from(SPAN_NAMES)),
            sequence_id=draw(st.sampled_from([0, number, 2**53])),
            start=draw(st.sampled_from([None, 0.0, float(number), 1e300])),
            end=draw(st.sampled_from([None, 0.0, number + 0.5, -1e300])),
            attributes=draw(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=6)),
        )
        for number in range(draw(st.integers(1, 4)))
    ]


READERS: dict[str, Callable[[list[Span]], object]] = {
    "trajectory": lambda spans: TraceToTrajectory().adapt(spans).model_dump_json(),
    "one agent": TraceToTrajectory(agent_match="1").adapt,
    "one model": TraceToTrajectory(model="[]").adapt,
    "triplets": lambda spans: [one.model_dump_json() for one in TracerTraceToTriplet().adapt(spans)],
    "proxy's triplets": lambda spans: [one.model_dump_json() for one in LlmProxyTraceToTriplet().adapt(spans)],
    "messages": lambda spans: json.dumps(TraceToMessages().adapt(spans)),
    "auto adapter": lambda spans: (detect_framework(spans), auto_adapter(spans).adapt(spans)),
    "final reward": final_reward_of,
    "named rewards": named_rewards_of,
    "events": lambda spans: [one.rewards.mean for one in by_agent(events_of_spans(spans)).values()],
    "subtasks": lambda spans: (subtasks(spans), handovers(spans), suggestions(spans)),
    "objects": lambda spans: [(get_object_value(one), get_message_value(one)) for one in spans],
    "replay": _responses_in,
    "reflection": lambda spans: reflective_record(1, spans, reward="", error=None, adapter=TraceToMessages()),
}


@pytest.mark.parametrize("reader", READERS)
@given(spans=traces())
@settings(max_examples=60, deadline=None)
def test_no_reader_raises(reader: str, spans: list[Span]) -> None:
    READERS[reader](spans)


@given(spans=traces())
@settings(max_examples=40, deadline=None)
async def test_no_algorithm_raises(spans: list[Span]) -> None:
    rollout = Rollout(rollout_id="ro-1", input=1, start_time=0.0, status="succeeded")
    finished = [FinishedRollout(rollout, "group", spans, final_reward_of(spans))] * 2
    outcomes = await with_trajectories(finished, TraceToTrajectory(), model="1")

    batch_of(outcomes, SampleSettings(credit="turn"), current_version=3).report.metrics()
    examples_of(outcomes, Acceptance(min_reward=0.0), max_length=10, vocab_size=10).metrics()
    names = list(named_rewards_of(spans))
    weighted_rewards(finished, dict.fromkeys(names, 1.0))
    reward_means(finished, names)


@pytest.mark.parametrize("value", [1.7e308, math.inf], ids=["huge", "infinite"])
async def test_rewards_that_cannot_be_added_up_end_nothing(value: float) -> None:
    """One rollout with two of them beside its calls, and others whose own reward they are."""
    calls = [
        span(f"c{at}", start=at, end=at + 0.5, attributes={**TOKENS, "gen_ai.response.id": f"r{at}"}) for at in (0, 2)
    ]
    beside = [*calls, *(reward(f"b{at}", None, sign * value, at=at + 1.0) for at, sign in ((0, -1), (1, 1), (2, 1)))]
    traces = [
        [*beside, reward("e", None, 0.5, at=9.0)],
        *([*calls, reward("e", None, own, at=9.0)] for own in (value, -value, 1.0)),
    ]
    rollouts = [Rollout(rollout_id=f"ro-{n}", input=1, start_time=0.0, status="succeeded") for n in range(len(traces))]
    finished = [
        FinishedRollout(one, "group", spans, final_reward_of(spans))
        for one, spans in zip(rollouts, traces, strict=True)
    ]

    for credit in ("rollout", "turn"):
        batch = batch_of(await with_trajectories(finished, TraceToTrajectory()), SampleSettings(credit=credit))
        assert batch.report.metrics()["skipped/bad_reward"] == 2
    events = [one for spans in traces for one in events_of_spans(spans)]
    assert [one.rewards.mean for one in by_agent(events).values()]
    assert [score_of(finished).failed, score_of(finished).reward.mean] == [2, 0.375]


@given(spans=traces())
@settings(max_examples=20, deadline=None)
async def test_no_verdict_raises(spans: list[Span]) -> None:
    store = InMemoryLightningStore()
    (rollout,) = await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=1)])
    attempt = await store.start_attempt(rollout.rollout_id)
    owner = {"rollout_id": rollout.rollout_id, "attempt_id": attempt.attempt.attempt_id}
    await store.add_many_spans([one.model_copy(update={**owner, "sequence_id": 0}) for one in spans])

    await read_rollout(store, attempt)


@pytest.mark.parametrize("output", TEXTS, ids=range(len(TEXTS)))
def test_a_real_reward_after_a_poisoned_output_counts(output: str) -> None:
    poisoned = span("a", attributes={"agentops.task.output": output})

    assert final_reward_of([poisoned, reward("b", None, 0.5, at=2.0)]) == 0.5


@pytest.mark.parametrize("text", ["[" * 900 + "]" * 900, '{"a":' * 300 + "1" + "}" * 300], ids=["lists", "objects"])
def test_a_value_that_is_too_deep_to_be_encoded_stays_a_text(text: str) -> None:
    assert parsed(text) == text
    assert parsed(text, is_kept=False) != text


@pytest.mark.parametrize(
    ("attributes", "value"),
    [
        ({"agentlightning.object.literal": MANY, "agentlightning.object.type": "int"}, MANY),
        ({"agentlightning.object.json": "[" * DEEP}, "[" * DEEP),
        ({"agentlightning.object.json": "[1]"}, [1]),
    ],
    ids=["many digits", "deep", "healthy"],
)
def test_an_object_that_cannot_be_decoded_is_its_text(attributes: dict[str, Any], value: object) -> None:
    assert get_object_value(span("a", name="agentlightning.object", attributes=attributes)) == value


def test_agents_are_sought_in_a_few_levels_of_a_trace_that_is_one_long_chain() -> None:
    chain = [span("s0", attributes={"agent.name": "writer"}), *(span(f"s{n}", f"s{n - 1}") for n in range(1, 1000))]
    ends = [span("reward", "s999", attributes={"agentlightning.reward.0.value": 1.0}), *chain]

    agents = [event.agent for event in events_of_spans(chain) if isinstance(event, StartEvent)]

    assert agents == ["writer"] * MOST_LEVELS + [None] * (1000 - MOST_LEVELS)
    assert rewards_by_agent(ends) == {}
    assert len(list(upwards(chain[-1], {one.span_id: one for one in chain}))) == MOST_LEVELS


def test_a_crew_that_plans_without_end_is_not_believed() -> None:
    crew = span("a", end=None, attributes={"crewai.crew.tasks": 2**63 - 1})

    assert len(subtasks([crew])) == 1000
