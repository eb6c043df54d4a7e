"""Presets, rewards of turns, weighted rewards and schedules, each against an implementation of its own."""

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the learner needs torch")

from agentlightning.adapter.trajectory import TokenSequence, Trajectory  # noqa: E402
from agentlightning.algorithm.batches import FinishedRollout  # noqa: E402
from agentlightning.algorithm.grpo.advantages import advantages, overlong_penalty, returns_to_go  # noqa: E402
from agentlightning.algorithm.grpo.grpo import GRPO  # noqa: E402
from agentlightning.algorithm.grpo.learner import Learner  # noqa: E402
from agentlightning.algorithm.grpo.progress import reward_means, weighted_rewards  # noqa: E402
from agentlightning.algorithm.grpo.samples import Batch, batch_of  # noqa: E402
from agentlightning.algorithm.grpo.settings import LearnerSettings, SampleSettings, Schedule  # noqa: E402
from agentlightning.errors import ConfigurationError, TrainingError  # noqa: E402
from tests.algorithm.finished import finished  # noqa: E402
from tests.algorithm.grpo import padded  # noqa: E402
from tests.algorithm.grpo.padded import Answer, Rollouts  # noqa: E402
from tests.algorithm.grpo.small_model import SmallModel  # noqa: E402
from tests.algorithm.sequences import rewarded, token_sequence  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

LONGEST, CACHE = 8, 4
PRESETS: dict[str, tuple[Callable[..., LearnerSettings], Callable[..., SampleSettings]]] = {
    "dr_grpo": (LearnerSettings.dr_grpo, SampleSettings.dr_grpo),
    "dapo": (LearnerSettings.dapo, SampleSettings.dapo),
    "gspo": (LearnerSettings.gspo, SampleSettings.gspo),
    "cispo": (LearnerSettings.cispo, SampleSettings.cispo),
}


def rollouts(model: SmallModel, rewards: list[list[float]], spread: float) -> Rollouts:
    """Answers of several lengths; the engine's log-probabilities differ from the model's by up to `spread`."""
    source = random.Random(3)
    found: Rollouts = []
    for group in rewards:
        prompt = [source.randrange(SmallModel.vocab_size) for _ in range(source.randint(1, 4))]
        answers = []
        for reward in group:
            chosen = [source.randrange(SmallModel.vocab_size) for _ in range(source.randint(1, 9))]
            answer = Answer(prompt, chosen, [], reward)
            own = padded.token_logprobs(model, answer).tolist()
            answer.old = [value + source.uniform(-spread, spread) for value in own]
            answers.append(answer)
        found.append(answers)
    return found


def outcome(group: str, reward: float | None, *sequences: TokenSequence, status: str = "succeeded") -> FinishedRollout:
    trajectory = Trajectory(rollout_id="ro", attempt_id="at", sequences=sequences)
    return finished("ro", group, status, reward, trajectory)


def batch(found: Rollouts, settings: SampleSettings, **options: Any) -> Batch:
    outcomes = [
        outcome(str(number), one.reward, token_sequence((one.prompt, one.chosen), logprobs=[one.old], rewards=[None]))
        for number, group in enumerate(found)
        for one in group
    ]
    return batch_of(outcomes, settings, current_version=0, **options)


def learned(model: SmallModel, made: Batch, settings: LearnerSettings) -> tuple[float, list[Any]]:
    """The loss of one step, and the gradients that the optimiser got."""
    learner = Learner(model, settings)
    gradients: list[Any] = []
    learner._optimiser.step = lambda rate: gradients.extend(  # type: ignore[method-assign]
        weight.grad.clone() for weight in model.trainable().values()
    )
    return learner.update(made.samples, made.sampled)["learner/loss"], gradients


# ---------------------------------------------------------------------- presets

