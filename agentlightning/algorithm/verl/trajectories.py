"""Rollouts become rows for verl, and rows what its TransferQueue holds: unpadded trajectories with tags.

A row is a prompt, a response, and which tokens of the response the model chose. A row of the level "transition" is one
model call. A row of the level "trajectory" is one conversation: its prompt ends where the model first speaks, and its
response holds all that follows; the mask leaves out what tools and users said.

A prompt that is too long leaves its row out: advantages are computed from the reward of the whole session, so the other
rows lose nothing. A response that is too long keeps its beginning. Both are counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal, get_args

import orjson
import torch

from agentlightning.adapter.calls import ModelCall
from agentlightning.adapter.sequence_builder import SequenceBuilder
from agentlightning.adapter.sequences import BreakReason, DropReason, TokenSequence, Trajectory
from agentlightning.algorithm.comparison import FailedReward, check_failed_reward
from agentlightning.algorithm.verl.launch import Configuration
from agentlightning.errors import ConfigurationError
from agentlightning.semconv import LOGPROBS, PROMPT_IDS, RESPONSE_IDS
from agentlightning.types import Span, Triplet
from agentlightning.utils.json_values import JsonObject
from agentlightning.utils.private_files import append_to

Level = Literal["transition", "trajectory"]

_WITHOUT_TOKENS: Final = (DropReason.NO_PROMPT_IDS, DropReason.NO_RESPONSE_IDS, DropReason.UNREADABLE_IDS)
MISMATCH_FILE: Final = "mismatches.jsonl"
_MISMATCHES: Final = (
    BreakReason.RETOKENISED,
    BreakReason.TOOL_OUTPUT_INSERTED,
    BreakReason.CONTEXT_TRUNCATED,
    BreakReason.CONTEXT_EDITED,
)
"""The other reasons are new conversations, which nothing could have joined."""


@dataclass(frozen=True)
class Row:
    """One line of a batch, before it is brought to a length; the last three columns are equally long."""

    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    response_mask: Sequence[int]
    """1 where the model chose the token; always so for the first."""
    logprobs: Sequence[float | None]


def rows_of(trace: Trajectory | Sequence[Triplet], level: Level) -> list[Row]:
    """The rows of one rollout; calls without a prompt or a response give none."""
    rows = [
        Row(one.token_ids[:start], one.token_ids[start:end], one.loss_mask[start:end], one.logprobs[start:end])
        for one in as_trajectory(trace).sequences
        for start, end in _cuts(one, level)
    ]
    return [row for row in rows if row.prompt_ids and row.response_ids]


def as_trajectory(trace: Trajectory | Sequence[Triplet]) -> Trajectory:
    """Triplets joined to conversations, where one continues another; a trajectory as it is."""
    if isinstance(trace, Trajectory):
        return trace
    builder = SequenceBuilder()
    for call in _calls(trace):
        builder.add(call)
    sequences = tuple(sequence.finished() for sequence in builder.sequences)
    return Trajectory(rollout_id="", attempt_id="", sequences=sequences, breaks=tuple(builder.breaks))


def count_calls(trace: Trajectory | Sequence[Triplet]) -> tuple[int, int]:
    """Model calls with the token ids of both prompt and response, and those in no row for want of them."""
    if isinstance(trace, Trajectory):
        without = sum(call.reason in _WITHOUT_TOKENS for call in trace.dropped)
        return sum(len(sequence.calls) for sequence in trace.sequences), without
    found = len(_calls(trace))
    return found, len(trace) - found


def _cuts(sequence: TokenSequence, level: Level) -> list[tuple[int, int]]:
    """Where the responses of a sequence begin and end."""
    if level == "transition":
        return [(call.start, call.end) for call in sequence.calls]
    if 1 not in sequence.loss_mask:
        return []
    return [(sequence.loss_mask.index(1), len(sequence.token_ids))]


def _calls(triplets: Sequence[Triplet]) -> list[ModelCall]:
    """Triplets with tokens, as calls of spans with these alone."""
    calls: list[ModelCall] = []
    for number, triplet in enumerate(triplets):
        ids = ((PROMPT_IDS, triplet.prompt, "token_ids"), (RESPONSE_IDS, triplet.response, "token_ids"))
        facts = (*ids, (LOGPROBS, triplet.response, "logprobs"))
        span = Span.from_attributes(attributes={}, sequence_id=number, span_id=f"triplet-{number}")
        span.attributes |= {name: side[key] for name, side, key in facts if isinstance(side, dict) and key in side}
        calls.append(ModelCall(span, triplet.metadata.get("agent_name")))
    return [call for call in calls if call.flaw is None]


def write_mismatches(rollout_id: str, data_id: str, trace: Trajectory | Sequence[Triplet], folder: Path) -> int:
    """Append a line for each mismatch to the file in the folder, which is made if need be; how many there are."""
    lines = [
        orjson.dumps({"rollout_id": rollout_id, "data_id": data_id, **one.model_dump(mode="json")})
        for one in as_trajectory(trace).breaks
        if one.reason in _MISMATCHES
    ]
    folder.mkdir(parents=True, exist_ok=True)
    with append_to(folder / MISMATCH_FILE) as file:
        file.writelines(line + b"\n" for line in lines)
    return len(lines)


# ---------------------------------------------------------------------- for verl


@dataclass(frozen=True, kw_only=True)
class TrajectorySettings:
    """What a trajectory is, and how long it may be."""

    max_prompt_length: int
    max_response_length: int
    level: Level = "transition"
    failed: FailedReward = "skip"
    """What a rollout counts in training that failed or has no reward: "skip" leaves it out, "worst" is 0, or the
    smallest reward of its group if that is negative, and a number is its reward. GRPO has the same choice."""
    mismatch_folder: Path | None = None
    """Where it is written down why turns of a conversation could not be joined; None writes nothing."""

    def __post_init__(self) -> None:
        check_failed_reward("failed", self.failed)
        if self.level not in get_args(Level):
            raise ConfigurationError(f"level is {self.level!r}; it must be one of 'transition', 'trajectory'.")
        for name in ("max_prompt_length", "max_response_length"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ConfigurationError(f"{name} is {value!r}; it must be a number of tokens, at least 1.")

    @classmethod
    def from_config(cls, config: Configuration) -> "TrajectorySettings":
        """As `agentlightning.trace_aggregator` and `data` of verl's configuration say."""
        try:
            aggregator = config["agentlightning"]["trace_aggregator"]
            level = aggregator["level"]
            is_trajectory = level == "trajectory"
            lengths = aggregator if is_trajectory else config["data"]
            prefix = "trajectory_" if is_trajectory else ""
            return cls(
                level=level,
                max_prompt_length=lengths[f"{prefix}max_prompt_length"],
                max_response_length=lengths[f"{prefix}max_response_length"],
                failed=config["agentlightning"]["failed"],
                mismatch_folder=Path(aggregator["mismatch_log_dir"]) if aggregator["debug"] else None,
            )
        except KeyError as error:
            raise ConfigurationError(f"verl's configuration has no {error}, which trajectories need.") from error


