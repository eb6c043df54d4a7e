"""Rollouts become verl's training batch: tensors of one shape, on the CPU.

A prompt is padded on the left and a response on the right, so that a row is `[padding, prompt, response, padding]`. The
reward of a rollout stands on the last token the model chose in each of its rows. A prompt that is too long keeps its
end and is marked to be dropped, after advantages were computed with it; a response that is too long keeps its
beginning. Nothing is lost in silence: the metrics count what was cut, marked and left out.
"""

import dataclasses
import importlib
import importlib.util
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Final, get_args

import torch
from torch import Tensor

from agentlightning.algorithm.intervals import FailedReward, check_failed_reward, reward_of_failed
from agentlightning.algorithm.verl.config import Configuration
from agentlightning.algorithm.verl.mismatches import write_mismatches
from agentlightning.algorithm.verl.padding import (
    get_left_padded_ids_and_attention_mask,
    get_right_padded_ids_and_attention_mask,
)
from agentlightning.algorithm.verl.rows import Level, Row, TracedRollout, calls_without_tokens, reward_of, rows_of
from agentlightning.errors import ConfigurationError
from agentlightning.utils.installation import install_command

__all__ = ["BatchSettings", "VerlBatch", "batch_of"]

_NON_TENSORS: Final = ("data_id_list", "rollout_id_list", "turn_index_list")


@dataclass(frozen=True, kw_only=True)
class BatchSettings:
    """The shape of a batch."""

    max_prompt_length: int
    max_response_length: int
    pad_token_id: int = 0
    level: Level = "transition"
    failed: FailedReward = "skip"
    """What a rollout that failed, or has no reward, counts: "skip" leaves it out of the batch, "worst" is 0, or the
    smallest reward of the batch if that is negative, and a number is its reward. GRPO has the same choice."""
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
    def from_config(cls, config: Configuration, *, pad_token_id: int) -> "BatchSettings":
        """As `agentlightning.trace_aggregator` and `data` of verl's configuration say."""
        try:
            aggregator = config["agentlightning"]["trace_aggregator"]
            level = aggregator["level"]
            by_level = level == "trajectory"
            lengths = aggregator if by_level else config["data"]
            prefix = "trajectory_" if by_level else ""
            return cls(
                level=level,
                max_prompt_length=lengths[f"{prefix}max_prompt_length"],
                max_response_length=lengths[f"{prefix}max_response_length"],
                pad_token_id=pad_token_id,
                failed=config["agentlightning"]["failed"],
                mismatch_folder=Path(aggregator["mismatch_log_dir"]) if aggregator["debug"] else None,
            )
        except KeyError as error:
            raise ConfigurationError(
                f"verl's configuration has no {error}, which the shape of a batch needs."
            ) from error