REWARDS = [[0.0, 1.0, 0.25], [1.0, 1.0, 1.0], [0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]
"""Of four groups, two of which say nothing by their rewards."""


@pytest.mark.parametrize("method", PRESETS)
def test_a_preset_is_the_method_of_its_paper(method: str) -> None:
    model = SmallModel()
    learning, sampling = PRESETS[method]
    found = rollouts(model, REWARDS, spread={"gspo": 1e-3, "cispo": 2.5}.get(method, 0.6))
    expected = padded.loss(model, found, method, longest=LONGEST, cache=CACHE)
    expected.backward()
    wanted = [weight.grad.clone() for weight in model.trainable().values()]
    extras = {"longest_answer": LONGEST, "overlong_buffer": CACHE} if method == "dapo" else {}

    made = batch(found, sampling(**extras))
    settings = learning(minibatches=1, max_grad_norm=None, constant_length=LONGEST, max_batch_tokens=40)
    loss, gradients = learned(model, made, settings)

    assert made.report.metrics()["groups/used"] == (4 if method == "dapo" else 2)  # penalties tell answers apart
    assert loss == pytest.approx(expected.item(), rel=1e-9)
    for gradient, correct in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient, correct, rtol=1e-7, atol=1e-12)


@pytest.mark.parametrize("aggregate", ["token_mean", "sequence_mean", "constant"])
def test_a_step_shrinks_with_the_groups_that_teach(aggregate: Any) -> None:
    model = SmallModel()
    settings = LearnerSettings(aggregate=aggregate, minibatches=1, max_grad_norm=None)
    found = rollouts(model, [[0.0, 1.0], *[[1.0, 1.0]] * 3], spread=0.1)
    alone, beside = batch(found[:1], SampleSettings()), batch(found, SampleSettings())

    (small, _), (large, _) = learned(model, beside, settings), learned(model, alone, settings)

    counted = {"token_mean": "tokens", "sequence_mean": "weight", "constant": "weight"}[aggregate]
    share = getattr(alone.sampled, counted) / getattr(beside.sampled, counted)
    assert small == pytest.approx(large * share)
    assert share < 0.5
    assert beside.report.metrics()["samples/all"] == 8


def test_groups_that_dynamic_sampling_replaced_do_not_count() -> None:
    found = rollouts(SmallModel(), [[0.0, 1.0], [1.0, 1.0], [0.0, 0.0]], spread=0.1)
    made = [batch(found, SampleSettings(), replaced_groups=number).sampled.sequences for number in range(3)]
    assert made == [6, 4, 2]


@pytest.mark.parametrize("method", PRESETS)
def test_training_with_a_preset_samples_as_it_does(method: str) -> None:
    learning, sampling = PRESETS[method]

    made = GRPO("tiny", learning=learning(learning_rate=1e-6))

    assert made.sampling == sampling()
    assert made.dynamic_sampling == (method == "dapo")
    assert made.learning.learning_rate == 1e-6
    own = GRPO("tiny", learning=learning(), sampling=SampleSettings(failed="worst"), dynamic_sampling=False)
    assert (own.sampling, own.dynamic_sampling) == (SampleSettings(failed="worst"), False)


# ---------------------------------------------------------------------- rewards


@pytest.mark.parametrize("tokens", range(1, 14))
def test_the_overlong_penalty_is_that_of_the_paper(tokens: int) -> None:
    assert overlong_penalty(tokens, LONGEST, CACHE) == padded.dapo_penalty(tokens, LONGEST, CACHE)


def test_the_longest_answer_of_a_rollout_is_punished() -> None:
    long = token_sequence(([1], [2] * 3), ([1], [2] * 7), logprobs=[[-1.0] * 3, [-1.0] * 7], rewards=[None, None])
    short = token_sequence(([1], [2]), logprobs=[[-1.0]], rewards=[None])
    settings = SampleSettings(advantage="grpo_no_std", longest_answer=8, overlong_buffer=4)

    made = batch_of([outcome("g", 1.0, long), outcome("g", 1.0, short)], settings)

    assert [sample.advantage for sample in made.samples] == [-0.375, 0.375]
    assert made.report.metrics()["reward/overlong_penalty"] == -0.375
    assert made.report.rewards == [1.0, 1.0]


def test_batch_scaled_advantages_have_the_mean_of_the_group_and_the_deviation_of_the_batch() -> None:
    rewards, groups = np.array([0.0, 1.0, 1.0, 7.0, 3.0, 6.5, 2.0, 2.0]), [*"aaabbb", *"cc"]

    found = advantages(list(rewards), "grpo_batch_std", groups=groups)

    means = np.array([rewards[[one == name for one in groups]].mean() for name in groups])
    np.testing.assert_allclose(found.values, (rewards - means) / (rewards.std(ddof=1) + 1e-6), atol=1e-12)
    assert list(found.degenerate) == ["c"]


