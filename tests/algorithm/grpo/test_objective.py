"""The objective, every variant of it, against an independent reference; gradients against finite differences."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from agentlightning.algorithm.grpo.objective import (
    ChosenTokens,
    Loss,
    cispo_loss,
    clipped_loss,
    importance_weights,
    kl_estimate,
    policy_loss,
    sequence_coefficients,
)
from agentlightning.algorithm.grpo.settings import LearnerSettings
from agentlightning.algorithm.grpo.token_logprobs import token_logprobs
from agentlightning.errors import ConfigurationError
from tests.algorithm.grpo import reference
from tests.algorithm.grpo.reference import Conversation, Variant

VOCABULARY = 5
EXTRAS = {
    "plain": {},
    "entropy": {"entropy": 0.03},
    "dual_clip": {"dual": 1.4},
    "importance": {"cap": 1.3},
    "all": {"entropy": 0.03, "dual": 1.4, "cap": 1.3},
}
VARIANTS = [
    (f"{level}-{aggregate}-{kl}-{extra}", Variant(level=level, aggregate=aggregate, kl=kl, beta=0.1, **EXTRAS[extra]))
    for level, aggregate, kl, extra in itertools.product(
        ["token", "sequence"], ["token_mean", "sequence_mean", "constant"], [None, "k1", "k2", "k3"], ["plain", "all"]
    )
]
VARIANTS += [
    (f"{level}-{extra}", Variant(level=level, **EXTRAS[extra]))
    for level, extra in itertools.product(["token", "sequence"], ["entropy", "dual_clip", "importance"])
]
VARIANTS += [(f"likelihood-{kl}", Variant(likelihood=True, kl=kl, beta=0.1)) for kl in (None, "k3")]
VARIANTS += [("clip-symmetric", Variant(high=0.2)), ("clip-narrow", Variant(low=0.01, high=0.02))]


def conversations(seed: int = 14) -> list[Conversation]:
    """Sequences of several lengths, advantages and temperatures, with ratios on both sides of both clips."""
    source = np.random.default_rng(seed)
    found = []
    for length, advantage, temperature in (
        (3, 1.5, 1.0),
        (1, -0.7, 0.8),
        (5, -1.1, 1.0),
        (2, 0.4, 1.7),
        (4, -2.0, 1.0),
    ):
        logits = source.normal(size=(length, VOCABULARY))
        chosen = [int(token) for token in source.integers(VOCABULARY, size=length)]
        tables = [reference.log_softmax(row / temperature) for row in logits]
        own = np.array([table[token] for table, token in zip(tables, chosen, strict=True)])
        found.append(
            Conversation(
                logits=logits,
                chosen=chosen,
                old=own + source.normal(scale=0.4, size=length),
                advantage=advantage,
                weight=float(source.uniform(0.5, 2)),
                temperature=temperature,
                engine=own + source.normal(scale=0.4, size=length),
                reference=own + source.normal(scale=0.4, size=length),
            )
        )
    return found


def settings_of(variant: Variant) -> LearnerSettings:
    return LearnerSettings(
        objective="likelihood" if variant.likelihood else "policy",
        level=variant.level,
        aggregate=variant.aggregate,
        constant_length=variant.constant,
        clip_low=variant.low,
        clip_high=variant.high,
        dual_clip=variant.dual,
        kl_coefficient=variant.beta if variant.kl else 0.0,
        kl_estimator=variant.kl or "k3",
        entropy_coefficient=variant.entropy,
        importance_cap=variant.cap,
    )


def column(arrays: list[np.ndarray]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(arrays))


def computed(batch: list[Conversation], variant: Variant) -> tuple[Loss, torch.Tensor]:
    """Our loss, and the logits it was computed from."""
    settings = settings_of(variant)
    lengths = [len(one.chosen) for one in batch]
    logits = column([one.logits for one in batch]).requires_grad_()
    temperatures = torch.tensor([one.temperature for one in batch], dtype=torch.float64)
    sequences = torch.arange(len(batch)).repeat_interleave(torch.tensor(lengths))
    chosen = torch.tensor([token for one in batch for token in one.chosen])
    found = token_logprobs(logits, chosen, temperatures[sequences], entropy_gradient=True)
    coefficients = sequence_coefficients(
        lengths, [one.weight for one in batch], settings.aggregate, settings.constant_length
    )
    tokens = ChosenTokens(
        logprobs=found.logprobs,
        old_logprobs=column([one.old for one in batch]),
        sequences=sequences,
        advantages=torch.tensor([one.advantage for one in batch], dtype=torch.float64)[sequences],
        coefficients=torch.tensor(coefficients, dtype=torch.float64),
        entropies=found.entropies,
        engine_logprobs=column([one.engine for one in batch]),
        reference_logprobs=column([one.reference for one in batch]) if variant.kl else None,
    )
    return policy_loss(tokens, settings), logits


@pytest.mark.parametrize("variant", [variant for _, variant in VARIANTS], ids=[name for name, _ in VARIANTS])
def test_loss_and_gradient_are_those_of_the_reference(variant: Variant) -> None:
    batch = conversations()

    loss, logits = computed(batch, variant)
    loss.value.backward()

    assert loss.value.item() == pytest.approx(reference.loss(batch, variant), rel=1e-10, abs=1e-12)
    sloped = replace(variant, kl="k2") if variant.kl == "k1" else variant  # the gradient of k1 itself is none of the KL
    expected = np.concatenate(reference.gradient(batch, sloped))
    assert logits.grad is not None
    assert np.abs(expected).max() > 1e-3
    np.testing.assert_allclose(logits.grad.numpy(), expected, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("change", [{"low": 0.3}, {"high": 0.4}, {"dual": 1.4}, {"cap": 1.3}, {"entropy": 0.1}])
def test_every_option_changes_the_loss_of_the_cases(change: dict[str, float], level: str) -> None:
    """Else the cases would prove nothing of it."""
    batch, variant = conversations(), Variant(level=level)
    assert abs(computed(batch, variant)[0].value - computed(batch, replace(variant, **change))[0].value) > 1e-3


def test_counts_of_clipped_tokens_are_those_of_the_ratios() -> None:
    batch = conversations()

    loss, _ = computed(batch, Variant())

    ratios = [
        (math.exp(reference.log_softmax(row / one.temperature)[token] - old), one.advantage)
        for one in batch
        for row, token, old in zip(one.logits, one.chosen, one.old, strict=True)
    ]
    low = sum(ratio < 0.8 and advantage < 0 for ratio, advantage in ratios)
    high = sum(ratio > 1.28 and advantage > 0 for ratio, advantage in ratios)
    assert (low, high) != (0, 0)
    assert (loss.sums["clipped_low"].item(), loss.sums["clipped_high"].item()) == (low, high)
    assert loss.sums["ratio"].item() == pytest.approx(sum(ratio for ratio, _ in ratios))
    assert loss.maxima["ratio_max"].item() == pytest.approx(max(ratio for ratio, _ in ratios))


def test_a_clipped_token_has_no_gradient() -> None:
    one = conversations()[0]
    own = [reference.log_softmax(row)[token] for row, token in zip(one.logits, one.chosen, strict=True)]
    one.old = np.array(own) - 1.0  # now e times as likely as it was, and good

    loss, logits = computed([one], Variant())
    loss.value.backward()

    assert logits.grad is not None
    assert logits.grad.abs().max().item() == 0


def test_a_ratio_beyond_all_bounds_stays_finite() -> None:
    one = replace(conversations()[2], old=np.full(5, -1e4), reference=np.full(5, -1e4))

    loss, logits = computed([one], Variant(kl="k3", beta=0.1))
    loss.value.backward()

    assert logits.grad is not None
    assert math.isfinite(loss.value.item())
    assert bool(logits.grad.isfinite().all())


def test_one_token_does_not_make_the_change_of_a_step() -> None:
    own, count = torch.full((1000,), -0.1), 1000
    old = torch.cat([own[1:], torch.tensor([-8.0])])
    zeros = torch.zeros(count, dtype=torch.long)
    tokens = ChosenTokens(own, old, zeros, torch.ones(count), torch.ones(1), torch.ones(count))

    measured = [
        policy_loss(replace(tokens, logprobs=logprobs), LearnerSettings()).sums["kl_to_old"].item() / count
        for logprobs in (own, own - 3)
    ]

    assert 0 < measured[0] < 0.001
    assert measured[1] > 2


def test_logits_of_16_bits_are_read_in_32() -> None:
    logits = torch.randn(4, VOCABULARY).bfloat16()

    found = token_logprobs(logits, torch.tensor([0, 1, 2, 3]))

    assert found.logprobs.dtype == torch.float32
    expected = logits.float().log_softmax(-1)[torch.arange(4), torch.arange(4)]
    torch.testing.assert_close(found.logprobs, expected)


def test_k3_is_never_negative_and_k1_and_k3_have_the_same_mean_under_the_policy() -> None:
    """Over all tokens, weighted by their probabilities, both are the exact KL."""
    own, other = torch.randn(2, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).log_softmax(-1)

    k1, k3 = kl_estimate(own, other, "k1"), kl_estimate(own, other, "k3")

    exact = (own.exp() * (own - other)).sum()
    assert bool((k3 >= 0).all())
    torch.testing.assert_close((own.exp() * k1).sum(), exact)
    torch.testing.assert_close((own.exp() * k3).sum(), exact)


# ---------------------------------------------------------------------- importance


def test_importance_by_token_by_sequence_and_masked_is_that_of_plain_python() -> None:
    ratios = [[1.5, 0.5, 1.2], [3.0, 1.1], [0.2, 0.9, 0.4, 0.8]]
    lengths = list(map(len, ratios))
    engine = torch.zeros(sum(lengths), dtype=torch.float64)
    tokens = replace(
        some_tokens(),
        old_logprobs=torch.tensor([math.log(ratio) for own in ratios for ratio in own], dtype=torch.float64),
        sequences=torch.arange(3).repeat_interleave(torch.tensor(lengths)),
        coefficients=torch.ones(3, dtype=torch.float64),
    )

    def weights(**options: object) -> list[float]:
        settings = LearnerSettings(**{"importance_cap": None, **options})  # type: ignore[arg-type]
        found, figures = importance_weights(tokens, engine, settings)
        assert (figures["weight"] == found).all()
        return found.tolist()

    products = [math.prod(own) for own in ratios]
    means = [product ** (1 / length) for product, length in zip(products, lengths, strict=True)]
    assert weights(importance_cap=1.4) == pytest.approx([min(one, 1.4) for own in ratios for one in own])
    assert weights(importance_cap=2.0, importance_level="sequence") == pytest.approx(
        [min(product, 2.0) for product, length in zip(products, lengths, strict=True) for _ in range(length)]
    )
    kept = [0.6 <= mean <= 1.5 for mean in means]
    assert kept == [True, False, False]
    assert weights(importance_band=(0.6, 1.5)) == [
        float(is_kept) for is_kept, own in zip(kept, ratios, strict=True) for _ in own
    ]


@pytest.mark.parametrize("band", [(1.1, 2.0), (0.5, 0.9), (-1.0, 2.0)])
def test_a_band_that_leaves_out_the_unchanged_is_refused(band: tuple[float, float]) -> None:
    with pytest.raises(ConfigurationError, match="one below and one above 1"):
        LearnerSettings(importance_band=band)


# ---------------------------------------------------------------------- loss functions


def some_tokens() -> ChosenTokens:
    """Five tokens of two sequences, with ratios of 4, 1/4, 1, 4 and 1/4."""
    new = torch.tensor([-0.5, -2.0, -1.0, -0.5, -2.0], dtype=torch.float64, requires_grad=True)
    log_ratios = torch.tensor([4.0, 0.25, 1.0, 4.0, 0.25], dtype=torch.float64).log()
    return ChosenTokens(
        logprobs=new,
        old_logprobs=new.detach() - log_ratios,
        sequences=torch.tensor([0, 0, 0, 1, 1]),
        advantages=torch.tensor([1.0, 1.0, 1.0, -2.0, -2.0], dtype=torch.float64),
        coefficients=torch.tensor([0.2, 0.2], dtype=torch.float64),
        entropies=torch.zeros(5, dtype=torch.float64),
    )


def test_cispo_weighs_tokens_by_the_clipped_ratio_and_clips_no_gradient() -> None:
    tokens = some_tokens()

    losses, figures = cispo_loss(tokens, clip_low=0.5, clip_high=1.0)
    losses.sum().backward()

    weights = [2.0, 0.5, 1.0, 2.0, 0.5]
    assert tokens.logprobs.grad is not None
    assert tokens.logprobs.grad.tolist() == pytest.approx([-2.0, -0.5, -1.0, 4.0, 1.0])
    assert losses.tolist() == pytest.approx(
        [-w * a * p for w, a, p in zip(weights, [1, 1, 1, -2, -2], [-0.5, -2.0, -1.0, -0.5, -2.0], strict=True)]
    )
    assert (figures["clipped_low"].sum(), figures["clipped_high"].sum()) == (1, 1)


def test_a_loss_function_of_ones_own_takes_the_place_of_the_built_in_one() -> None:
    def doubled(tokens: ChosenTokens) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        losses, _ = clipped_loss(tokens)
        return 2 * losses, {"mine": tokens.advantages, "mine_max": tokens.advantages}

    own = policy_loss(some_tokens(), LearnerSettings(loss=doubled))
    built_in = policy_loss(some_tokens(), LearnerSettings())

    assert own.value.item() == pytest.approx(2 * built_in.value.item())
    assert (own.sums["mine"].item(), own.maxima["mine_max"].item()) == (-1.0, 1.0)
    assert "ratio" not in own.sums
    assert own.sums["kl_to_old"] == built_in.sums["kl_to_old"]


def test_tokens_know_the_lengths_and_means_of_their_sequences() -> None:
    tokens = some_tokens()
    assert tokens.lengths.tolist() == [3, 2]
    assert tokens.sequence_means(tokens.advantages).tolist() == [1.0, 1.0, 1.0, -2.0, -2.0]
    assert tokens.sequence_means(tokens.logprobs.detach())[0].item() == pytest.approx(-3.5 / 3)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (torch.zeros(5), r"returned Tensor; return \(losses, figures\)"),
        ((torch.zeros(2), {}), r"returned losses of shape \(2,\); it must be a tensor of shape \(5,\)"),
        ((torch.zeros(5), {"mine": 0.5}), r"returned mine float; it must be a tensor"),
    ],
    ids=["no-figures", "a-mean", "a-number"],
)
def test_what_is_no_loss_for_each_token_is_refused(returned: object, message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"The loss function .*<lambda> {message}"):
        policy_loss(some_tokens(), LearnerSettings(loss=lambda tokens: returned))  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "cisp"}, "loss is 'cisp'; it must be one of 'clipped', 'cispo'"),
        ({"loss": "cispo", "level": "sequence"}, "level is 'sequence'; it must be left as it is"),
        ({"loss": cispo_loss, "dual_clip": 3.0}, "dual_clip is 3.0; it must be left as it is"),
        ({"loss": "cispo", "objective": "likelihood"}, "it must be 'clipped' with objective='likelihood'"),
        ({"loss": cispo_loss, "processes": 2}, "it must be 'clipped' or 'cispo' where there are several processes"),
    ],
)
def test_settings_that_a_loss_does_not_have_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        LearnerSettings(**options)  # type: ignore[arg-type]