@dataclass(frozen=True, eq=False)
class VerlBatch:
    """The columns of verl's batch; B rows, prompts of P tokens, responses of R tokens."""

    prompts: Tensor
    """[B, P]"""
    responses: Tensor
    """[B, R]"""
    input_ids: Tensor
    """[B, P + R]"""
    attention_mask: Tensor
    """[B, P + R]; 0 on padding."""
    position_ids: Tensor
    """[B, P + R]; the first token that is no padding is at 0."""
    response_mask: Tensor
    """[B, R]; 1 where the model chose the token: the loss mask."""
    is_drop_mask: Tensor
    """[B]; whether the prompt was too long, so that the row must not be trained on."""
    token_level_scores: Tensor
    """[B, R]; the reward on the last chosen token of the row."""
    rollout_log_probs: Tensor | None
    """[B, R]; the log-probabilities with which tokens were sampled, 0 elsewhere; None if some were not recorded."""
    data_id_list: list[str]
    rollout_id_list: list[str]
    turn_index_list: list[int]
    metrics: dict[str, float] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.rollout_id_list)

    def tensors(self) -> dict[str, Tensor]:
        """The columns that are tensors, by verl's names; those that are not there are left out."""
        found = {column.name: getattr(self, column.name) for column in dataclasses.fields(self)}
        return {name: value for name, value in found.items() if isinstance(value, Tensor)}

    def non_tensors(self) -> dict[str, list[Any]]:
        """The other columns, by verl's names."""
        return {name: getattr(self, name) for name in _NON_TENSORS}

    def take(self, rows: Sequence[int]) -> "VerlBatch":
        """A batch of these rows, in this order, with the same metrics."""
        index = torch.tensor(list(rows), dtype=torch.long)
        columns: dict[str, Any] = {name: tensor[index] for name, tensor in self.tensors().items()}
        columns |= {name: [values[row] for row in rows] for name, values in self.non_tensors().items()}
        return dataclasses.replace(self, **columns)

    def for_update(self, mini_batch_size: int, *, seed: int) -> "VerlBatch":
        """The rows to train on, shuffled: without those to drop, and as many as fill mini-batches.

        To be called after advantages are computed, for which every row counts.
        """
        if mini_batch_size < 1:
            raise ConfigurationError(f"mini_batch_size is {mini_batch_size}; it must be at least 1.")
        usable = [row for row, is_dropped in enumerate(self.is_drop_mask.tolist()) if not is_dropped]
        random.Random(seed).shuffle(usable)
        kept = usable[: len(usable) // mini_batch_size * mini_batch_size]
        dropped = {
            "training/n_triplets_prompt_too_long": float(len(self) - len(usable)),
            "training/n_triplets_dropped_remainder": float(len(usable) - len(kept)),
        }
        return dataclasses.replace(self.take(kept), metrics=self.metrics | dropped)

    def to_dataproto(self) -> Any:
        """The batch as verl's own `DataProto`, with the metrics in its `meta_info`."""
        if importlib.util.find_spec("verl") is None:
            raise ConfigurationError(f"A DataProto needs verl: run `{install_command('verl')}`.")
        numpy = importlib.import_module("numpy")
        arrays = {name: numpy.array(values, dtype=object) for name, values in self.non_tensors().items()}
        data_proto = importlib.import_module("verl").DataProto
        return data_proto.from_dict(
            tensors=self.tensors(), non_tensors=arrays, meta_info={"metrics": dict(self.metrics)}
        )


def batch_of(rollouts: Sequence[TracedRollout], settings: BatchSettings) -> VerlBatch:
    """The batch of the rollouts of a step, in their order; one without rows if none of them has tokens."""
    own = [reward_of(rollout) for rollout in rollouts]
    usable = [reward for reward in own if reward is not None]
    counted = reward_of_failed(settings.failed, usable)
    rewards = [counted if reward is None else reward for reward in own]
    rows_by_rollout = [
        [] if reward is None else rows_of(rollout.trace, settings.level)
        for rollout, reward in zip(rollouts, rewards, strict=True)
    ]
    rows = [row for found in rows_by_rollout for row in found]
    rewards_of_rows = [
        reward for reward, found in zip(rewards, rows_by_rollout, strict=True) if reward is not None for _ in found
    ]
    owners = [place for place, found in enumerate(rows_by_rollout) for _ in found]
    if settings.mismatch_folder is not None:
        write_mismatches(rollouts, settings.mismatch_folder)
    longest = settings.max_response_length
    metrics: dict[str, float] = {
        "training/n_rollouts": len(rollouts),
        "training/n_rollouts_w_trace": sum(1 for found in rows_by_rollout if found),
        "training/n_rollouts_w_reward": len(usable),
        "training/n_rollouts_failed": len(rollouts) - len(usable),
        "training/n_calls_without_tokens": sum(calls_without_tokens(rollout.trace) for rollout in rollouts),
        "training/n_truncated_triplets": sum(1 for row in rows if len(row.response_ids) > longest),
        "training/n_triplets": len(rows),
    }
    if any(reward is not None for reward in rewards):
        metrics["training/reward"] = fmean(reward for reward in rewards if reward is not None)
    return VerlBatch(
        **_columns(rows, settings),
        token_level_scores=_scores(rows, rewards_of_rows, longest),
        rollout_log_probs=_log_probs(rows, longest),
        data_id_list=[rollouts[place].data_id for place in owners],
        rollout_id_list=[rollouts[place].rollout_id for place in owners],
        turn_index_list=[row.turn_index for row in rows],
        metrics={name: float(value) for name, value in metrics.items()},
    )


def _columns(rows: Sequence[Row], settings: BatchSettings) -> dict[str, Tensor]:
    width, length, pad = settings.max_prompt_length, settings.max_response_length, settings.pad_token_id
    prompts = [get_left_padded_ids_and_attention_mask(row.prompt_ids, width, pad) for row in rows]
    responses = [get_right_padded_ids_and_attention_mask(row.response_ids, length, pad) for row in rows]
    chosen = [get_right_padded_ids_and_attention_mask(row.response_mask, length, 0)[0] for row in rows]
    attention = [before + after for (_, before), (_, after) in zip(prompts, responses, strict=True)]
    columns = {
        "prompts": _matrix([ids for ids, _ in prompts], width),
        "responses": _matrix([ids for ids, _ in responses], length),
        "input_ids": _matrix(
            [before + after for (before, _), (after, _) in zip(prompts, responses, strict=True)], width + length
        ),
        "attention_mask": _matrix(attention, width + length),
        "response_mask": _matrix(chosen, length),
        "is_drop_mask": torch.tensor([len(row.prompt_ids) > width for row in rows], dtype=torch.bool),
    }
    return columns | {"position_ids": (columns["attention_mask"].cumsum(dim=1) - 1).clamp(min=0)}


def _matrix(rows: Sequence[Sequence[float]], width: int, dtype: torch.dtype = torch.long) -> Tensor:
    """[B, width], also where there are no rows."""
    return torch.tensor(rows, dtype=dtype).reshape(len(rows), width)


def _scores(rows: Sequence[Row], rewards: Sequence[float], length: int) -> Tensor:
    scores = torch.zeros(len(rows), length)
    for number, (row, reward) in enumerate(zip(rows, rewards, strict=True)):
        scores[number, max(place for place, is_chosen in enumerate(row.response_mask[:length]) if is_chosen)] = reward
    return scores


def _log_probs(rows: Sequence[Row], length: int) -> Tensor | None:
    found: list[list[float]] = []
    for row in rows:
        kept = list(zip(row.logprobs, row.response_mask, strict=True))[:length]
        if any(logprob is None for logprob, is_chosen in kept if is_chosen):
            return None
        known = [logprob if is_chosen and logprob is not None else 0.0 for logprob, is_chosen in kept]
        found.append(known + [0.0] * (length - len(known)))
    return _matrix(found, length, torch.float32)
