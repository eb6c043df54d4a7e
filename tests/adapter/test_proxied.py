"""Calls that the agent's tracer and the LLM proxy both recorded are one call, with the tokens of whoever has them."""

import json
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.adapter import (
    DropReason,
    LlmProxyTraceToTriplet,
    RewardMatchPolicy,
    TracerTraceToTriplet,
    TraceToMessages,
    TraceToTrajectory,
    TraceTree,
    auto_adapter,
)
from agentlightning.types import Span, TraceStatus, Triplet
from tests.adapter.spans import CHAT, reward, span

OTHER_CLOCK = 5_000.0
"""The proxy may run on a machine with another time."""
FAILED = TraceStatus(status_code="ERROR", description="Timeout")


ANSWERLESS: dict[str, Any] = {"gen_ai.response.id": None}


def told(role: str, text: str) -> dict[str, str]:
    return {f"gen_ai.{role}.0.role": "user" if role == "prompt" else "assistant", f"gen_ai.{role}.0.content": text}


def traced(number: int, under: str | None = None, *, name: str = CHAT, **attributes: Any) -> Span:
    """The call as the agent's process saw it."""
    says = {"gen_ai.response.id": f"r{number}", **told("prompt", f"q{number}"), **told("completion", f"a{number}")}
    given = {key: value for key, value in {**says, **attributes}.items() if value is not None}
    times = {"start": 10.0 * number, "end": 10.0 * number + 5, "sequence_id": 10 * number + 2}
    return span(f"sdk-{number}", under, name=name, attributes=given, **times)


def ids_of(number: int) -> dict[str, Any]:
    return {"prompt_token_ids": f"[{number},{number}]", "response_token_ids": f"[{number},0]"}


def proxied(
    number: int, under: str | None = None, *, provider: str = "openai", tokens: str = "both", **attributes: Any
) -> list[Span]:
    """The two spans of the proxy; `tokens` says which of them has token ids."""
    says = {"gen_ai.response.id": f"r{number}", **told("prompt", f"q{number}"), **told("completion", f"a{number}")}
    says |= ids_of(number) if tokens in ("both", "request") else {}
    raw: dict[str, Any] = {f"llm.{provider}.id": f"r{number}", f"llm.{provider}.model": "m"}
    if tokens in ("both", "raw"):
        raw[f"llm.{provider}.prompt_token_ids"] = json.dumps([number, number])
        raw[f"llm.{provider}.choices"] = json.dumps([{"token_ids": [number, 0]}])
    given = {key: value for key, value in {**says, **attributes}.items() if value is not None}
    times = {"start": OTHER_CLOCK + number, "end": OTHER_CLOCK + number + 0.5, "sequence_id": 10 * number + 1}
    request = span(f"request-{number}", under, name="litellm_request", attributes=given, **times)
    beneath = span(f"raw-{number}", request.span_id, name="raw_gen_ai_request", attributes=raw, **times)
    return [request, beneath]


def tokens_of(triplets: list[Triplet]) -> list[tuple[list[int], list[int]]]:
    return [(triplet.prompt["token_ids"], triplet.response["token_ids"]) for triplet in triplets]


ROOT = span("root", start=0.0, end=1e6)
SOLVER = span("solver", "root", start=1.0, end=2.0, attributes={"agent.name": "solver"})


# ---------------------------------------------------------------------- triplets


@pytest.mark.parametrize(
    ("name", "under", "provider", "tokens"),
    [
        (CHAT, "sdk-1", "openai", "both"),
        (CHAT, "root", "openai", "request"),
        (CHAT, "gone", "hosted_vllm", "raw"),
        ("openai.responses", "gone", "openai", "raw"),
        ("anthropic.messages", "sdk-1", "fireworks_ai", "raw"),
    ],
    ids=["child", "beside", "apart", "responses", "messages"],
)
def test_the_proxy_lends_its_tokens_to_the_call_of_the_agent(name: str, under: str, provider: str, tokens: str) -> None:
    spans = [ROOT, SOLVER, *proxied(1, under, provider=provider, tokens=tokens), traced(1, "solver", name=name)]

    (triplet,) = TracerTraceToTriplet().adapt(spans)

    assert tokens_of([triplet]) == [([1, 1], [1, 0])]
    assert triplet.metadata["agent_name"] == "solver"
    assert triplet.metadata["response_id"] == "r1"


def test_logprobs_and_the_version_of_the_weights_are_lent_too() -> None:
    known = {"logprobs.content": "[-0.5, -0.25]", "agentlightning.weights_version": "7"}
    spans = [ROOT, traced(1, "root"), *proxied(1, "sdk-1", **known)]

    (triplet,) = TracerTraceToTriplet().adapt(spans)
    (sequence,) = TraceToTrajectory().adapt(spans).sequences

    assert triplet.response["logprobs"] == [-0.5, -0.25]
    assert (sequence.logprobs[2:], sequence.weights_versions[2:]) == ((-0.5, -0.25), ("7", "7"))


