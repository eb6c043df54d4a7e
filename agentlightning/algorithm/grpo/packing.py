"""Samples become tensors, and tensors the log-probabilities of their tokens.

Samples are checked one by one, then put together so that little of a batch is padding.

A batch is bounded by its tokens with padding, not by its rows, so that memory is bounded whatever the lengths are; rows
of similar length go together. Where the model can tell rows apart that lie end to end, there is no padding at all.

How likely the chosen tokens are, and how open each choice was, is computed without logits of all of them at once.
Logits are by far the largest tensors of a training step: 4,096 tokens of a vocabulary of 150,000 take 2.5 GB in 32
bits, and a softmax with its gradient takes several copies. Here the head and the softmax go over some rows at a time,
in one buffer that is overwritten step by step, and are computed again in the backward pass. What this takes beside its
inputs, its results and one copy of the head in the dtype of the computation stays below `CHUNK_BYTES`.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from typing_extensions import Self

from agentlightning.algorithm.grpo.samples import Sample
from agentlightning.algorithm.grpo.skipped import flaw_of
from agentlightning.engine.model import CausalModel
from agentlightning.errors import TrainingError


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


# ---------------------------------------------------------------------- log-probabilities


CHUNK_BYTES: Final = 1 << 28
"""Of logits and what is computed from them at a time: some 440 tokens of a vocabulary of 150,000."""


@dataclass(frozen=True)
class TokenLogprobs:
    """How likely the k tokens that were chosen are, and how open the choice was."""

    logprobs: Tensor
    """[k]"""
    entropies: Tensor
    """[k]"""


def token_logprobs(
    hidden: Tensor,
    chosen: Tensor,
    temperatures: Tensor | None = None,
    *,
    head: Tensor | None = None,
    entropy_gradient: bool = False,
    chunk_bytes: int = CHUNK_BYTES,
) -> TokenLogprobs:
    """Read a model's predictions at temperatures [k], in 32 bits at least; without `temperatures`, at 1.

    Args:
        hidden: The states [k, width] before the head; without a head, the logits [k, vocab].
        chosen: Token ids [k].
        temperatures: What logits are divided by.
        head: What makes logits of the states, in the dtype of torch's autocast where that is on: [vocab, width].
        entropy_gradient: Whether entropies are differentiable.
        chunk_bytes: How much memory to take at a time.
    """
    kind = hidden.device.type
    is_cast = head is not None and torch.is_autocast_enabled(kind)
    dtype = torch.get_autocast_dtype(kind) if is_cast else hidden.dtype
    way = _Way(dtype, torch.promote_types(dtype, torch.float32), entropy_gradient, chunk_bytes)
    warmth = None if temperatures is None else temperatures.to(way.exact)[:, None]
    with torch.autocast(kind, enabled=False):
        return TokenLogprobs(*_ReadLogprobs.apply(hidden, head, chosen[:, None], warmth, way))  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class _Way:
    """How log-probabilities are computed."""

    dtype: torch.dtype
    """Of the product with the head."""
    exact: torch.dtype
    """Of the softmax."""
    entropy_gradient: bool
    chunk_bytes: int

    def chunks(self, hidden: Tensor, head: Tensor | None) -> Iterator[slice]:
        """All rows in parts, such that the logits and what is needed beside them at some moment stay in bounds."""
        vocabulary = hidden.shape[1] if head is None else head.shape[0]
        beside = 0 if self.dtype == self.exact else self.dtype.itemsize
        if self.entropy_gradient:
            beside = self.exact.itemsize
        size = max(1, self.chunk_bytes // (vocabulary * (self.exact.itemsize + beside)))
        return (slice(start, start + size) for start in range(0, len(hidden), size))

    def logits(self, hidden: Tensor, head: Tensor | None, temperatures: Tensor | None, rows: slice) -> Tensor:
        """Of some rows, in a buffer that may be overwritten."""
        if head is None:
            found = hidden[rows].to(self.exact, copy=True)
        elif self.dtype != self.exact and hidden.is_cuda:  # 16 bits of a logit near 20 are off by up to 0.06
            found = torch.mm(hidden[rows].to(self.dtype), head.T, out_dtype=self.exact)
        else:
            found = (hidden[rows].to(self.dtype) @ head.T).to(self.exact)
        return found if temperatures is None else found.div_(temperatures[rows])


class _ReadLogprobs(torch.autograd.Function):
    """Log-probabilities and entropies; what the gradient needs of a row is one number, the rest is made again."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor | None, chosen: Tensor, temperatures: Tensor | None, way: _Way
    ) -> tuple[Tensor, Tensor]:
        logprobs, entropies, totals = (hidden.new_empty((len(hidden), 1), dtype=way.exact) for _ in range(3))
        rough_head = None if head is None else head.to(way.dtype)
        for rows in way.chunks(hidden, head):
            logits = way.logits(hidden, rough_head, temperatures, rows)
            largest = logits.amax(-1, keepdim=True)
            picked = logits.sub_(largest).gather(-1, chosen[rows])
            sums = logits.exp_().sum(-1, keepdim=True)
            logs = sums.log()
            logprobs[rows] = picked - logs
            totals[rows] = largest + logs
            entropies[rows] = logs + torch.special.entr(logits, out=logits).sum(-1, keepdim=True) / sums
            del logits  # before the next chunk's are made
        ctx.way = way
        ctx.save_for_backward(hidden, head, chosen, temperatures, totals, entropies)
        flat = logprobs[:, 0], entropies[:, 0].clone()
        if not way.entropy_gradient:
            ctx.mark_non_differentiable(flat[1])
        return flat

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, slopes: Tensor, entropy_slopes: Tensor) -> tuple[Tensor | None, ...]:
        """With p for probabilities: of a log-probability, 1 (the chosen token) - p; of an entropy H, -p log p - p H."""
        hidden, head, chosen, temperatures, totals, entropies = ctx.saved_tensors
        way: _Way = ctx.way
        slopes, entropy_slopes = slopes[:, None], entropy_slopes[:, None]
        hidden_gradient = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        head_gradient = torch.zeros_like(head, dtype=way.exact) if ctx.needs_input_grad[1] else None
        rough_head = None if head is None else head.to(way.dtype)
        for rows in way.chunks(hidden, head):
            gradient = way.logits(hidden, rough_head, temperatures, rows).sub_(totals[rows]).exp_()
            if way.entropy_gradient:
                openness = torch.special.entr(gradient).mul_(entropy_slopes[rows])
                gradient.mul_(-(slopes[rows] + entropy_slopes[rows] * entropies[rows])).add_(openness)
                del openness
            else:
                gradient.mul_(-slopes[rows])
            gradient.scatter_add_(-1, chosen[rows], slopes[rows])
            if temperatures is not None:
                gradient.div_(temperatures[rows])
            rough = gradient.to(way.dtype)
            del gradient
            if hidden_gradient is not None:
                hidden_gradient[rows] = rough if rough_head is None else rough @ rough_head
            if head_gradient is not None and way.dtype == way.exact:
                head_gradient.addmm_(rough.T, hidden[rows])  # without a copy of the head's size
            elif head_gradient is not None:
                head_gradient += rough.T @ hidden[rows].to(way.dtype)
            del rough
        return hidden_gradient, None if head_gradient is None else head_gradient.to(head.dtype), None, None, None
