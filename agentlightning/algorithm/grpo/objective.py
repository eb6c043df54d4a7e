"""The objective: from log-probabilities and advantages to one number whose gradient improves the policy.

Tokens come flat, one entry for each token the model chose, with the number of the sequence it belongs to. The loss is a
sum over tokens, each with the coefficient of its sequence; coefficients are worked out once for a minibatch, so a
minibatch that is computed in pieces gives the same sum, whatever the pieces.

For a token with the ratio r of its new to its old probability and the advantage A:

    surrogate  = min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)
    dual clip  : where A < 0, not below dual_clip A
    importance : times min(old / engine, importance_cap), a constant
    loss       = sum of coefficient (-surrogate + kl_coefficient KL - entropy_coefficient entropy)

At the level of sequences (GSPO), r is the geometric mean of the ratios of a sequence, the same for all its tokens. KL
is estimated from d = log reference - log new: k1 is -d, k2 is d squared / 2, k3 is exp(d) - 1 - d. The gradient of k1
itself does not know the reference and is zero in the mean, so k1 is minimised along the gradient of k2, which in the
mean is that of the KL from new to reference; the gradient of k3 is that of the KL from reference to new.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from typing_extensions import assert_never

from agentlightning.algorithm.grpo.samples import Sampled
from agentlightning.algorithm.grpo.settings import Aggregate, KlEstimator, LearnerSettings

MAX_LOG_RATIO: Final = 20.0
"""Logarithms of ratios beyond this are cut before they are raised, so that no ratio is infinite."""


@dataclass(frozen=True)
class ChosenTokens:
    """The k tokens that the model chose in n sequences."""

    logprobs: Tensor
    """[k], of the model under training."""
    old_logprobs: Tensor
    """[k], what ratios are taken to."""
    sequences: Tensor
    """[k], the number of each token's sequence."""
    advantages: Tensor
    """[k]"""
    coefficients: Tensor
    """[n], what a token of each sequence counts in the sum."""
    entropies: Tensor
    """[k], of the distribution each token was chosen from."""
    engine_logprobs: Tensor | None = None
    """[k], for the importance of tokens; None gives all the same."""
    reference_logprobs: Tensor | None = None
    """[k], of the model that KL is measured to."""


@dataclass(frozen=True)
class Loss:
    """What is minimised, and what there is to know of it."""

    value: Tensor
    sums: dict[str, Tensor]
    """Sums over tokens, to be divided by their number; detached."""
    maxima: dict[str, Tensor]


def sequence_coefficients(
    lengths: Sequence[int],
    weights: Sequence[float],
    aggregate: Aggregate,
    constant_length: int,
    sampled: Sampled | None = None,
) -> list[float]:
    """What a token of each sequence counts, so that the sum over a minibatch is the mean that is wanted.

    Args:
        lengths: Chosen tokens of each sequence.
        weights: How much each sequence counts beside others.
        aggregate: What kind of mean.
        constant_length: What "constant" divides by.
        sampled: What the mean is over, if that is more than these sequences.
    """
    if sampled is None:
        tokens = sum(weight * length for weight, length in zip(weights, lengths, strict=True))
        sampled = Sampled(len(weights), sum(weights), tokens)
    if aggregate == "token_mean":
        return [weight / sampled.tokens for weight in weights]
    if aggregate == "sequence_mean":
        return [weight / (sampled.weight * length) for weight, length in zip(weights, lengths, strict=True)]
    if aggregate == "constant":
        return [weight / (sampled.weight * constant_length) for weight in weights]
    assert_never(aggregate)


def kl_estimate(logprobs: Tensor, reference_logprobs: Tensor, estimator: KlEstimator) -> Tensor:
    """How far the model is from the reference, token by token; its mean over tokens the model chose is the KL."""
    difference = reference_logprobs - logprobs
    if estimator == "k1":
        return -difference
    if estimator == "k2":
        return difference.square() / 2
    if estimator == "k3":
        return difference.clamp(max=MAX_LOG_RATIO).exp() - 1 - difference
    assert_never(estimator)


def divergence(log_ratios: Tensor) -> Tensor:
    """How far a model is from the one that chose the tokens, token by token; their mean is in nats a token."""
    # The exponential of one larger ratio can outweigh thousands of tokens.
    rises = log_ratios.clamp(max=1.0)
    return kl_estimate(torch.zeros_like(rises), rises, "k3")


def policy_loss(tokens: ChosenTokens, settings: LearnerSettings) -> Loss:
    """The loss of some sequences of a minibatch; the losses of all of them add up to that of the minibatch."""
    sums, maxima = dict[str, Tensor](), dict[str, Tensor]()
    if settings.objective == "likelihood":
        losses = -tokens.advantages * tokens.logprobs
    else:
        log_ratios = tokens.logprobs - tokens.old_logprobs
        sums["kl_to_old"] = divergence(log_ratios.detach())
        if settings.level == "sequence":
            log_ratios = _means(log_ratios, tokens)
        ratios = log_ratios.clamp(max=MAX_LOG_RATIO).exp()
        losses = -_surrogate(ratios, tokens.advantages, settings)
        seen = ratios.detach()
        sums["ratio"], maxima["ratio_max"] = seen, seen.max()
        sums["clipped_low"] = (seen < 1 - settings.clip_low) & (tokens.advantages < 0)  # held back by the clip
        sums["clipped_high"] = (seen > 1 + settings.clip_high) & (tokens.advantages > 0)
    if tokens.engine_logprobs is not None and settings.cap is not None:
        importance = (tokens.old_logprobs - tokens.engine_logprobs).clamp(max=MAX_LOG_RATIO).exp()
        losses = losses * importance.clamp(max=settings.cap)
        sums["importance"], maxima["importance_max"] = importance, importance.max()
        sums["importance_capped"] = importance > settings.cap
    if tokens.reference_logprobs is not None:
        kl = kl_estimate(tokens.logprobs, tokens.reference_logprobs, settings.kl_estimator)
        if settings.kl_estimator == "k1":
            slope = kl_estimate(tokens.logprobs, tokens.reference_logprobs, "k2")
            kl = slope + (kl - slope).detach()
        losses = losses + settings.kl_coefficient * kl
        sums["kl"] = kl.detach()
    if settings.entropy_coefficient:
        losses = losses - settings.entropy_coefficient * tokens.entropies
    sums |= {"entropy": tokens.entropies.detach(), "logprob": tokens.logprobs.detach()}
    value = (losses * tokens.coefficients[tokens.sequences]).sum()
    return Loss(value, {name: column.sum() for name, column in sums.items()}, maxima)


def _means(log_ratios: Tensor, tokens: ChosenTokens) -> Tensor:
    """The mean of each token's sequence in place of its own."""
    n = tokens.coefficients.shape[0]
    totals = log_ratios.new_zeros(n).index_add(0, tokens.sequences, log_ratios)
    lengths = torch.bincount(tokens.sequences, minlength=n).clamp(min=1)
    return (totals / lengths)[tokens.sequences]


def _surrogate(ratios: Tensor, advantages: Tensor, settings: LearnerSettings) -> Tensor:
    clipped = ratios.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    surrogate = torch.minimum(ratios * advantages, clipped * advantages)
    if settings.dual_clip is None:
        return surrogate
    bounded = torch.maximum(surrogate, settings.dual_clip * advantages)
    return torch.where(advantages < 0, bounded, surrogate)