def test_named_rewards_are_added_by_their_weights() -> None:
    step = [rewarded(correct=1.0, format=0.5), rewarded(format=1.0, speed=9.0), rewarded(speed=9.0), rewarded()]
    weights = {"correct": 1.0, "format": 0.2}

    found = weighted_rewards(step, weights)

    assert [one.reward for one in found] == [pytest.approx(1.1), pytest.approx(0.2), None, None]
    assert reward_means(step, weights) == {"reward/correct": 1.0, "reward/format": 0.75}


def test_a_weight_of_a_reward_that_nobody_emits_is_an_error_that_names_those_emitted() -> None:
    with pytest.raises(TrainingError, match=r"'formatt', which reward_weights has; they emitted 'correct', 'format'\."):
        weighted_rewards([rewarded(correct=1.0, format=0.5)], {"formatt": 1.0})


# ---------------------------------------------------------------------- turns

TURNS: list[list[float | None]] = [[0.5, None, 1.0], [None, 0.25], [0.0, None, 0.0], [1.0]]
"""Rewards of the model calls of four rollouts of one group."""


def conversations(model: SmallModel) -> tuple[list[FinishedRollout], list[list[tuple[list[int], list[int]]]]]:
    source = random.Random(5)
    outcomes, texts = [], []
    for rewards in TURNS:
        turns = [
            ([source.randrange(11) for _ in range(2)], [source.randrange(11) for _ in range(source.randint(1, 3))])
            for _ in rewards
        ]
        old = [[source.uniform(-3, -1.5) for _ in chosen] for _, chosen in turns]
        last = [reward for reward in rewards if reward is not None][-1]
        outcomes.append(outcome("g", last, token_sequence(*turns, logprobs=old, rewards=rewards)))
        texts.append(turns)
    return outcomes, texts


@pytest.mark.parametrize("discount", [1.0, 0.5, 0.0])
def test_turns_are_compared_by_what_follows_them(discount: float) -> None:
    model = SmallModel()
    outcomes, texts = conversations(model)
    expected = padded.per_turn([[reward or 0.0 for reward in rewards] for rewards in TURNS], discount)

    made = batch_of(outcomes, SampleSettings(credit="turn", discount=discount))
    loss, gradients = learned(model, made, LearnerSettings(minibatches=1, max_grad_norm=None))

    total, tokens = torch.zeros((), dtype=torch.float64), 0
    for sample, turns, gains in zip(made.samples, texts, expected, strict=True):
        before: list[int] = []
        for (given, chosen), gain in zip(turns, gains, strict=True):
            start = len(before) + len(given)
            assert sample.token_advantages is not None
            assert sample.token_advantages[start : start + len(chosen)] == pytest.approx([gain] * len(chosen))
            old = torch.tensor(sample.logprobs[start : start + len(chosen)], dtype=torch.float64)
            answer = Answer([*before, *given], chosen, [], 0.0)
            ratio = torch.exp(padded.token_logprobs(model, answer) - old)
            total = total - torch.minimum(ratio * gain, ratio.clamp(0.8, 1.28) * gain).sum()
            tokens += len(chosen)
            before += [*given, *chosen]
    mean = total / tokens
    mean.backward()
    assert loss == pytest.approx(mean.item(), rel=1e-9)
    for gradient, weight in zip(gradients, model.trainable().values(), strict=True):
        torch.testing.assert_close(gradient, weight.grad, rtol=1e-7, atol=1e-12)


def test_with_one_reward_at_the_end_turns_are_judged_as_rollouts_are() -> None:
    turns = ([1], [2, 3]), ([4], [5])
    outcomes = [
        outcome("g", reward, token_sequence(*turns, logprobs=[[-1.0, -1.0], [-1.0]], rewards=[None, reward]))
        for reward in (0.0, 1.0, 0.25)
    ]

    whole = batch_of(outcomes, SampleSettings())
    by_turn = batch_of(outcomes, SampleSettings(credit="turn"))

    for one, other in zip(whole.samples, by_turn.samples, strict=True):
        assert other.token_advantages == pytest.approx([0.0, *[one.advantage] * 2, 0.0, one.advantage])


