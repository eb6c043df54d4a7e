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
from torch.nn import functional

from agentlightning.engine.model import Head

__all__ = ["CHUNK_BYTES", "Choices", "choices"]

CHUNK_BYTES: Final = 1 << 28
"""Of logits and what is computed from them at a time: some 440 tokens of a vocabulary of 150,000."""


@dataclass(frozen=True)
class Choices:
    """How likely the k tokens that were chosen are, and how open the choice was."""

    logprobs: Tensor
    """[k]"""
    entropies: Tensor
    """[k]"""


def choices(
    hidden: Tensor,
    chosen: Tensor,
    temperatures: Tensor | None = None,
    *,
    head: Head | None = None,
    entropy_gradient: bool = False,
    chunk_bytes: int = CHUNK_BYTES,
) -> Choices:
    """Read a model's predictions at temperatures [k], in 32 bits at least; without `temperatures`, at 1.

    Args:
        hidden: The states [k, width] before the head; without a head, the logits [k, vocab].
        chosen: Token ids [k].
        temperatures: What logits are divided by.
        head: What makes logits of the states, in the dtype of torch's autocast where that is on.
        entropy_gradient: Whether entropies are differentiable.
        chunk_bytes: How much memory to take at a time.
    """
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    if head is None:
        dtype = hidden.dtype
    weight, bias = (None, None) if head is None else (head.weight, head.bias)
    options = _Options(dtype, entropy_gradient, chunk_bytes)
    temperatures = _cast(temperatures, options.exact)
    with torch.autocast(kind, enabled=False):
        found = _ReadChoices.apply(hidden, weight, bias, chosen, temperatures, options)  # type: ignore[no-untyped-call]
    return Choices(*found)


@dataclass(frozen=True)
class _Options:
    dtype: torch.dtype
    """Of the head's product."""
    entropy_gradient: bool
    chunk_bytes: int

    @property
    def exact(self) -> torch.dtype:
        """Of the softmax."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    def chunks(self, count: int, vocabulary: int) -> Iterator[slice]:
        """All rows in parts, such that the buffer and what is needed beside it at some moment stay in bounds."""
        beside = 0 if self.dtype == self.exact else self.dtype.itemsize
        if self.entropy_gradient:
            beside = max(beside, self.exact.itemsize)
        size = max(1, self.chunk_bytes // (vocabulary * (self.exact.itemsize + beside)))
        return (slice(start, min(start + size, count)) for start in range(0, count, size))


class _ReadChoices(torch.autograd.Function):
    """Log-probabilities and entropies; what the gradient needs of a row is one number, the rest is made again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        chosen: Tensor,
        temperatures: Tensor | None,
        options: _Options,
    ) -> tuple[Tensor, Tensor]:
        count = chosen.shape[0]
        logprobs, entropies, totals = (hidden.new_empty(count, dtype=options.exact) for _ in range(3))
        inner, outer = _cast(weight, options.dtype), _cast(bias, options.dtype)
        vocabulary = hidden.shape[1] if weight is None else weight.shape[0]
        for rows in options.chunks(count, vocabulary):
            logits = _logits(hidden[rows], inner, outer, temperatures, rows, options)
            largest = logits.amax(-1)
            logits.sub_(largest[:, None])
            picked = logits.gather(-1, chosen[rows, None]).squeeze(-1)
            sums = logits.exp_().sum(-1)
            logs = sums.log()
            logprobs[rows] = picked - logs
            totals[rows] = largest + logs
            entropies[rows] = logs + torch.special.entr(logits, out=logits).sum(-1) / sums
            del logits  # before the next chunk's are made
        ctx.options = options
        ctx.save_for_backward(hidden, weight, bias, chosen, temperatures, totals, entropies)
        if not options.entropy_gradient:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, slopes: Tensor, entropy_slopes: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, chosen, temperatures, totals, entropies = ctx.saved_tensors
        options: _Options = ctx.options
        of_hidden, of_weight, of_bias = ctx.needs_input_grad[:3]
        inner, outer = _cast(weight, options.dtype), _cast(bias, options.dtype)
        vocabulary = hidden.shape[1] if weight is None else weight.shape[0]
        hidden_gradient = torch.empty_like(hidden) if of_hidden else None
        weight_gradient = torch.zeros_like(weight, dtype=options.exact) if of_weight else None
        bias_gradient = torch.zeros_like(bias, dtype=options.exact) if of_bias else None
        for rows in options.chunks(chosen.shape[0], vocabulary):
            logits = _logits(hidden[rows], inner, outer, temperatures, rows, options)
            probabilities = logits.sub_(totals[rows, None]).exp_()
            gradient = _gradient(probabilities, slopes[rows], entropy_slopes[rows], entropies[rows], options)
            gradient.scatter_add_(-1, chosen[rows, None], slopes[rows, None])
            if temperatures is not None:
                gradient.div_(temperatures[rows, None])
            if bias_gradient is not None:
                bias_gradient += gradient.sum(0)
            rough = gradient.to(options.dtype)
            del logits, probabilities, gradient
            if hidden_gradient is not None:
                hidden_gradient[rows] = rough if inner is None else rough @ inner
            if weight_gradient is not None:
                _add_product(weight_gradient, rough.T, hidden[rows].to(options.dtype))
            del rough
        return (
            hidden_gradient,
            None if weight_gradient is None else weight_gradient.to(weight.dtype),
            None if bias_gradient is None else bias_gradient.to(bias.dtype),
            *(None, None, None),
        )


def _cast(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype)


def _logits(
    hidden: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    temperatures: Tensor | None,
    rows: slice,
    options: _Options,
) -> Tensor:
    """Of some rows, in a buffer that may be overwritten."""
    if weight is None:
        found = hidden.to(options.exact, copy=True)
    else:
        found = functional.linear(hidden.to(options.dtype), weight, bias).to(options.exact)
    return found if temperatures is None else found.div_(temperatures[rows, None])


def _gradient(
    probabilities: Tensor, slopes: Tensor, entropy_slopes: Tensor, entropies: Tensor, options: _Options
) -> Tensor:
    """By logits, all but the part of the chosen token itself; in place of the probabilities p.

    That of a log-probability is -p, that of an entropy H is -p log p - p H.
    """
    if not options.entropy_gradient:
        return probabilities.mul_(-slopes[:, None])
    openness = torch.special.entr(probabilities).mul_(entropy_slopes[:, None])
    return probabilities.mul_(-(slopes + entropy_slopes * entropies)[:, None]).add_(openness)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Without a copy of the total's size where the dtype is the same."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right
