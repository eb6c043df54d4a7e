"""What a trajectory is made of: token sequences with their masks, the breaks between them, and the calls left out.

Plain data that never changes once made, and goes to JSON and back without loss, to a file of one record a line. A
report says in words what of it will be trained and what will not.
"""

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final, Literal, TypeVar, overload

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import to_json
from typing_extensions import Self

from agentlightning.utils.clipped_text import counted
from agentlightning.utils.private_files import replaced_file

Record = TypeVar("Record", bound=BaseModel)

FinishReason = Literal["stop", "length", "tool_calls", "content_filter", "cancelled", "abort"]
"""Why a response ended, in one word for all APIs. Three of them say that it was cut off. `length`: it had all the
tokens it was allowed, or the context was full. `cancelled`: the caller stopped reading. `abort`: the server broke it
off, as vLLM does with responses in flight when it is paused."""
_COLUMNS: Final = ("attempt", "sequence", "agent", "calls", "given", "trained", "reward", "begins because")


class _Reason(str, Enum):
    """A reason with a description for reports."""

    description: str

    def __new__(cls, value: str, description: str) -> Self:
        reason = str.__new__(cls, value)
        reason._value_ = value
        reason.description = description
        return reason


class BreakReason(_Reason):
    """Why a call could not be appended to an earlier sequence."""

    NEW_AGENT = "new_agent", "another agent's first call"
    NEW_CONVERSATION = "new_conversation", "a new conversation"
    RESAMPLED = "resampled", "another answer to the same prompt"
    BRANCHED = "branched", "a second way on from one point"
    RETOKENISED = "retokenised", "the model's words came back as other tokens"
    TOOL_OUTPUT_INSERTED = "tool_output_inserted", "a tool's output was put into the history"
    CONTEXT_TRUNCATED = "context_truncated", "the history was cut"
    CONTEXT_EDITED = "context_edited", "the history was rewritten"


class DropReason(_Reason):
    """Why a call is in no sequence."""

    OTHER_AGENT = "other_agent", "made by an agent that is not trained"
    IN_REWARD = "in_reward", "made to judge, not to act"
    EXCLUDED = "excluded", "excluded from the redirect"
    DUPLICATE = "duplicate", "the same response, recorded twice"
    NESTED = "nested", "the same call, seen by a second tracer"
    UNUSED = "unused", "answered too late: the agent had given up, or asked again"
    NO_PROMPT_IDS = "no_prompt_ids", "no token ids of the prompt"
    NO_RESPONSE_IDS = "no_response_ids", "no token ids of a response"
    UNREADABLE_IDS = "unreadable_ids", "token ids that are no list of integers"
    FAILED = "failed", "failed without a response"
    OTHER_CHOICE = "other_choice", "a further choice of a call with n > 1"


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class SampledCall(_Value):
    """One model call within a sequence."""

    span_id: str
    response_id: str | None = None
    start: int
    """Place of its first sampled token in the sequence."""
    end: int
    """The place after its last sampled token."""
    reward: float | None = None
    weights_version: str | None = None
    finish_reason: FinishReason | None = None
    """Why the response ended; None if it was not recorded."""

    @property
    def is_truncated(self) -> bool:
        """Whether the response is known to have been cut off before the model ended it."""
        return self.finish_reason in ("length", "cancelled", "abort")


class TokenSequence(_Value):
    """A conversation as the model saw it, token by token; the four columns are equally long."""

    agent_name: str
    token_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]
    """1 where the model chose the token, 0 where it was given."""
    logprobs: tuple[float | None, ...]
    """Log-probability with which a sampled token was chosen; None for given tokens and where it was not recorded."""
    weights_versions: tuple[str | None, ...]
    """Version of the weights that chose the token; None as above."""
    calls: tuple[SampledCall, ...]

    @model_validator(mode="after")
    def _columns_are_equally_long(self) -> "TokenSequence":
        lengths = [len(self.token_ids), len(self.loss_mask), len(self.logprobs), len(self.weights_versions)]
        if len(set(lengths)) > 1:
            raise ValueError(f"Columns of a sequence must be equally long; these have {lengths} entries.")
        if sum(self.loss_mask) != sum(call.end - call.start for call in self.calls):
            raise ValueError("The loss mask of a sequence must be 1 exactly on the tokens of its calls.")
        return self

    @property
    def sampled_ids(self) -> tuple[int, ...]:
        """The tokens the model chose."""
        return tuple(token for token, is_sampled in zip(self.token_ids, self.loss_mask, strict=True) if is_sampled)

    @property
    def is_truncated(self) -> bool:
        """Whether one of its responses, at the end or before, is known to have been cut off."""
        return any(call.is_truncated for call in self.calls)

    @property
    def is_aborted(self) -> bool:
        """Whether the server broke a response off: it says nothing of the model and is never learned from."""
        return any(call.finish_reason == "abort" for call in self.calls)


class Break(_Value):
    """Where a call parted from an earlier sequence, so that a new one begins."""

    reason: BreakReason
    sequence: int
    """Number of the sequence that begins."""
    earlier_sequence: int
    """Number of the sequence the call was compared with."""
    position: int
    """How many tokens the prompt and the earlier sequence share."""
    span_id: str
    """The call that begins the new sequence."""
    previous_span_id: str
    """The last call of the earlier sequence at that time."""
    expected_token: int | None = None
    """Token of the earlier sequence at the position; None at its end."""
    found_token: int | None = None
    """Token of the prompt at the position; None at its end."""


class DroppedCall(_Value):
    """A model call that is in no sequence."""

    span_id: str
    name: str
    reason: DropReason
    agent_name: str | None = None
    response_id: str | None = None
    same_call_span_id: str | None = None
    """Another span of the same call, if there is one."""


