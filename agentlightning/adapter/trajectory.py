"""Spans become trajectories: token sequences with loss masks, ready to be trained on.

A triplet holds one call, so a conversation of ten turns is ten triplets that repeat each other. A trajectory holds the
conversation once: what the model chose is marked, what it was given is not, and a call that continues another adds only
its new tokens. Nothing is lost in silence: every model call is in exactly one sequence, or in the list of dropped calls
with a reason.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from agentlightning.adapter.base import TraceAdapter, as_spans
from agentlightning.adapter.call_filter import CallCandidate, CallScope, RejectedBecause
from agentlightning.adapter.calls import (
    Unreadable,
    finish_reason_of,
    logprobs_of,
    prompt_ids_of,
    response_id_of,
    response_ids_of,
    weights_version_of,
)
from agentlightning.adapter.matching import RewardMatchPolicy
from agentlightning.adapter.report import TraceReport
from agentlightning.adapter.sequence_builder import ModelCall, SequenceBuilder
from agentlightning.adapter.sequences import (
    Break,
    BreakReason,
    DroppedCall,
    DropReason,
    FinishReason,
    SampledCall,
    TokenSequence,
    Trajectory,
    read_jsonl,
    write_jsonl,
)
from agentlightning.adapter.tree import ANY_AGENT, ANY_CALL_MATCH, TraceTree
from agentlightning.types.agents import AgentMatcher
from agentlightning.types.rewards import final_reward_of
from agentlightning.types.tracer import Span, SpanLike

__all__ = [
    "Break",
    "BreakReason",
    "DropReason",
    "DroppedCall",
    "FinishReason",
    "SampledCall",
    "TokenSequence",
    "TraceReport",
    "TraceToTrajectory",
    "Trajectory",
    "read_jsonl",
    "write_jsonl",
]


@dataclass(frozen=True)
class _Tokens:
    prompt_ids: list[int]
    response_ids: list[int]


@dataclass(frozen=True)
class _Taken:
    """A call to train."""

    candidate: CallCandidate
    tokens: _Tokens
    place: TraceTree
    """Where and when the agent made it; another span than the candidate's may have the tokens."""


@dataclass
class _Sorted:
    """The model calls of a trace, sorted into those to train and those not."""

    taken: list[_Taken] = field(default_factory=list)
    dropped: list[DroppedCall] = field(default_factory=list)


class TraceToTrajectory(TraceAdapter[Trajectory]):
    """The spans of one attempt as one trajectory.

    Args:
        llm_call_match: pattern that the name of a model call matches somewhere.
        agent_match: the agents to train: a regular expression that matches somewhere in their names, or an
            `AgentMatcher`; None trains all.
        reward_match: where the reward of a call is looked for.
    """

    def __init__(
        self,
        llm_call_match: str = ANY_CALL_MATCH,
        agent_match: str | AgentMatcher | None = None,
        reward_match: RewardMatchPolicy = RewardMatchPolicy.FIRST_OCCURRENCE,
    ) -> None:
        self.llm_call_match = llm_call_match
        self.agent_match = agent_match
        self.reward_match = reward_match

    def adapt(self, source: Sequence[SpanLike], /) -> Trajectory:
        """What the attempt gives to learn from; the order of the spans does not matter.

        Raises:
            ValueError: there are no spans, they are of several attempts, or some are their own ancestors.
        """
        spans = sorted(as_spans(source), key=_chronological)
        owners = {(span.rollout_id, span.attempt_id) for span in spans}
        if len(owners) > 1:
            raise ValueError(
                f"The spans belong to {len(owners)} attempts; give those of one, "
                "such as query_spans(rollout_id, attempt_id='latest') returns."
            )
        tree = TraceTree.from_spans(spans)
        tree.repair_hierarchy()
        scope = CallScope(ANY_AGENT if self.agent_match is None else None, in_reward=False)
        candidates = tree.call_candidates(
            llm_call_match=self.llm_call_match, agent_match=self.agent_match, scope=scope, dedup=True
        )
        calls = _sort_out(candidates)
        rewards = tree.match_rewards(self.reward_match, [taken.place for taken in calls.taken])
        builder = SequenceBuilder()
        for taken in sorted(calls.taken, key=lambda taken: _chronological(taken.place.span)):
            builder.add(_model_call(taken, rewards.get(taken.place.id)))
        return Trajectory(
            rollout_id=spans[0].rollout_id,
            attempt_id=spans[0].attempt_id,
            sequences=tuple(sequence.finished() for sequence in builder.sequences),
            breaks=tuple(builder.breaks),
            dropped=tuple(calls.dropped),
            final_reward=final_reward_of(spans),
        )


