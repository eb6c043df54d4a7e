"""Samples become tensors: checked one by one, then put together so that little of a batch is padding.

A batch is bounded by its tokens with padding, not by its rows, so that memory is bounded whatever the lengths are; rows
of similar length go together. Where the model can tell rows apart that lie end to end, there is no padding at all.

Fewer and larger batches start fewer kernels, and layers that keep their activations are computed once, not twice. On a
GPU both are done up to half of what is free when learning begins: the rest is for the engine's cache, which grows while
it samples, and for what the estimate of activations does not know.
"""

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from typing_extensions import Self

from agentlightning.algorithm.grpo.samples import Sample
from agentlightning.algorithm.grpo.settings import LearnerSettings
from agentlightning.algorithm.grpo.skipped import flaw_of
from agentlightning.algorithm.grpo.token_logprobs import CHUNK_BYTES
from agentlightning.engine.hf import HfModel
from agentlightning.engine.model import CausalModel
from agentlightning.errors import TrainingError
from agentlightning.utils.log_failures import announce

logger = logging.getLogger(__name__)

SMALL_BATCH: Final = 4096
"""Tokens that go together on a CPU; on a GPU, layers keep their activations if those of so many fit."""


@dataclass(eq=False)
class Row:
    """One sample as tensors, on the CPU; k of its tokens were chosen by the model."""

    ids: Tensor
    """All tokens but the last, after which nothing is predicted."""
    selected: Tensor
    """Whether the token after each of `ids` was chosen by the model."""
    chosen: Tensor
    """[k]"""
    engine_logprobs: Tensor | None
    """[k]; None if not all are known."""
    advantages: Tensor
    """[k]"""
    weight: float
    temperature: float
    old_logprobs: Tensor | None = None
    """[k], what ratios are taken to."""
    reference_logprobs: Tensor | None = None
    """[k]"""

    @classmethod
    def of(cls, sample: Sample, model: CausalModel) -> Self:
        """TrainingError if the model cannot learn from the sample."""
        _check(sample, model)
        ids = torch.tensor(sample.token_ids)
        selected = torch.tensor(sample.loss_mask[1:], dtype=torch.bool)
        known: list[float] | None = None
        if sample.has_logprobs:
            pairs = zip(sample.logprobs, sample.loss_mask, strict=True)
            known = [logprob for logprob, chosen in pairs if chosen and logprob is not None]
        advantages = sample.token_advantages or [sample.advantage] * len(sample.token_ids)
        return cls(
            ids=ids[:-1],
            selected=selected,
            chosen=ids[1:][selected],
            engine_logprobs=None if known is None else torch.tensor(known, dtype=_precision(model)),
            advantages=torch.tensor(advantages, dtype=torch.float64)[1:][selected],
            weight=sample.weight,
            temperature=sample.temperature or 1.0,
        )

    @property
    def length(self) -> int:
        return self.ids.shape[0]

    @property
    def n_chosen(self) -> int:
        return self.chosen.shape[0]


@dataclass(frozen=True)
class Pack:
    """Rows that go through the model together."""

    rows: Sequence[Row]
    ids: Tensor
    """[B, T], padded on the right; [1, T] where rows lie end to end."""
    lengths: Tensor
    """[n], of all rows."""
    selected: Tensor
    """As `ids`."""
    chosen: Tensor
    """[k], row after row."""
    sequences: Tensor
    """[k], the row of each."""
    temperatures: Tensor | None
    """[k]; None if all are 1."""

    @classmethod
    def of(cls, rows: Sequence[Row], device: torch.device, *, end_to_end: bool = False) -> Self:
        def together(parts: list[Tensor]) -> Tensor:
            return (torch.cat(parts)[None] if end_to_end else pad_sequence(parts, batch_first=True)).to(device)

        counts = torch.tensor([row.n_chosen for row in rows])
        temperatures: Tensor | None = None
        if any(row.temperature != 1 for row in rows):
            exact = torch.float64 if device.type == "cpu" else torch.float32  # not every device has 64 bits
            each = torch.tensor([row.temperature for row in rows], dtype=exact)
            temperatures = each.repeat_interleave(counts).to(device)
        return cls(
            rows=rows,
            ids=together([row.ids for row in rows]),
            lengths=torch.tensor([row.length for row in rows], device=device),
            selected=together([row.selected for row in rows]),
            chosen=torch.cat([row.chosen for row in rows]).to(device),
            sequences=torch.arange(len(rows)).repeat_interleave(counts).to(device),
            temperatures=temperatures,
        )

    @property
    def counts(self) -> list[int]:
        return [row.n_chosen for row in self.rows]