class Trajectory(_Value):
    """What one attempt gives to learn from, and what it does not."""

    rollout_id: str
    attempt_id: str
    sequences: tuple[TokenSequence, ...]
    """In the order in which they began."""
    breaks: tuple[Break, ...] = ()
    """One for each sequence after the first."""
    dropped: tuple[DroppedCall, ...] = ()
    final_reward: float | None = None
    """The last reward of the attempt; None if it got none."""

    @property
    def n_calls(self) -> int:
        """Model calls in all, trained or dropped."""
        return sum(len(sequence.calls) for sequence in self.sequences) + len(self.dropped)

    @property
    def n_sampled_tokens(self) -> int:
        """Tokens that will be trained."""
        return sum(sum(sequence.loss_mask) for sequence in self.sequences)

    def __str__(self) -> str:
        where = f"{self.rollout_id}/{self.attempt_id}"
        return f"Trajectory({where}: {len(self.sequences)} sequences, {self.n_sampled_tokens} sampled tokens)"

    def model_post_init(self, context: object, /) -> None:
        known = len(self.sequences)
        wrong = next((b for b in self.breaks if not 0 <= b.earlier_sequence < b.sequence < known), None)
        if wrong is not None:
            raise ValueError(f"A break names the sequences {wrong.earlier_sequence} and {wrong.sequence} of {known}.")


# ---------------------------------------------------------------------- files


def write_jsonl(path: str | os.PathLike[str], trajectories: Iterable[BaseModel]) -> int:
    """Write trajectories, or triplets, and return how many; a file that was there is replaced once all are written."""
    count = 0
    with replaced_file(Path(path)) as file:
        for record in trajectories:
            # JSON has no infinity, but a token can have a log-probability of minus infinity.
            file.write(to_json(record.model_dump(), inf_nan_mode="constants") + b"\n")
            count += 1
    return count


@overload
def read_jsonl(path: str | os.PathLike[str]) -> list[Trajectory]: ...
@overload
def read_jsonl(path: str | os.PathLike[str], kind: type[Record]) -> list[Record]: ...
def read_jsonl(path: str | os.PathLike[str], kind: type[Any] = Trajectory) -> list[Any]:
    """The records of a file; pass `Triplet` as the kind to read triplets. Empty lines are skipped."""
    records: list[object] = []
    for number, line in enumerate(Path(path).read_bytes().splitlines(), 1):
        try:
            records += [kind.model_validate_json(line)] if line.strip() else []
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the line"
            raise ValueError(f"Line {number} of {path} is no {kind.__name__}: {where}: {first['msg']}.") from error
    return records


# ---------------------------------------------------------------------- reports


@dataclass(frozen=True)
class TraceReport:
    """A summary of trajectories; `str()` says it in words, `table()` has a line for each sequence."""

    trajectories: tuple[Trajectory, ...]

    @classmethod
    def of(cls, *trajectories: Trajectory) -> "TraceReport":
        return cls(trajectories)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        sequences = [sequence for trajectory in self.trajectories for sequence in trajectory.sequences]
        dropped = [call for trajectory in self.trajectories for call in trajectory.dropped]
        calls = [call for sequence in sequences for call in sequence.calls]
        n_tokens = sum(len(sequence.token_ids) for sequence in sequences)
        n_sampled = sum(trajectory.n_sampled_tokens for trajectory in self.trajectories)
        there_are = (
            f"{counted(len(self.trajectories), 'attempt')} with {counted(len(calls) + len(dropped), 'model call')}"
        )
        yield f"{there_are}: {len(calls)} in {counted(len(sequences), 'sequence')}, {len(dropped)} dropped."
        yield f"{counted(n_sampled, 'token')} will be trained, {n_tokens - n_sampled} are context."
        unrewarded = sum(trajectory.final_reward is None for trajectory in self.trajectories)
        if unrewarded:
            yield f"{counted(unrewarded, 'attempt')} got no reward."
        known = sum(value is not None for sequence in sequences for value in sequence.logprobs)
        if known < n_sampled:
            yield f"{n_sampled - known} of the trained tokens have no log-probability."
        truncated = sum(call.is_truncated for call in calls)
        if truncated:
            yield f"{truncated} of {counted(len(calls), 'answer')} {'was' if truncated == 1 else 'were'} cut off."
        yield from _listed("New sequences were begun:", (b.reason for one in self.trajectories for b in one.breaks))
        yield from _listed("Calls were dropped:", (call.reason for call in dropped))

    def table(self) -> str:
        """One line for each sequence and each dropped call, in columns."""
        rows: list[Sequence[str]] = [_COLUMNS]
        for trajectory in self.trajectories:
            reasons = {b.sequence: f"{b.reason.description} (token {b.position})" for b in trajectory.breaks}
            for number, sequence in enumerate(trajectory.sequences):
                trained = sum(sequence.loss_mask)
                rewards = [call.reward for call in sequence.calls if call.reward is not None]
                reward = f"{rewards[-1]:g}" if rewards else "-"
                counts = (str(len(sequence.calls)), str(len(sequence.token_ids) - trained), str(trained), reward)
                begins = reasons.get(number, "first call")
                rows.append((trajectory.attempt_id, str(number), sequence.agent_name, *counts, begins))
            for call in trajectory.dropped:
                why = f"dropped: {call.reason.description}"
                rows.append((trajectory.attempt_id, "-", call.agent_name or "-", "1", "-", "0", "-", why))
        widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
        )


def _listed(title: str, reasons: Iterable[_Reason]) -> list[str]:
    """How often each reason occurs, the most frequent first; nothing if there is none."""
    lines = [f"  {number} x {reason.description}" for reason, number in Counter(reasons).most_common()]
    return [title, *lines] if lines else []