def test_a_call_that_has_tokens_keeps_its_own() -> None:
    own = traced(1, "root", prompt_token_ids=[7], response_token_ids=[8])

    assert tokens_of(TracerTraceToTriplet().adapt([ROOT, own, *proxied(1, "sdk-1")])) == [([7], [8])]


def test_a_request_that_got_no_answer_is_no_call() -> None:
    failed = proxied(1, tokens="none", **ANSWERLESS)[0].model_copy(update={"status": FAILED})

    assert TracerTraceToTriplet().adapt([ROOT, failed]) == []


def test_all_spans_are_taken_where_duplicates_are_wanted() -> None:
    tree = TraceTree.from_spans([ROOT, traced(1, "root"), *proxied(1, "sdk-1"), *proxied(2)])

    only_traced = tree.to_trajectory(dedup_llm_call=False)
    every = tree.to_trajectory("openai|litellm_request", dedup_llm_call=False)

    assert [triplet.metadata["response_id"] for triplet in only_traced] == ["r1", "r2"]
    assert [triplet.metadata["response_id"] for triplet in every] == ["r1", "r1", "r2"]


# ---------------------------------------------------------------------- whose call it is


@pytest.mark.parametrize("is_traced", [True, False])
def test_the_agent_of_the_address_is_known_where_no_other_is(is_traced: bool) -> None:
    spans = [ROOT, *proxied(1, **{"agent.name": "writer"}), *([traced(1, "root")] if is_traced else [])]

    (triplet,) = TracerTraceToTriplet(agent_match="writer").adapt(spans)
    (sequence,) = TraceToTrajectory(agent_match="writer").adapt(spans).sequences
    (by_sequence,) = LlmProxyTraceToTriplet().adapt(spans)

    assert {triplet.metadata["agent_name"], sequence.agent_name, by_sequence.metadata["agent_name"]} == {"writer"}
    assert TracerTraceToTriplet(agent_match="solver").adapt(spans) == []
    assert TraceToTrajectory(agent_match="solver").adapt(spans).sequences == ()


def test_a_call_that_was_made_to_judge_is_not_learnt_from_through_the_proxy() -> None:
    judging = span("judge", "root", name="agentlightning.reward", start=5.0, end=100.0, attributes={"reward": 1.0})
    spans = [ROOT, judging, *proxied(1), traced(1, "judge")]

    assert TracerTraceToTriplet().adapt(spans) == []
    assert TraceToTrajectory().adapt(spans).sequences == ()


@pytest.mark.parametrize("policy", list(RewardMatchPolicy))
def test_the_reward_is_found_where_the_agent_made_the_call(policy: RewardMatchPolicy) -> None:
    spans = [
        ROOT,
        SOLVER,
        traced(1, "solver"),
        *proxied(1, "sdk-1"),
        reward("w", "solver", 0.5, at=50.0, sequence_id=99),
    ]

    (triplet,) = TracerTraceToTriplet(reward_match=policy).adapt(spans)
    (sequence,) = TraceToTrajectory(reward_match=policy).adapt(spans).sequences

    assert (triplet.reward, sequence.calls[0].reward) == (0.5, 0.5)


# ---------------------------------------------------------------------- answers nobody took


def test_an_answer_that_came_too_late_is_not_learnt_from() -> None:
    """The client gave up on its first request, and sent another."""
    late, taken = proxied(1, "sdk-2"), proxied(2, "sdk-2")

    triplets = TracerTraceToTriplet().adapt([ROOT, traced(2, "root"), *late, *taken])
    trajectory = TraceToTrajectory().adapt([ROOT, traced(2, "root"), *late, *taken])

    assert tokens_of(triplets) == [([2, 2], [2, 0])]
    assert [sequence.token_ids for sequence in trajectory.sequences] == [(2, 2, 2, 0)]
    unused = {call.span_id for call in trajectory.dropped if call.reason is DropReason.UNUSED}
    assert unused == {"request-1", "raw-1"}


def test_a_call_that_failed_does_not_take_the_answer_beneath_it() -> None:
    failed = traced(1, "root", **ANSWERLESS).model_copy(update={"status": FAILED})

    trajectory = TraceToTrajectory().adapt([ROOT, failed, *proxied(1, "sdk-1")])

    assert trajectory.sequences == ()
    assert {call.span_id: call.reason for call in trajectory.dropped} == {
        "sdk-1": DropReason.FAILED,
        "request-1": DropReason.UNUSED,
        "raw-1": DropReason.UNUSED,
    }


def test_the_only_answer_beneath_a_call_is_its_own_whatever_its_id() -> None:
    """A proxy that speaks another dialect to the provider may pass on another id."""
    spans = [ROOT, traced(1, "root", **{"gen_ai.response.id": "resp-1"}), *proxied(1, "sdk-1")]

    (triplet,) = TracerTraceToTriplet().adapt(spans)
    (sequence,) = TraceToTrajectory().adapt(spans).sequences

    assert tokens_of([triplet]) == [([1, 1], [1, 0])]
    assert sequence.token_ids == (1, 1, 1, 0)


