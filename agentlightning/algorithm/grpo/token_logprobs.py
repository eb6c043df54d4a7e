"""How likely the chosen tokens are, and how open each choice was, without logits of all of them at once.

Logits are by far the largest tensors of a training step: 4,096 tokens of a vocabulary of 150,000 take 2.5 GB in 32
bits, and a softmax with its gradient takes several copies. Here the head and the softmax go over some rows at a time,
in one buffer that is overwritten step by step, and are computed again in the backward pass. What this takes beside its
inputs, its results and one copy of the head in the dtype of the computation stays below `CHUNK_BYTES`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

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
