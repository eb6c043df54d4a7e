"""The objective: from log-probabilities and advantages to one number whose gradient improves the policy.

Tokens come flat, one entry for each token the model chose, with the number of the sequence it belongs to. A loss
function gives one loss per token; a user may replace it. What is minimised is a sum over tokens, each with the
coefficient of its sequence; coefficients are worked out once for a minibatch, so a minibatch that is computed in
pieces gives the same sum, whatever the pieces.

For a token with the ratio r of its new to its old probability, the log-probability p and the advantage A:

    clipped    : -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A); where A < 0, not above -dual_clip A
    cispo      : -clip(r, 1 - clip_low, 1 + clip_high) A p, where the clipped ratio is a constant
    likelihood : -A p
    importance : times min(old / engine, importance_cap), a constant; 0 for sequences outside of importance_band
    minimised  = sum of coefficient (loss importance + kl_coefficient KL - entropy_coefficient entropy)

At the level of sequences (GSPO), r is the geometric mean of the ratios of a sequence, the same for all its tokens. KL
is estimated from d = log reference - log new: k1 is -d, k2 is d squared / 2, k3 is exp(d) - 1 - d. The gradient of k1
itself does not know the reference and is zero in the mean, so k1 is minimised along the gradient of k2, which in the
mean is that of the KL from new to reference; the gradient of k3 is that of the KL from reference to new.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from typing_extensions import assert_never

from agentlightning.algorithm.grpo.samples import Sampled
from agentlightning.algorithm.grpo.settings import Aggregate, KlEstimator, LearnerSettings, LossFunction, RatioLevel
from agentlightning.errors import ConfigurationError

MAX_LOG_RATIO: Final = 20.0
"""Logarithms of ratios beyond this are cut before they are raised, so that no ratio is infinite."""
SQUARE: Final = "weight_square"
"""The figure from which, with that of weights, the effective size of the sample follows."""
MAXIMUM: Final = "_max"
"""How names of figures end of which the largest is shown; of the others it is the mean over all tokens."""


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

    @property
    def log_ratios(self) -> Tensor:
        """[k], of each token's new to its old probability."""
        return self.logprobs - self.old_logprobs

    @property
    def lengths(self) -> Tensor:
        """[n], the chosen tokens of each sequence, which are all here: a sequence is never divided."""
        return torch.bincount(self.sequences, minlength=self.coefficients.shape[0])

    def sequence_means(self, values: Tensor) -> Tensor:
        """[k], the mean of `values` [k] over each token's sequence in place of its own."""
        totals = values.new_zeros(self.coefficients.shape[0]).index_add(0, self.sequences, values)
        return (totals / self.lengths.clamp(min=1))[self.sequences]


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


def clipped_loss(
    tokens: ChosenTokens,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = None,
    level: RatioLevel = "token",
) -> tuple[Tensor, dict[str, Tensor]]:
    """GRPO, Dr. GRPO and DAPO, and GSPO at the level of sequences."""
    log_ratios = tokens.sequence_means(tokens.log_ratios) if level == "sequence" else tokens.log_ratios
    ratios = log_ratios.clamp(max=MAX_LOG_RATIO).exp()
    clipped = ratios.clamp(1 - clip_low, 1 + clip_high)
    surrogate = torch.minimum(ratios * tokens.advantages, clipped * tokens.advantages)
    if dual_clip is not None:
        bounded = torch.maximum(surrogate, dual_clip * tokens.advantages)
        surrogate = torch.where(tokens.advantages < 0, bounded, surrogate)
    return -surrogate, _ratio_figures(ratios, tokens, clip_low, clip_high)