def _chronological(span: Span) -> tuple[int, float, float, str]:
    """Sequence ids first, because clocks of different machines may disagree; then the clock."""
    start = float("-inf") if span.start_time is None else span.start_time
    end = float("-inf") if span.end_time is None else span.end_time
    return span.sequence_id, start, end, span.span_id


def _sort_out(candidates: Iterable[CallCandidate]) -> _Sorted:
    """Every candidate is taken or dropped; of two spans of one call, the one with tokens is taken."""
    result = _Sorted()
    tokenless: dict[str, int] = {}
    for candidate in candidates:
        node, original = candidate.node, candidate.stands_for
        read = _read_tokens(node.span)
        if isinstance(read, _Tokens) and candidate.rejected is None:
            result.taken.append(_Taken(candidate, read, node))
            continue
        is_same = original is not None and candidate.rejected is not RejectedBecause.UNUSED
        if isinstance(read, _Tokens) and original is not None and is_same and original.id in tokenless:
            result.taken.append(_Taken(candidate, read, original))
            index = tokenless.pop(original.id)
            result.dropped[index] = result.dropped[index].model_copy(update={"same_call_span_id": node.id})
            continue
        if candidate.rejected is None:
            tokenless[node.id] = len(result.dropped)
        result.dropped.append(_dropped(candidate, read))
    return result


def _read_tokens(span: Span) -> _Tokens | DropReason:
    prompt_ids, response_ids = prompt_ids_of(span.attributes), response_ids_of(span.attributes)
    if isinstance(prompt_ids, Unreadable) or isinstance(response_ids, Unreadable):
        return DropReason.UNREADABLE_IDS
    if not response_ids and span.status.status_code == "ERROR":
        return DropReason.FAILED
    if not response_ids:
        return DropReason.NO_RESPONSE_IDS
    return _Tokens(prompt_ids, response_ids) if prompt_ids else DropReason.NO_PROMPT_IDS


def _dropped(candidate: CallCandidate, read: _Tokens | DropReason) -> DroppedCall:
    if candidate.rejected is not None:
        reason = DropReason(candidate.rejected.value)
    else:
        assert isinstance(read, DropReason)
        reason = read
    return DroppedCall(
        span_id=candidate.node.id,
        name=candidate.node.span.name,
        reason=reason,
        agent_name=candidate.agent_name,
        response_id=response_id_of(candidate.node.span.attributes),
        same_call_span_id=candidate.stands_for.id if candidate.stands_for is not None else None,
    )


def _model_call(taken: _Taken, reward: float | None) -> ModelCall:
    candidate, tokens = taken.candidate, taken.tokens
    span = candidate.node.span
    reason = finish_reason_of(span.attributes)
    if reason is None:  # the other span of the call may know
        reason = finish_reason_of(taken.place.span.attributes)
    return ModelCall(
        span=span,
        agent_name=candidate.agent_name or ANY_AGENT,
        prompt_ids=tokens.prompt_ids,
        response_ids=tokens.response_ids,
        response_id=response_id_of(span.attributes),
        logprobs=logprobs_of(span.attributes, len(tokens.response_ids)),
        weights_version=weights_version_of(span.attributes),
        reward=reward,
        finish_reason=reason,
    )
