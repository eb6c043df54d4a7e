"""Spans become trajectories: token sequences with loss masks, ready to be trained on.

A triplet holds one call, so a conversation of ten turns is ten triplets that repeat each other. A trajectory holds the
conversation once: what the model chose is marked, what it was given is not, and a call that continues another adds only
its new tokens. Nothing is lost in silence: every model call is in exactly one sequence, or in the list of dropped calls
with a reason.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from agentlightning.adapter.base import TraceAdapter, as_spans
from agentlightning.adapter.call_attributes import further_choices, requests_other_model
from agentlightning.adapter.calls import ANY_AGENT, ANY_CALL_MATCH, CallScope, ModelCall
from agentlightning.adapter.matching import RewardMatchPolicy
from agentlightning.adapter.sequence_builder import SequenceBuilder
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
from agentlightning.adapter.tree import TraceTree
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
        calls.sort(tree.model_calls(self.llm_call_match, self.agent_match, scope, set()))
        places = [call.node for call in (*calls.taken, *calls.others.values()) if call.node is not None]
        rewards = tree.match_rewards(self.reward_match, places)
        builder = SequenceBuilder()
        for call in sorted(calls.taken, key=lambda taken: _chronological(taken.span)):
            call.reward = rewards.get(call.span.span_id)
            builder.add(call)
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
    taken: list[ModelCall] = field(default_factory=list)
    dropped: list[DroppedCall] = field(default_factory=list)
    others: dict[str, ModelCall] = field(default_factory=dict)
    """Calls of other agents, and those with tokens of other models, by response: rewards may be theirs."""

    def sort(self, calls: Iterable[ModelCall]) -> None:
        """Take or drop every call."""
        for call in calls:
            first = call.same_call or call
            is_other = requests_other_model(first.span.attributes, self.model)
            is_one = call.dropped is None or (call.same_call is not None and call.dropped is not DropReason.UNUSED)
            is_acting = (is_other and is_one and call.flaw is None) or call.dropped is DropReason.OTHER_AGENT
            if is_acting and not call.is_judging:
                self.others.setdefault(call.response_id or call.span.span_id, first)
            if is_other:
                continue
            if call.dropped is None and call.flaw is None:
                self.taken.append(call)
                choices = further_choices(call.whole.attributes)
                self.dropped += [_dropped(call, DropReason.OTHER_CHOICE, call)] * choices
            else:
                self.dropped.append(_dropped(call, call.dropped or call.flaw, call.same_call))


def _dropped(call: ModelCall, reason: DropReason | None, same_call: ModelCall | None) -> DroppedCall:
    assert reason is not None
    return DroppedCall(
        span_id=call.span.span_id,
        name=call.span.name,
        reason=reason,
        agent_name=call.agent_name,
        response_id=call.response_id,
        same_call_span_id=None if same_call is None else same_call.span.span_id,
    )
