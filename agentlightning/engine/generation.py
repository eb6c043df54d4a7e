"""What a generation gave: the sampled tokens, how likely each was, and which weights sampled them.

A log-probability is that of the chosen token in softmax(logits / temperature) over the whole vocabulary, before top-p
and top-k; with temperature 0 it is taken at temperature 1. The token that ended the generation is among the tokens, so
that the next turn's prompt reproduces what was sampled.
"""

from dataclasses import dataclass
from typing import Literal

__all__ = ["FinishReason", "Generation"]

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass
class Generation:
    """The outcome of one request."""

    token_ids: list[int]
    logprobs: list[float]
    """One for every token."""
    finish_reason: FinishReason
    weights_version: int
    """Of the weights that sampled the first token."""
    prompt_tokens: int
    top_logprobs: list[dict[int, float]] | None = None
    """For every token the likeliest ones, when the request asked for them."""
    last_weights_version: int | None = None
    """Of the weights that sampled the last token, when they changed on the way."""