def test_report_of_a_policy_has_the_rewards_of_its_own_calls() -> None:
    turns = ([1], [2]), ([4], [5])
    outcomes = [
        outcome("g", 1.0, token_sequence(*turns, logprobs=[[-1.0], [-1.0]], rewards=[own, 0.5])) for own in (0.0, 1.0)
    ]

    whole = batch_of(outcomes, SampleSettings()).report.metrics()
    by_turn = batch_of(outcomes, SampleSettings(credit="turn", discount=0.5)).report.metrics()

    assert (whole["reward/mean"], whole["reward/of_calls"]) == (1.0, 1.0)
    assert (by_turn["reward/mean"], by_turn["reward/of_calls"]) == (0.75, 1.0)
    assert by_turn["reward/max"] == 1.25


def test_the_reward_of_a_rollout_without_rewards_of_calls_is_that_of_its_last_turn() -> None:
    turns = ([1], [2]), ([4], [5])
    outcomes = [
        outcome("g", reward, token_sequence(*turns, logprobs=[[-1.0], [-1.0]], rewards=[None, None]))
        for reward in (0.0, 1.0)
    ]
    settings = SampleSettings(credit="turn", advantage="grpo_no_std", discount=0.5)

    made = batch_of(outcomes, settings)

    assert [sample.token_advantages for sample in made.samples] == [[0, -0.25, 0, -0.5], [0, 0.25, 0, 0.5]]
    assert returns_to_go([0.0, 1.0], 0.5) == [0.5, 1.0]


# ---------------------------------------------------------------------- schedules


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [{}, {"warmup_steps": 4}, {"warmup_ratio": 0.2}], ids=["none", "steps", "ratio"])
def test_a_schedule_is_that_of_torch(schedule: Schedule, warmup: dict[str, Any]) -> None:
    total, rising = 20, 4 if warmup else 0
    rates = torch.optim.lr_scheduler
    optimiser = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    falling = {
        "constant": lambda: rates.ConstantLR(optimiser, factor=1.0),
        "linear": lambda: rates.LinearLR(optimiser, 1.0, 0.0, total_iters=total - rising),
        "cosine": lambda: rates.CosineAnnealingLR(optimiser, T_max=total - rising),
    }[schedule]
    scheduler: Any
    if rising:
        growing = rates.LinearLR(optimiser, 1 / rising, 1.0, total_iters=rising - 1)
        scheduler = rates.SequentialLR(optimiser, [growing, falling()], milestones=[rising])
    else:
        scheduler = falling()
    expected = []
    for _ in range(total):
        expected.append(optimiser.param_groups[0]["lr"])
        optimiser.step()
        scheduler.step()

    settings = LearnerSettings(schedule=schedule, total_steps=total, **warmup)

    assert [settings.rate_share(step) for step in range(total)] == pytest.approx(expected, abs=1e-9)
    assert settings.rate_share(total + 3) == (1.0 if schedule == "constant" else 0.0)


def test_a_training_plans_its_schedule_by_its_steps() -> None:
    made = GRPO("tiny", steps=30, learning=LearnerSettings(schedule="cosine", epochs=2, minibatches=3))
    assert made.learning.total_steps == 180
    with pytest.raises(ConfigurationError, match="needs total_steps"):
        LearnerSettings(schedule="linear").rate_share(0)


# ---------------------------------------------------------------------- what cannot be used


@pytest.mark.parametrize(
    "wrong",
    [
        {"credit": "token"},
        {"discount": -0.1},
        {"longest_answer": 0},
        {"overlong_buffer": 9, "longest_answer": 8},
        {"reward_weights": {}},
        {"reward_weights": {"correct": math.nan}},
        {"reward_weights": {"correct": 1.0}, "credit": "turn"},
    ],
    ids=str,
)
def test_settings_that_cannot_be_used_are_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        SampleSettings(**wrong)


def test_turns_have_no_ratio_of_a_sequence() -> None:
    with pytest.raises(ConfigurationError, match="level='token'"):
        GRPO("tiny", learning=LearnerSettings.gspo(), sampling=SampleSettings(credit="turn"))