def test_requests_without_an_id_are_one_call_with_their_raw_form() -> None:
    request, beneath = proxied(1, **ANSWERLESS)
    del beneath.attributes["llm.openai.id"]

    for adapter in (TracerTraceToTriplet(), LlmProxyTraceToTriplet(), auto_adapter([request, beneath])):
        assert tokens_of(adapter.adapt([request, beneath])) == [([1, 1], [1, 0])]


# ---------------------------------------------------------------------- any trace


@dataclass
class Recorded:
    """Calls of one attempt, and what is known of each."""

    spans: list[Span] = field(default_factory=list)
    agents: dict[int, str] = field(default_factory=dict)
    proxied: set[int] = field(default_factory=set)
    chats: set[int] = field(default_factory=set)
    """Calls that the default pattern takes by their name."""
    has_tokens: set[int] = field(default_factory=set)

    @property
    def counted(self) -> set[int]:
        """Those of which the default makes triplets: all, where none is a chat or went through the proxy."""
        return self.chats | self.proxied or set(self.agents)


@st.composite
def recordings(draw: st.DrawFn) -> Recorded:
    made = Recorded([ROOT, SOLVER, span("critic", "root", start=3.0, end=4.0, attributes={"agent.name": "critic"})])
    for number in range(1, draw(st.integers(1, 6)) + 1):
        who = draw(st.sampled_from(["tracer", "proxy", "both"]))
        url_name = draw(st.sampled_from([None, "writer"]))
        above = draw(st.sampled_from(["root", "solver", "critic"]))
        name = draw(st.sampled_from([CHAT, "openai.responses", "anthropic.messages"]))
        tokens = draw(st.sampled_from(["none", "both", "request", "raw"]))
        parent = draw(st.sampled_from([None, "root", "gone", f"sdk-{number}"]))
        if who != "proxy":
            made.spans.append(traced(number, above, name=name))
            made.chats |= {number} if name == CHAT else set()
        if who != "tracer":
            address: dict[str, Any] = {"gen_ai.agent.name": url_name}
            made.spans += proxied(number, parent, tokens=tokens, **address)
            made.proxied.add(number)
            made.has_tokens |= set() if tokens == "none" else {number}
        named = above if who != "proxy" and above != "root" else url_name
        made.agents[number] = named if named is not None and (who != "tracer" or above != "root") else "*"
    return made


def number_of(response_id: str | None) -> int:
    assert response_id is not None
    return int(response_id[1:])


@given(recordings(), st.integers(0, 100))
def test_every_call_is_counted_once(made: Recorded, seed: int) -> None:
    spans = random.Random(seed).sample(made.spans, len(made.spans))

    triplets = {number_of(one.metadata["response_id"]): one for one in TracerTraceToTriplet().adapt(spans)}

    assert len(triplets) == len(TracerTraceToTriplet().adapt(spans))
    assert set(triplets) == made.counted
    for number, triplet in triplets.items():
        expected = ([number, number], [number, 0]) if number in made.has_tokens else ([], [])
        assert tokens_of([triplet]) == [expected]
        assert triplet.metadata["agent_name"] == made.agents[number]


@given(recordings(), st.integers(0, 100))
def test_every_call_with_tokens_is_in_one_sequence(made: Recorded, seed: int) -> None:
    spans = random.Random(seed).sample(made.spans, len(made.spans))
    trajectory = TraceToTrajectory().adapt(spans)

    sampled = [(number_of(call.response_id), one.agent_name) for one in trajectory.sequences for call in one.calls]

    assert sorted(sampled) == sorted((number, made.agents[number]) for number in made.has_tokens)
    names = {CHAT, "openai.responses", "anthropic.messages", "litellm_request", "raw_gen_ai_request"}
    accounted = [call.span_id for one in trajectory.sequences for call in one.calls]
    accounted += [call.span_id for call in trajectory.dropped]
    assert sorted(accounted) == sorted(one.span_id for one in spans if one.name in names)


@given(recordings(), st.sampled_from(["solver", "critic", "writer"]))
def test_the_calls_of_one_agent_are_all_found(made: Recorded, agent: str) -> None:
    triplets = TracerTraceToTriplet(agent_match=agent).adapt(made.spans)

    expected = {number for number in made.counted if made.agents[number] == agent}
    assert {number_of(triplet.metadata["response_id"]) for triplet in triplets} == expected
    assert len(triplets) == len(expected)


@given(recordings())
def test_every_call_is_one_conversation_and_one_triplet_of_the_proxy(made: Recorded) -> None:
    said = sorted(talk["messages"][0]["content"] for talk in TraceToMessages().adapt(made.spans))
    by_sequence = LlmProxyTraceToTriplet().adapt(made.spans)

    assert said == sorted(f"q{number}" for number in made.agents)
    assert tokens_of(by_sequence) == [([number, number], [number, 0]) for number in sorted(made.has_tokens)]