@dataclass(frozen=True)
class SessionRows:
    """The rows of one rollout that can be learned from, and what was left out of them."""

    rows: tuple[Row, ...] = ()
    calls: int = 0
    """Model calls with tokens."""
    too_long: int = 0
    """Rows left out because of their prompt."""
    truncated: int = 0
    """Rows whose response was cut."""
    without_tokens: int = 0
    """Model calls without token ids or log-probabilities: another model than ours answered them."""


def session_rows(trace: Trajectory | Sequence[Triplet], settings: TrajectorySettings) -> SessionRows:
    """The rows of one rollout, as long as they may be."""
    found = rows_of(trace, settings.level)
    known = [
        row
        for row in found
        if None not in [one for one, is_chosen in zip(row.logprobs, row.response_mask, strict=True) if is_chosen]
    ]
    fitting = [row for row in known if len(row.prompt_ids) <= settings.max_prompt_length]
    limit = settings.max_response_length
    rows = [
        replace(
            row,
            response_ids=row.response_ids[:limit],
            response_mask=row.response_mask[:limit],
            logprobs=row.logprobs[:limit],
        )
        for row in fitting
    ]
    calls, without_tokens = count_calls(trace)
    return SessionRows(
        rows=tuple(row for row in rows if any(row.response_mask)),
        calls=calls,
        too_long=len(known) - len(fitting),
        truncated=sum(len(row.response_ids) > limit for row in fitting),
        without_tokens=without_tokens + len(found) - len(known),
    )


def placeholder_row(end_id: int) -> Row:
    """Stands in a validation for a rollout that left nothing, so that its score counts; it teaches nothing."""
    return Row(prompt_ids=[end_id], response_ids=[end_id], response_mask=[0], logprobs=[0.0])


def fields_of(row: Row, reward: float, others: JsonObject) -> JsonObject:
    """The fields of one trajectory.

    Args:
        reward: Of the whole session; it stands on the last token.
        others: Fields that are no tensors: uid, num_turns, data_source, reward_model, extra_fields.
    """
    prompts = torch.tensor(list(row.prompt_ids), dtype=torch.int64)
    responses = torch.tensor(list(row.response_ids), dtype=torch.int64)
    mask = torch.tensor(list(row.response_mask), dtype=torch.int64)
    scores = torch.zeros(len(responses), dtype=torch.float32)
    scores[-1] = reward
    return {
        "prompts": prompts,
        "responses": responses,
        "response_mask": mask,
        "loss_mask": mask.clone(),
        "input_ids": torch.cat([prompts, responses]),
        "position_ids": torch.arange(len(prompts) + len(responses), dtype=torch.int64),
        "rollout_log_probs": torch.tensor([one or 0.0 for one in row.logprobs], dtype=torch.float32),
        "rm_scores": scores,
        "multi_modal_inputs": {},
        **others,
    }


def tag_of(row: Row, *, global_steps: int, versions: Sequence[int]) -> JsonObject:
    """The tag of one trajectory.

    Args:
        global_steps: The step for which verl asked for it.
        versions: Of the weights that sampled it; at least one.
    """
    prompt_len, response_len = len(row.prompt_ids), len(row.response_ids)
    return {
        "status": "success",
        "prompt_len": prompt_len,
        "response_len": response_len,
        "seq_len": prompt_len + response_len,
        "global_steps": global_steps,
        "min_global_steps": min(versions),
        "max_global_steps": max(versions),
    }
