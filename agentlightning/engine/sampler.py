"""Choosing the next token of every row of a batch, each by its own wishes, in a few operations for all.

A row draws one number from its own source and takes the token where the summed probabilities pass it. So a request with
a seed gets the same tokens whichever requests share the batch with it, as long as the logits are the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from agentlightning.engine.sampling import SequenceState

_NEVER: Final = float("-inf")


@dataclass(frozen=True)
class SampledTokens:
    """What was chosen, row by row."""

    token_ids: list[int]
    logprobs: list[float]
    """In softmax(logits / temperature), before anything was left out of the choice."""
    top_logprobs: list[dict[int, float]] | None
    """The likeliest tokens, as many as the row that asked for most; None when none asked."""


def sample_tokens(logits: Tensor, rows: Sequence[SequenceState]) -> SampledTokens:
    """Choose from the logits [n, vocab] of n rows."""
    logits = logits.float()
    temperatures = [row.sampling.temperature or 1.0 for row in rows]
    if any(temperature != 1.0 for temperature in temperatures):
        logits = logits / torch.tensor(temperatures, device=logits.device).unsqueeze(1)
    logprobs = logits.log_softmax(-1)
    choosable = _without_early_ends(logprobs, rows)
    choosable = _truncated(choosable, rows)
    is_greedy = [row.sampling.temperature == 0 for row in rows]
    if all(is_greedy):
        token_ids = choosable.argmax(-1)
    else:
        token_ids = _drawn(choosable, rows)
        if any(is_greedy):
            greedy = torch.tensor(is_greedy, device=logits.device)
            token_ids = torch.where(greedy, choosable.argmax(-1), token_ids)
    chosen = logprobs.gather(1, token_ids.unsqueeze(1)).squeeze(1)
    ids, likelihoods = torch.stack([token_ids.double(), chosen.double()]).tolist()  # the device is waited for once
    return SampledTokens([int(number) for number in ids], likelihoods, _likeliest(logprobs, rows))


def _without_early_ends(logprobs: Tensor, rows: Sequence[SequenceState]) -> Tensor:
    """Tokens that end a row are left out while it has fewer than it was asked for."""
    early = [number for number, row in enumerate(rows) if len(row.token_ids) < row.sampling.min_new_tokens]
    if not early:
        return logprobs
    places = [(number, token) for number in early for token in rows[number].stop_ids]
    left_out = torch.tensor(places, dtype=torch.long).reshape(-1, 2).to(logprobs.device)
    choosable = logprobs.clone()
    choosable[left_out[:, 0], left_out[:, 1]] = _NEVER
    return choosable


def _truncated(choosable: Tensor, rows: Sequence[SequenceState]) -> Tensor:
    """Only the likeliest tokens stay, in the rows that ask for top-k or top-p; the very likeliest always does."""
    asking = [n for n, row in enumerate(rows) if row.sampling.top_k or row.sampling.top_p < 1]
    if not asking:
        return choosable
    device, vocabulary = choosable.device, choosable.shape[1]
    numbers = torch.tensor(asking, device=device)
    ordered, order = choosable[numbers].sort(stable=True, dim=-1, descending=True)
    ranks = torch.arange(vocabulary, device=device).unsqueeze(0)
    top_k = torch.tensor([rows[n].sampling.top_k or vocabulary for n in asking], device=device).unsqueeze(1)
    top_p = torch.tensor([rows[n].sampling.top_p for n in asking], device=device).unsqueeze(1)
    probabilities = ordered.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    is_out = ((ranks >= top_k) | ((before >= top_p) & (top_p < 1))) & (ranks > 0)
    kept = ordered.masked_fill(is_out, _NEVER)
    return choosable.index_copy(0, numbers, torch.empty_like(kept).scatter_(1, order, kept))


def _drawn(choosable: Tensor, rows: Sequence[SequenceState]) -> Tensor:
    sums = choosable.exp().cumsum(-1, dtype=torch.float64)
    # Whatever rounding does, a drawn number stays below the sum of the probabilities.
    numbers = torch.tensor([[row.draw() * (1 - 1e-12)] for row in rows], dtype=torch.float64, device=choosable.device)
    token_ids = torch.searchsorted(sums, numbers * sums[:, -1:], right=True).squeeze(1)
    return token_ids.clamp_(max=choosable.shape[1] - 1)  # beyond the end only where a row is not a number


def _likeliest(logprobs: Tensor, rows: Sequence[SequenceState]) -> list[dict[int, float]] | None:
    count = max(row.sampling.top_logprobs for row in rows)
    if not count:
        return None
    values, order = logprobs.topk(min(count, logprobs.shape[1]), -1)
    return [dict(zip(ids, row, strict=True)) for ids, row in zip(order.tolist(), values.tolist(), strict=True)]
