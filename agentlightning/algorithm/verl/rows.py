"""Rollouts become rows for verl: a prompt, a response, and which tokens of the response the model chose.

A row of the level "transition" is one model call. A row of the level "trajectory" is one conversation: its prompt ends
where the model first speaks, and its response holds all that follows; the mask leaves out what tools and users said.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from agentlightning.adapter.calls import LOGPROBS, as_token_ids, logprobs_of
from agentlightning.adapter.sequence_builder import ModelCall, SequenceBuilder
from agentlightning.adapter.sequences import DropReason, TokenSequence, Trajectory
from agentlightning.adapter.tree import ANY_AGENT
from agentlightning.types import Span, Triplet

__all__ = ["Level", "Row", "as_trajectory", "calls_with_tokens", "calls_without_tokens", "rows_of"]

Level = Literal["transition", "trajectory"]

_WITHOUT_TOKENS: Final = (DropReason.NO_PROMPT_IDS, DropReason.NO_RESPONSE_IDS, DropReason.UNREADABLE_IDS)


@dataclass(frozen=True)
class Row:
    """One line of a batch, before it is brought to a length; the last three columns are equally long."""

    turn_index: int
    """Which call, or which conversation, of its rollout."""
    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    response_mask: Sequence[int]
    """1 where the model chose the token; always so for the first."""
    logprobs: Sequence[float | None]


def rows_of(trace: Trajectory | Sequence[Triplet], level: Level) -> list[Row]:
    """The rows of one rollout; calls without a prompt or a response give none."""
    if level == "transition" and not isinstance(trace, Trajectory):
        return [_transition(number, call) for number, call in _calls(trace)]
    cuts = [cut for sequence in as_trajectory(trace).sequences for cut in _cuts(sequence, level)]
    return [row for number, cut in enumerate(cuts) if (row := _cut(number, *cut)).prompt_ids and row.response_ids]


def as_trajectory(trace: Trajectory | Sequence[Triplet]) -> Trajectory:
    """Triplets joined to conversations, where one continues another; a trajectory as it is."""
    if isinstance(trace, Trajectory):
        return trace
    builder = SequenceBuilder()
    for _, call in _calls(trace):
        builder.add(call)
    sequences = tuple(sequence.finished() for sequence in builder.sequences)
    return Trajectory(rollout_id="", attempt_id="", sequences=sequences, breaks=tuple(builder.breaks))


def calls_with_tokens(trace: Trajectory | Sequence[Triplet]) -> int:
    """How many model calls have the token ids of both prompt and response."""
    if isinstance(trace, Trajectory):
        return sum(len(sequence.calls) for sequence in trace.sequences)
    return sum(1 for _ in _calls(trace))


def calls_without_tokens(trace: Trajectory | Sequence[Triplet]) -> int:
    """How many model calls are in no row because their token ids were not recorded."""
    if isinstance(trace, Trajectory):
        return sum(call.reason in _WITHOUT_TOKENS for call in trace.dropped)
    return len(trace) - calls_with_tokens(trace)


def _cuts(sequence: TokenSequence, level: Level) -> list[tuple[TokenSequence, int, int]]:
    """Where the responses of a sequence begin and end."""
    if level == "transition":
        return [(sequence, call.start, call.end) for call in sequence.calls]
    if 1 not in sequence.loss_mask:
        return []
    return [(sequence, sequence.loss_mask.index(1), len(sequence.token_ids))]


def _cut(number: int, sequence: TokenSequence, start: int, end: int) -> Row:
    return Row(
        turn_index=number,
        prompt_ids=sequence.token_ids[:start],
        response_ids=sequence.token_ids[start:end],
        response_mask=sequence.loss_mask[start:end],
        logprobs=sequence.logprobs[start:end],
    )


def _transition(number: int, call: ModelCall) -> Row:
    length = len(call.response_ids)
    return Row(number, call.prompt_ids, call.response_ids, [1] * length, call.logprobs or [None] * length)


def _calls(triplets: Sequence[Triplet]) -> Iterator[tuple[int, ModelCall]]:
    """Triplets with tokens, each with its place among all of them."""
    for number, triplet in enumerate(triplets):
        prompt_ids, response_ids = _ids(triplet.prompt), _ids(triplet.response)
        if prompt_ids and response_ids:
            yield (
                number,
                ModelCall(
                    span=Span.from_attributes(attributes={}, sequence_id=number, span_id=f"triplet-{number}"),
                    agent_name=triplet.metadata.get("agent_name") or ANY_AGENT,
                    prompt_ids=prompt_ids,
                    response_ids=response_ids,
                    logprobs=logprobs_of({LOGPROBS: triplet.response.get("logprobs")}, len(response_ids)),
                ),
            )


def _ids(side: Any) -> list[int]:
    found = as_token_ids(side.get("token_ids")) if isinstance(side, dict) else None
    return found if isinstance(found, list) else []
