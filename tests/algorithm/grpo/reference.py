"""The objective again, in NumPy and 64 bits, written down sequence by sequence from the formulas of the papers.

Slow and plain on purpose: it shares nothing with what it checks.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass
class Conversation:
    """One sequence: the logits before each of its chosen tokens, and what is known of them."""

    logits: Array
    chosen: list[int]
    old: Array
    advantage: float
    weight: float = 1.0
    temperature: float = 1.0
    engine: Array | None = None
    reference: Array | None = None


@dataclass
class Variant:
    """Which of the formulas."""

    level: str = "token"
    aggregate: str = "token_mean"
    low: float = 0.2
    high: float = 0.28
    dual: float | None = None
    kl: str | None = None
    beta: float = 0.0
    entropy: float = 0.0
    cap: float | None = None
    constant: int = 7
    likelihood: bool = False


def log_softmax(row: Array) -> Array:
    shifted = row - row.max()
    result: Array = shifted - np.log(np.exp(shifted).sum())
    return result


def token_losses(one: Conversation, variant: Variant) -> list[float]:
    """What each token of a sequence adds, before any mean is taken."""
    tables = [log_softmax(row / one.temperature) for row in one.logits]
    new = [float(table[token]) for table, token in zip(tables, one.chosen, strict=True)]
    length = len(new)
    geometric = np.prod([np.exp(new[t] - one.old[t]) for t in range(length)]) ** (1 / length)
    losses = []
    for t in range(length):
        ratio = geometric if variant.level == "sequence" else np.exp(new[t] - one.old[t])
        plain = ratio * one.advantage
        bounded = min(max(ratio, 1 - variant.low), 1 + variant.high) * one.advantage
        gain = min(plain, bounded)
        if variant.dual is not None and one.advantage < 0:
            gain = max(gain, variant.dual * one.advantage)
        if variant.likelihood:
            gain = one.advantage * new[t]
        if variant.cap is not None and one.engine is not None:
            gain *= min(np.exp(one.old[t] - one.engine[t]), variant.cap)
        value = -gain
        if variant.kl is not None and one.reference is not None:
            quotient = np.exp(one.reference[t]) / np.exp(new[t])
            estimates = {
                "k1": -np.log(quotient),
                "k2": np.log(quotient) ** 2 / 2,
                "k3": quotient - np.log(quotient) - 1,
            }
            value += variant.beta * estimates[variant.kl]
        probabilities = np.exp(tables[t])
        value -= variant.entropy * float(-(probabilities * tables[t]).sum())
        losses.append(float(value))
    return losses


def loss(batch: list[Conversation], variant: Variant) -> float:
    """The mean of a batch."""
    parts = [token_losses(one, variant) for one in batch]
    weights = [one.weight for one in batch]
    if variant.aggregate == "token_mean":
        counted = sum(weight * len(part) for weight, part in zip(weights, parts, strict=True))
        return sum(weight * value for weight, part in zip(weights, parts, strict=True) for value in part) / counted
    divisors = [len(part) if variant.aggregate == "sequence_mean" else variant.constant for part in parts]
    rows = zip(weights, parts, divisors, strict=True)
    return sum(weight * sum(part) / divisor for weight, part, divisor in rows) / sum(weights)


def gradient(batch: list[Conversation], variant: Variant, step: float = 1e-6) -> list[Array]:
    """Of the loss by every logit, from central differences."""
    found = []
    for one in batch:
        slopes = np.zeros_like(one.logits)
        for place in np.ndindex(*one.logits.shape):
            before = one.logits[place]
            one.logits[place] = before + step
            above = loss(batch, variant)
            one.logits[place] = before - step
            below = loss(batch, variant)
            one.logits[place] = before
            slopes[place] = (above - below) / (2 * step)
        found.append(slopes)
    return found
