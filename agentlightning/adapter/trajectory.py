"""Spans become trajectories: token sequences with loss masks, ready to be trained on.

A triplet holds one call, so a conversation of ten turns is ten triplets that repeat each other. A trajectory holds the
conversation once: what the model chose is marked, what it was given is not, and a call that continues another adds only
its new tokens. Nothing is lost in silence: every model call is in exactly one sequence, or in the list of dropped calls
with a reason.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from agentlightning.adapter.base import TraceAdapter, as_spans
from agentlightning.adapter.call_filter import ANY_CALL_MATCH, CallCandidate, CallScope
from agentlightning.adapter.calls import (
    Unreadable,
    finish_reason_of,
    further_choices,
    logprobs_of,
    prompt_ids_of,
    requests_other_model,
    response_id_of,
    response_ids_of,
    weights_version_of,
)
from agentlightning.adapter.matching import RewardMatchPolicy
from agentlightning.adapter.sequence_builder import CallTokens, SequenceBuilder
from agentlightning.adapter.sequences import (
    Break,
    BreakReason,
    DroppedCall,
    DropReason,
    FinishReason,
    SampledCall,
    TokenSequence,
    TraceReport,
    Trajectory,
    read_jsonl,
    write_jsonl,
)
from agentlightning.adapter.tree import ANY_AGENT, TraceTree
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


@dataclass(eq=False, repr=False)
class TraceToTrajectory(TraceAdapter[Trajectory]):
    """The spans of one attempt as one trajectory.

    Args:
        llm_call_match: pattern that the name of a model call matches somewhere.
        agent_match: the agents to train: a regular expression that matches somewhere in their names, or an
            `AgentMatcher`; None trains all.
        reward_match: where the reward of a call is looked for; a reward that is nearer to the call of another agent, or
            of another trained model, is not for a call that is trained.
        model: of a trace with calls of several models, the one to train; None trains all.
    """

    llm_call_match: str = ANY_CALL_MATCH
    agent_match: str | AgentMatcher | None = None
    reward_match: RewardMatchPolicy = RewardMatchPolicy.FIRST_OCCURRENCE
    model: str | None = None

    def adapt(self, source: Sequence[SpanLike], /) -> Trajectory:
        """What the attempt gives to learn from; the order of the spans does not matter.

        Raises:
            ValueError: there are no spans, or they are of several attempts.
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
        calls = _Calls(self.model)
        calls.sort(tree.call_candidates(self.llm_call_match, self.agent_match, scope, set()))
        places = [*(place for place, _ in calls.taken), *calls.others.values()]
        rewards = tree.match_rewards(self.reward_match, places)
        builder = SequenceBuilder()
        for place, call in sorted(calls.taken, key=lambda taken: _chronological(taken[0].span)):
            builder.add(replace(call, reward=rewards.get(place.id)))
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


@dataclass
class _Calls:
    """The model calls of a trace, sorted into those to train and those not."""

    model: str | None = None
    """The one to train; calls of others are no part of the trajectory. None is any model."""
    taken: list[tuple[TraceTree, CallTokens]] = field(default_factory=list)
    """Where and when the agent made each; another span than that may have the tokens."""
    dropped: list[DroppedCall] = field(default_factory=list)
    others: dict[str, TraceTree] = field(default_factory=dict)
    """Calls of other agents, and those with tokens of other models, by response: rewards may be theirs."""

    def sort(self, candidates: Iterable[CallCandidate]) -> None:
        """Take or drop every candidate; of two spans of one call, the one with tokens is taken."""
        tokenless: dict[str, int] = {}
        for candidate in candidates:
            node, original = candidate.node, candidate.same_call
            span = node.span
            prompt_ids, response_ids = prompt_ids_of(span.attributes), response_ids_of(span.attributes)
            reason = _missing_tokens(prompt_ids, response_ids, is_error=span.status.status_code == "ERROR")
            place = node if candidate.dropped is None else None
            is_other = requests_other_model((original or node).span.attributes, self.model)
            is_same = original is not None and candidate.dropped is not DropReason.UNUSED
            is_sampled = reason is None and (place is not None or is_same)
            is_acting = (is_other and is_sampled) or candidate.dropped is DropReason.OTHER_AGENT
            if is_acting and not candidate.is_judging:
                self.others.setdefault(response_id_of(span.attributes) or node.id, original or node)
            if is_other:
                continue
            if reason is None and is_same and original is not None and original.id in tokenless:
                place = original
                index = tokenless.pop(original.id)
                self.dropped[index] = self.dropped[index].model_copy(update={"same_call_span_id": node.id})
            if place is not None and reason is None:
                assert isinstance(prompt_ids, list)
                assert isinstance(response_ids, list)
                ended = finish_reason_of(span.attributes) or finish_reason_of(place.span.attributes)
                call = CallTokens(
                    span=span,
                    agent_name=candidate.agent_name or ANY_AGENT,
                    prompt_ids=prompt_ids,
                    response_ids=response_ids,
                    response_id=response_id_of(span.attributes),
                    logprobs=logprobs_of(span.attributes, len(response_ids)),
                    weights_version=weights_version_of(span.attributes),
                    finish_reason=ended,
                )
                self.taken.append((place, call))
                self.dropped += [_dropped(candidate, DropReason.OTHER_CHOICE, place)] * further_choices(span.attributes)
                continue
            if candidate.dropped is None:
                tokenless[node.id] = len(self.dropped)
            why = candidate.dropped or reason
            assert why is not None
            self.dropped.append(_dropped(candidate, why, original))


def _dropped(candidate: CallCandidate, reason: DropReason, same_call: TraceTree | None) -> DroppedCall:
    span = candidate.node.span
    return DroppedCall(
        span_id=candidate.node.id,
        name=span.name,
        reason=reason,
        agent_name=candidate.agent_name,
        response_id=response_id_of(span.attributes),
        same_call_span_id=None if same_call is None else same_call.id,
    )


def _missing_tokens(
    prompt_ids: list[int] | Unreadable | None, response_ids: list[int] | Unreadable | None, *, is_error: bool
) -> DropReason | None:
    """Why a call cannot be trained; None if it can."""
    if isinstance(prompt_ids, Unreadable) or isinstance(response_ids, Unreadable):
        return DropReason.UNREADABLE_IDS
    if not response_ids:
        return DropReason.FAILED if is_error else DropReason.NO_RESPONSE_IDS
    return None if prompt_ids else DropReason.NO_PROMPT_IDS