def cispo_loss(
    tokens: ChosenTokens, *, clip_low: float = 1.0, clip_high: float = 4.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """CISPO (MiniMax 2025): a clipped ratio weighs the token, so no token is left without a gradient."""
    ratios = tokens.log_ratios.detach().clamp(max=MAX_LOG_RATIO).exp()
    weights = ratios.clamp(1 - clip_low, 1 + clip_high)
    return -weights * tokens.advantages * tokens.logprobs, _ratio_figures(ratios, tokens, clip_low, clip_high)


def likelihood_loss(tokens: ChosenTokens) -> tuple[Tensor, dict[str, Tensor]]:
    """Supervised fine-tuning, where every token counts by its advantage."""
    return -tokens.advantages * tokens.logprobs, {}


def _ratio_figures(ratios: Tensor, tokens: ChosenTokens, clip_low: float, clip_high: float) -> dict[str, Tensor]:
    """Ratios, and the tokens that the clip holds back."""
    ratios = ratios.detach()
    return {
        "ratio": ratios,
        "ratio_max": ratios,
        "clipped_low": (ratios < 1 - clip_low) & (tokens.advantages < 0),
        "clipped_high": (ratios > 1 + clip_high) & (tokens.advantages > 0),
    }


def token_losses(tokens: ChosenTokens, settings: LearnerSettings) -> tuple[Tensor, Mapping[str, Tensor]]:
    """The losses [k] by the loss function of the settings, and its figures."""
    if settings.objective == "likelihood":
        return likelihood_loss(tokens)
    if settings.loss == "clipped":
        return clipped_loss(
            tokens,
            clip_low=settings.clip_low,
            clip_high=settings.clip_high,
            dual_clip=settings.dual_clip,
            level=settings.level,
        )
    if settings.loss == "cispo":
        return cispo_loss(tokens, clip_low=settings.clip_low, clip_high=settings.clip_high)
    return _checked_losses(settings.loss, tokens)


def _checked_losses(loss: LossFunction, tokens: ChosenTokens) -> tuple[Tensor, Mapping[str, Tensor]]:
    """The losses of a user's function; ConfigurationError if they are not one per token."""
    name, wanted = getattr(loss, "__qualname__", repr(loss)), tokens.logprobs.shape
    returned: object = loss(tokens)
    if not isinstance(returned, tuple) or len(returned) != 2 or not isinstance(returned[1], Mapping):
        raise ConfigurationError(
            f"The loss function {name} returned {type(returned).__name__}; return (losses, figures): a loss for each "
            "of the tokens, and a mapping of names to a number for each of them, which may be empty."
        )
    losses, figures = returned
    for what, column in {"losses": losses, **figures}.items():
        if not isinstance(column, Tensor) or column.shape != wanted:
            found = f"of shape {tuple(column.shape)}" if isinstance(column, Tensor) else type(column).__name__
            raise ConfigurationError(
                f"The loss function {name} returned {what} {found}; it must be a tensor of shape {tuple(wanted)}, one "
                "entry for each token, for what is added up and divided by is the learner's choice (aggregate)."
            )
    return losses, {what: column.detach() for what, column in figures.items()}


def importance_weights(
    tokens: ChosenTokens, engine_logprobs: Tensor, settings: LearnerSettings
) -> tuple[Tensor, dict[str, Tensor]]:
    """[k], what each token counts because the engine found it more or less likely than the learner; and figures."""
    log_ratios = tokens.old_logprobs - engine_logprobs
    means = tokens.sequence_means(log_ratios)
    chosen = means * tokens.lengths[tokens.sequences] if settings.importance_level == "sequence" else log_ratios
    importance = chosen.clamp(max=MAX_LOG_RATIO).exp()
    figures = {"importance": importance, "importance_max": importance}
    weights = torch.ones_like(importance)
    if settings.cap is not None:
        weights = importance.clamp(max=settings.cap)
        figures["importance_capped"] = importance > settings.cap
    if settings.importance_band is not None:
        low, high = settings.importance_band
        is_within = (means.exp() >= low) & (means.exp() <= high)
        weights = torch.where(is_within, weights, 0.0)
        figures["importance_masked"] = ~is_within
    return weights, figures | {"weight": weights, SQUARE: weights.square()}


def policy_loss(tokens: ChosenTokens, settings: LearnerSettings) -> Loss:
    """The loss of some sequences of a minibatch; the losses of all of them add up to that of the minibatch."""
    losses, own_figures = token_losses(tokens, settings)
    figures = dict(own_figures)
    if settings.objective == "policy":
        figures["kl_to_old"] = divergence(tokens.log_ratios.detach())
    if tokens.engine_logprobs is not None and settings.corrects_engine:
        weights, of_importance = importance_weights(tokens, tokens.engine_logprobs, settings)
        losses = losses * weights
        figures |= of_importance
    if tokens.reference_logprobs is not None:
        kl = kl_estimate(tokens.logprobs, tokens.reference_logprobs, settings.kl_estimator)
        if settings.kl_estimator == "k1":
            slope = kl_estimate(tokens.logprobs, tokens.reference_logprobs, "k2")
            kl = slope + (kl - slope).detach()
        losses = losses + settings.kl_coefficient * kl
        figures["kl"] = kl.detach()
    if settings.entropy_coefficient:
        losses = losses - settings.entropy_coefficient * tokens.entropies
    figures |= {"entropy": tokens.entropies.detach(), "logprob": tokens.logprobs.detach()}
    value = (losses * tokens.coefficients[tokens.sequences]).sum()
    sums = {name: column.sum() for name, column in figures.items() if not name.endswith(MAXIMUM)}
    return Loss(value, sums, {name: column.max() for name, column in figures.items() if name.endswith(MAXIMUM)})
