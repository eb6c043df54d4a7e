"""Rows become what verl's TransferQueue holds: unpadded trajectories, with the tags that its replay buffer reads.

A prompt that is too long leaves its row out: advantages are computed from the reward of the whole session, so the other
rows lose nothing. A response that is too long keeps its beginning. Both are counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch

from agentlightning.adapter.sequences import Trajectory
from agentlightning.algorithm.intervals import FailedReward, check_failed_reward
from agentlightning.algorithm.verl.config import Configuration
from agentlightning.algorithm.verl.rows import Level, Row, calls_with_tokens, calls_without_tokens, rows_of
from agentlightning.errors import ConfigurationError
from agentlightning.types import Triplet

__all__ = ["SessionRows", "TrajectorySettings", "fields_of", "placeholder_row", "session_rows", "tag_of"]


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
    known = [row for row in found if not _lacks_logprobs(row)]
    fitting = [row for row in known if len(row.prompt_ids) <= settings.max_prompt_length]
    limit = settings.max_response_length
    rows = [_cut(row, limit) for row in fitting]
    return SessionRows(
        rows=tuple(row for row in rows if any(row.response_mask)),
        calls=calls_with_tokens(trace),
        too_long=len(known) - len(fitting),
        truncated=sum(len(row.response_ids) > limit for row in fitting),
        without_tokens=calls_without_tokens(trace) + len(found) - len(known),
    )


def placeholder_row(end_id: int) -> Row:
    """Stands in a validation for a rollout that left nothing, so that its score counts; it teaches nothing."""
    return Row(turn_index=0, prompt_ids=[end_id], response_ids=[end_id], response_mask=[0], logprobs=[0.0])


def fields_of(row: Row, reward: float, others: dict[str, Any]) -> dict[str, Any]:
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


def tag_of(row: Row, *, global_steps: int, versions: Sequence[int]) -> dict[str, Any]:
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


def _lacks_logprobs(row: Row) -> bool:
    return any(one is None for one, is_chosen in zip(row.logprobs, row.response_mask, strict=True) if is_chosen)


def _cut(row: Row, limit: int) -> Row:
    if len(row.response_ids) <= limit:
        return row
    return Row(
        row.turn_index, row.prompt_ids, row.response_ids[:limit], row.response_mask[:limit], row.logprobs[:limit]
    )
