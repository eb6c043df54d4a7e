"""What a trajectory is made of: token sequences with their masks, the breaks between them, and the calls left out.

Plain data that never changes once made, and goes to JSON and back without loss, to a file of one record a line.
"""

import os
from collections.abc import Iterable
from enum import Enum
from pathlib import Path
from typing import Any, Final, Literal, TypeVar, overload

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import to_json

from agentlightning.utils.private_files import replaced_file

__all__ = [
    "Break",
    "BreakReason",
    "DropReason",
    "DroppedCall",
    "FinishReason",
    "SampledCall",
    "TokenSequence",
    "Trajectory",
    "read_jsonl",
    "write_jsonl",
]

Record = TypeVar("Record", bound=BaseModel)

FinishReason = Literal["stop", "length", "tool_calls", "content_filter", "cancelled", "abort"]
"""Why an answer ended, in one word for all APIs. Three of them say that it was cut off. `length`: it had all the tokens
it was allowed, or the context was full. `cancelled`: the caller stopped reading. `abort`: the server broke it off, as
vLLM does with answers in flight when it is paused."""
_CUT_OFF: Final = ("length", "cancelled", "abort")


class BreakReason(str, Enum):
    """Why a call could not be appended to an earlier sequence."""

    NEW_AGENT = "new_agent"
    """The first call of this agent."""
    NEW_CONVERSATION = "new_conversation"
    """The prompt repeats nothing the model said before."""
    RESAMPLED = "resampled"
    """The prompt was asked before; this is another answer to it."""
    BRANCHED = "branched"
    """The prompt continues a point from which another call has gone on already."""
    RETOKENISED = "retokenised"
    """What the model said came back as other tokens."""
    TOOL_OUTPUT_INSERTED = "tool_output_inserted"
    """A tool's output was put before something that had been said."""
    CONTEXT_TRUNCATED = "context_truncated"
    """The prompt ends in the middle of the earlier sequence."""
    CONTEXT_EDITED = "context_edited"
    """The history was rewritten."""


class DropReason(str, Enum):
    """Why a call is in no sequence."""

    OTHER_AGENT = "other_agent"
    """It was made by an agent that is not to be trained."""
    IN_REWARD = "in_reward"
    """It was made to judge, not to act."""
    EXCLUDED = "excluded"
    """It was excluded from the redirect, so no model that is trained answered."""
    DUPLICATE = "duplicate"
    """Another span has the same response id."""
    NESTED = "nested"
    """It lies within another call and has no response id: the same call, seen twice."""
    UNUSED = "unused"
    """The agent's client did not take the answer: it had given up, or asked again."""
    NO_PROMPT_IDS = "no_prompt_ids"
    """The tokens of the prompt were not recorded."""
    NO_RESPONSE_IDS = "no_response_ids"
    """The tokens of the response were not recorded, or there were none."""
    UNREADABLE_IDS = "unreadable_ids"
    """Token ids were recorded in a form that is not a list of integers."""
    FAILED = "failed"
    """The call ended in an error and without a response."""


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
    """Why the answer ended; None if it was not recorded."""

    @property
    def is_truncated(self) -> bool:
        """Whether the answer is known to have been cut off before the model ended it."""
        return self.finish_reason in _CUT_OFF


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
        """Whether one of its answers, at the end or before, is known to have been cut off."""
        return any(call.is_truncated for call in self.calls)

    @property
    def is_aborted(self) -> bool:
        """Whether the server broke one of its answers off: it says nothing of the model and is never learned from."""
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

    def model_post_init(self, context: Any, /) -> None:
        known = len(self.sequences)
        wrong = next((b for b in self.breaks if not 0 <= b.earlier_sequence < b.sequence < known), None)
        if wrong is not None:
            raise ValueError(f"A break names the sequences {wrong.earlier_sequence} and {wrong.sequence} of {known}.")


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
    """What was written; pass `Triplet` as the kind to read triplets. Empty lines are skipped."""
    with Path(path).open("rb") as file:
        return [_read_line(path, kind, number, line) for number, line in enumerate(file, 1) if line.strip()]


def _read_line(path: str | os.PathLike[str], kind: type[Record], number: int, line: bytes) -> Record:
    try:
        return kind.model_validate_json(line)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the line"
        raise ValueError(f"Line {number} of {path} is no {kind.__name__}: {where}: {first['msg']}.") from error