def packs(rows: Sequence[Row], max_tokens: int, device: torch.device, *, end_to_end: bool = False) -> Iterator[Pack]:
    """All rows, the longest first, in packs of at most so many tokens; a row that is longer is a pack of its own."""
    waiting: list[Row] = []
    tokens = 0
    for row in sorted(rows, key=lambda row: row.length, reverse=True):
        added = row.length if end_to_end or not waiting else waiting[0].length
        if waiting and tokens + added > max_tokens:
            yield Pack.of(waiting, device, end_to_end=end_to_end)
            waiting, tokens, added = [], 0, row.length
        waiting.append(row)
        tokens += added
    if waiting:
        yield Pack.of(waiting, device, end_to_end=end_to_end)


def _precision(model: CausalModel) -> torch.dtype:
    """Of log-probabilities: 32 bits, or more where the model has more."""
    return torch.float64 if model.dtype == torch.float64 else torch.float32


def _check(sample: Sample, model: CausalModel) -> None:
    name, length = f"The sample of rollout '{sample.rollout_id}'", len(sample.token_ids)
    turns = sample.token_advantages
    if not length == len(sample.loss_mask) == len(sample.logprobs) == len(sample.token_ids if turns is None else turns):
        raise TrainingError(
            f"{name} has {length} tokens, {len(sample.loss_mask)} entries of the loss mask and "
            f"{len(sample.logprobs)} log-probabilities; there must be one of each, and an advantage, for every token."
        )
    flaw = flaw_of(sample.token_ids, sample.logprobs, model)
    if flaw is not None:
        raise TrainingError(f"{name} {flaw}.")
    if not any(sample.loss_mask):
        raise TrainingError(f"{name} has no token that the model chose, so there is nothing to learn from it.")
    if sample.loss_mask[0]:
        raise TrainingError(f"{name} begins with a token that the model chose, before which it was given nothing.")
    if not all(map(math.isfinite, (*(turns or [sample.advantage]), sample.weight, sample.temperature))):
        raise TrainingError(f"{name} has an advantage, weight or temperature that is not finite.")
    if sample.weight <= 0 or sample.temperature < 0:
        raise TrainingError(f"{name} has a weight that is not above 0, or a temperature below 0.")


# ---------------------------------------------------------------------- what fits into the memory of a GPU


def planned(settings: LearnerSettings, model: CausalModel, device: torch.device) -> LearnerSettings:
    """Decide what the settings leave open by the memory that is free on the device, and say what learning needs.

    Args:
        model: On another device, its weights will be on this one too.
    """
    tokens, is_checkpointed = settings.max_batch_tokens, settings.gradient_checkpointing
    if device.type != "cuda" or not isinstance(model, HfModel):
        return replace(settings, max_batch_tokens=tokens or SMALL_BATCH, gradient_checkpointing=bool(is_checkpointed))
    trained = sum(weight.numel() for weight in model.trainable().values()) / settings.processes
    needs = {"gradients": 4 * trained, "moments": (2 if settings.optimiser == "adamw8bit" else 8) * trained}
    if model.device.type != device.type:
        needs["weights"] = sum(weight.nbytes for weight in model.network.parameters()) / settings.processes
    free = torch.cuda.mem_get_info(device)[0]
    room = max(0.0, free - sum(needs.values()) - CHUNK_BYTES) / 2
    fitting = {kept: int(room / model.bytes_kept(is_checkpointed=not kept)) for kept in (True, False)}
    if is_checkpointed is None:
        is_checkpointed = fitting[True] < (tokens or SMALL_BATCH) and model.network.supports_gradient_checkpointing
    if tokens is None:
        # Of larger batches none has been measured.
        tokens = max(SMALL_BATCH, 1 << min(32_768, max(1, fitting[not is_checkpointed])).bit_length() - 1)
    decided = replace(settings, max_batch_tokens=tokens, gradient_checkpointing=is_checkpointed)
    needs["activations"] = tokens * model.bytes_kept(is_checkpointed=is_checkpointed) + CHUNK_BYTES
    parts = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in needs.items())
    summary = (
        f"Learning needs about {sum(needs.values()) / 1e9:.1f} GB of GPU memory beside what is loaded ({parts}) at "
        f"{tokens:,} tokens together {'with' if is_checkpointed else 'without'} gradient checkpointing"
    )
    if sum(needs.values()) <= free:
        announce(logger, f"{summary}; {free / 1e9:.1f} GB are free.")
    else:
        ways = remedies(decided, has_adapters=model.has_adapters)
        logger.warning("%s; only %.1f GB are free. If that does not suffice, give %s.", summary, free / 1e9, ways)
    return decided


def remedies(settings: LearnerSettings, *, has_adapters: bool) -> str:
    """The settings to change where memory is short, in words."""
    ways = {
        f"a max_batch_tokens below {settings.max_batch_tokens}": True,
        "gradient_checkpointing=True": not settings.gradient_checkpointing,
        'precision="bf16"': settings.precision == "full",
        'optimiser="adamw8bit"': not has_adapters and settings.optimiser != "adamw8bit" and settings.processes == 1,
        "adapters instead of all weights (lora=LoraOptions())": not has_adapters,
    }
    return " or ".join(way for way, is_open in ways.items() if is_open)
