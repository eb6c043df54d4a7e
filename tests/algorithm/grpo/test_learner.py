"""The learner: that it learns, that it computes what the reference does, and that it breaks nothing."""

import io
import math
import random
from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from torch import Tensor

from agentlightning.algorithm.grpo.advantages import advantages
from agentlightning.algorithm.grpo.learner import Learner
from agentlightning.algorithm.grpo.packing import Pack, Row
from agentlightning.algorithm.grpo.samples import Sample
from agentlightning.algorithm.grpo.settings import KlEstimator, LearnerSettings, Optimiser
from agentlightning.algorithm.grpo.token_logprobs import token_logprobs
from agentlightning.engine import model as model_module
from agentlightning.engine.model import logits_of
from agentlightning.engine.sampling import Sampling
from agentlightning.engine.scheduler import InferenceEngine
from agentlightning.engine.tiny.model import TinyModel
from agentlightning.errors import ConfigurationError, TrainingError
from tests.algorithm.grpo import reference
from tests.algorithm.grpo.reference import Conversation, Variant
from tests.algorithm.grpo.small_model import SmallModel

pytestmark = pytest.mark.usefixtures("one_thread")

ONE_STEP = LearnerSettings(minibatches=1)


def sample(number: int, **changes: object) -> Sample:
    """Two turns: given tokens, chosen ones, given ones, chosen ones; of a length of its own."""
    source = random.Random(number)
    mask = [0] * source.randint(1, 4) + [1] * source.randint(1, 5) + [0] * source.randint(0, 3) + [1]
    found = Sample(
        token_ids=[source.randrange(SmallModel.vocab_size) for _ in mask],
        loss_mask=mask,
        logprobs=[source.uniform(-3, -1.5) if chosen else None for chosen in mask],
        advantage=source.choice([-1.0, 0.5, 1.0]),
        version=0,
        group="g",
        rollout_id=f"ro-{number}",
        weight=source.choice([0.5, 1.0]),
        temperature=source.choice([1.0, 0.7]),
    )
    return replace(found, **changes)  # type: ignore[arg-type]


SAMPLES = [sample(number) for number in range(9)]


def weights_of(model: SmallModel | TinyModel) -> Tensor:
    return torch.cat([weight.flatten() for weight in model.state().values()]).clone()


def learned(settings: LearnerSettings, *batches: list[Sample], model: SmallModel | None = None) -> Tensor:
    """The weights after some updates."""
    model = model or SmallModel()
    learner = Learner(model, settings)
    for batch in batches:
        learner.update(batch)
    return weights_of(model)


# ---------------------------------------------------------------------- it learns


@pytest.mark.parametrize(
    "optimiser",
    [
        "adamw",
        pytest.param(
            "adamw8bit", marks=pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="it needs bitsandbytes")
        ),
    ],
)
def test_a_policy_rewarded_for_one_token_learns_it_in_20_steps(optimiser: Optimiser) -> None:
    torch.manual_seed(0)
    model, prompt, wanted = TinyModel(), [5, 6, 7], 42
    learner = Learner(model, LearnerSettings(learning_rate=5e-3, minibatches=1, optimiser=optimiser))
    source = torch.Generator().manual_seed(1)

    def probabilities() -> Tensor:
        selected = torch.tensor([[False, False, True]])
        with torch.no_grad():
            return logits_of(model, torch.tensor([prompt]), torch.tensor([3]), selected)[0].softmax(-1)

    assert probabilities()[wanted] < 0.05
    for _ in range(20):
        chances = probabilities()
        answers = torch.multinomial(chances, 128, replacement=True, generator=source).tolist()
        gains = advantages([float(answer == wanted) for answer in answers]).values
        learner.update(
            [
                Sample([*prompt, answer], [0, 0, 0, 1], [None] * 3 + [chances[answer].log().item()], gain, 0, "g", "ro")
                for answer, gain in zip(answers, gains, strict=True)
            ]
        )

    assert probabilities()[wanted] > 0.9


# ---------------------------------------------------------------------- it computes what the reference does


def conversation(one: Sample, model: SmallModel, engine: bool) -> Conversation:
    """The sample as the reference takes it, token by token."""
    places = [place for place, chosen in enumerate(one.loss_mask) if chosen]
    rows = []
    for place in places:
        ids = torch.tensor([one.token_ids[:place]])
        selected = torch.zeros_like(ids, dtype=torch.bool)
        selected[0, -1] = True
        rows.append(logits_of(model, ids, torch.tensor([place]), selected)[0].detach().numpy())
    stored = np.array([one.logprobs[place] for place in places], dtype=np.float64)
    chosen = [one.token_ids[place] for place in places]
    tables = [reference.log_softmax(row / one.temperature) for row in rows]
    own = np.array([table[token] for table, token in zip(tables, chosen, strict=True)])
    return Conversation(
        logits=np.array(rows),
        chosen=chosen,
        old=own if engine else stored,
        advantage=one.advantage,
        weight=one.weight,
        temperature=one.temperature,
        engine=stored if engine else None,
    )


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("aggregate", ["token_mean", "sequence_mean", "constant"])
@pytest.mark.parametrize("cap", [None, 1.5])
def test_the_loss_of_samples_is_that_of_the_reference(level: str, aggregate: str, cap: float | None) -> None:
    model = SmallModel()
    settings = LearnerSettings(
        minibatches=1,
        max_batch_tokens=30,
        level=level,  # type: ignore[arg-type]
        aggregate=aggregate,  # type: ignore[arg-type]
        constant_length=7,
        importance_cap=cap,
    )
    batch = [conversation(one, model, cap is not None) for one in SAMPLES]

    metrics = Learner(model, settings).update(SAMPLES)

    expected = reference.loss(batch, Variant(level=level, aggregate=aggregate, cap=cap))
    assert metrics["learner/loss"] == pytest.approx(expected, rel=1e-9)
    assert metrics["learner/tokens"] == sum(sum(one.loss_mask) for one in SAMPLES)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
def test_the_engine_and_the_learner_find_the_same_logprobs(temperature: float) -> None:
    torch.manual_seed(0)
    model, source = TinyModel(), random.Random(0)
    model.embedding.data *= 20  # so that it prefers some tokens
    prompts = [[source.randrange(model.vocab_size) for _ in range(source.randint(2, 40))] for _ in range(12)]
    with InferenceEngine(model) as engine:
        asked = [Sampling(max_new_tokens=25, temperature=temperature, seed=seed) for seed in range(12)]
        futures = [engine.submit(prompt, sampling) for prompt, sampling in zip(prompts, asked, strict=True)]
        answers = [future.result(60) for future in futures]

    rows = [
        Row.of(
            Sample(
                [*prompt, *answer.token_ids],
                [0] * len(prompt) + [1] * len(answer.token_ids),
                [None] * len(prompt) + list(answer.logprobs),
                *(1.0, 0, "g", "ro", temperature),
            ),
            model,
        )
        for prompt, answer in zip(prompts, answers, strict=True)
    ]

    pack = Pack.of(rows, model.device)
    found = token_logprobs(
        logits_of(model, pack.ids, pack.lengths, pack.selected), pack.chosen, pack.temperatures
    ).logprobs
    stored = torch.cat([row.engine_logprobs for row in rows if row.engine_logprobs is not None])
    assert stored.exp().max() > 0.3
    torch.testing.assert_close(found, stored, rtol=0, atol=1e-4)


@pytest.mark.parametrize("aggregate", ["token_mean", "sequence_mean", "constant"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_packs_of_any_size_make_the_same_step(aggregate: str, level: str) -> None:
    settings = replace(ONE_STEP, aggregate=aggregate, level=level, entropy_coefficient=0.01)  # type: ignore[arg-type]
    whole = learned(replace(settings, max_batch_tokens=10_000), SAMPLES)
    for size in (1, 17, 40):
        torch.testing.assert_close(learned(replace(settings, max_batch_tokens=size), SAMPLES), whole, rtol=0, atol=1e-6)


@pytest.mark.parametrize("minibatches", [1, 2])
@pytest.mark.parametrize(
    ("rate", "least", "most"), [(0.0, 0.0, 0.0), (1e-9, 0.0, 1e-7), (1e-3, 1e-7, 0.5), (3.0, 0.5, 99)]
)
def test_what_an_update_changed_is_measured_after_its_last_step(
    minibatches: int, rate: float, least: float, most: float
) -> None:
    learner = Learner(SmallModel(), LearnerSettings(learning_rate=rate, minibatches=minibatches))

    found = learner.update([sample(number) for number in range(8)])["learner/update_kl"]

    assert least <= found <= most


def test_a_few_of_many_updates_are_measured() -> None:
    learner = Learner(SmallModel(), LearnerSettings())

    measured = ["learner/update_kl" in learner.update([sample(0)]) for _ in range(12)]

    assert measured == [True] * 6 + [False] * 4 + [True, False]


def test_two_epochs_are_two_updates() -> None:
    two_epochs = learned(replace(ONE_STEP, epochs=2), SAMPLES)
    torch.testing.assert_close(two_epochs, learned(ONE_STEP, SAMPLES, SAMPLES), rtol=0, atol=1e-9)
    assert not torch.equal(two_epochs, learned(ONE_STEP, SAMPLES))


def test_two_minibatches_are_two_updates_with_half_of_the_samples_each() -> None:
    order = list(SAMPLES)
    random.Random(5).shuffle(order)
    halves = learned(replace(ONE_STEP, seed=5), order[:4], order[4:])
    torch.testing.assert_close(learned(LearnerSettings(minibatches=2, seed=5), SAMPLES), halves, rtol=0, atol=1e-9)


def test_there_are_no_more_minibatches_than_samples() -> None:
    metrics = Learner(SmallModel(), LearnerSettings(minibatches=4)).update(SAMPLES[:2])
    assert metrics["learner/steps"] == 2


def test_a_sample_without_logprobs_is_measured_against_the_model_itself() -> None:
    unknown = [replace(one, logprobs=[None] * len(one.token_ids)) for one in SAMPLES]

    metrics = Learner(SmallModel(), ONE_STEP).update(unknown)

    assert metrics["learner/recomputed"] == len(SAMPLES)
    assert metrics["learner/ratio"] == pytest.approx(1.0, abs=1e-12)
    assert metrics["learner/ratio_max"] == pytest.approx(1.0, abs=1e-12)


def test_long_gradients_are_shortened() -> None:
    free, bound = (Learner(SmallModel(), replace(ONE_STEP, max_grad_norm=norm)) for norm in (None, 1e-3))

    norms = [learner.update(SAMPLES)["learner/grad_norm"] for learner in (free, bound)]

    assert norms[0] == norms[1] > 1e-3
    for learner, wanted in ((free, norms[0]), (bound, 1e-3)):
        moments = learner.state()["optimiser"]["mean"].values()
        assert math.hypot(*(moment.norm().item() for moment in moments)) == pytest.approx(0.1 * wanted, rel=1e-2)


def test_the_learning_rate_warms_up() -> None:
    learner = Learner(SmallModel(), replace(ONE_STEP, learning_rate=1e-3, warmup_steps=4))
    rates = [learner.update(SAMPLES)["learner/learning_rate"] for _ in range(6)]
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3, 1e-3])


# ---------------------------------------------------------------------- KL


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_is_zero_at_first_and_holds_the_model_near(estimator: KlEstimator) -> None:
    began, moved = weights_of(SmallModel()), {}
    for coefficient in (1e-9, 5.0):
        settings = LearnerSettings(
            kl_coefficient=coefficient, kl_estimator=estimator, learning_rate=0.01, epochs=4, clip_high=10.0
        )
        learner = Learner(SmallModel(), settings)
        for _ in range(5):
            learner.update(SAMPLES)
        moved[coefficient] = (weights_of(learner.model) - began).norm().item()  # type: ignore[arg-type]

    assert moved[5.0] < moved[1e-9] / 2
    assert Learner(SmallModel(), replace(ONE_STEP, kl_coefficient=1.0)).update(SAMPLES)["learner/kl"] == 0


# ---------------------------------------------------------------------- it breaks nothing


def test_with_a_learning_rate_of_zero_not_a_bit_changes() -> None:
    torch.manual_seed(3)
    model = TinyModel()
    before = {name: weight.clone() for name, weight in model.state().items()}
    settings = LearnerSettings(learning_rate=0.0, epochs=2, weight_decay=0.1, kl_coefficient=0.1)

    Learner(model, settings).update(SAMPLES)

    for name, weight in model.state().items():
        assert torch.equal(weight.view(torch.int32), before[name].view(torch.int32)), name


class Broken(SmallModel):
    """After so many forward passes, what it computes is not a number; or only its gradient is."""

    def __init__(self, *, good_passes: int, gradient_only: bool) -> None:
        super().__init__()
        self.good_passes = good_passes
        self.gradient_only = gradient_only

    def hidden(self, ids: Tensor, attention_lengths: Tensor, selected: Tensor) -> Tensor:
        found = super().hidden(ids, attention_lengths, selected)
        self.good_passes -= 1
        if self.good_passes >= 0:
            return found
        return found + (self.embedding * 0).sum().sqrt() if self.gradient_only else found * math.nan


@pytest.mark.parametrize("gradient_only", [False, True], ids=["loss", "gradient"])
def test_a_number_that_is_not_finite_stops_before_the_step_is_made(gradient_only: bool) -> None:
    model = Broken(good_passes=1 + 2 + 1 + 1, gradient_only=gradient_only)  # the change of an update is measured
    learner = Learner(model, LearnerSettings(minibatches=2))
    learner.update(SAMPLES)
    before, state = weights_of(model), learner.state()

    with pytest.raises(TrainingError, match=f"The {'gradient' if gradient_only else 'loss'} of step 3 .update 2. is"):
        learner.update(SAMPLES)

    assert torch.equal(weights_of(model), before)
    assert (learner.version, learner.steps) == (1, 2)
    assert all(weight.grad is None for weight in model.parameters())
    assert learner.state()["optimiser"]["steps"] == state["optimiser"]["steps"]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"token_ids": [1, 99], "loss_mask": [0, 1], "logprobs": [None, -1.0]}, "outside the 11"),
        ({"token_ids": [1, -1], "loss_mask": [0, 1], "logprobs": [None, -1.0]}, "outside the 11"),
        ({"token_ids": [1, 2], "loss_mask": [1, 1], "logprobs": [-1.0, -1.0]}, "begins with"),
        ({"token_ids": [1, 2], "loss_mask": [0, 0], "logprobs": [None, None]}, "no token"),
        ({"token_ids": [], "loss_mask": [], "logprobs": []}, "no token"),
        ({"token_ids": [1] * 65, "loss_mask": [0] + [1] * 64, "logprobs": [None] * 65}, "64 at most"),
        ({"token_ids": [1]}, "one of each"),
        ({"advantage": math.nan}, "not finite"),
        ({"token_ids": [1, 2], "loss_mask": [0, 1], "logprobs": [None, -math.inf]}, "not finite"),
        ({"weight": 0.0}, "weight"),
    ],
)
def test_a_sample_that_cannot_be_learned_from_is_named_before_anything_changes(
    wrong: dict[str, object], words: str
) -> None:
    model = SmallModel()
    before = weights_of(model)

    with pytest.raises(TrainingError, match=rf"'ro-1' .*{words}"):
        Learner(model).update([SAMPLES[0], sample(1, **wrong)])

    assert torch.equal(weights_of(model), before)


def test_no_samples_are_an_error() -> None:
    with pytest.raises(TrainingError, match="no samples"):
        Learner(SmallModel()).update([])


def test_the_model_is_in_training_only_while_it_is_trained() -> None:
    model = SmallModel()
    Learner(model, replace(ONE_STEP, importance_cap=2.0)).update(SAMPLES)
    assert model.modes == [False, False, True, False, False]  # the old model, twice; its step; the new one


@pytest.mark.parametrize(("limit", "wanted"), [(10**6, 1), (0, 3)], ids=["small", "large"])
def test_a_small_model_is_trained_with_one_thread(monkeypatch: pytest.MonkeyPatch, limit: int, wanted: int) -> None:
    class Counting(SmallModel):
        def hidden(self, ids: Tensor, attention_lengths: Tensor, selected: Tensor) -> Tensor:
            threads.append(torch.get_num_threads())
            return super().hidden(ids, attention_lengths, selected)

    monkeypatch.setattr(model_module, "SMALL_MODEL_PARAMETERS", limit)
    threads: list[int] = []
    torch.set_num_threads(3)

    Learner(Counting(), ONE_STEP).update(SAMPLES)

    assert set(threads) == {wanted}
    assert torch.get_num_threads() == 3


def test_16_bits_leave_the_weights_in_theirs() -> None:
    torch.manual_seed(0)
    exact, rough = TinyModel(), TinyModel()
    rough.load_state(exact.state())

    losses = [
        Learner(model, replace(ONE_STEP, precision=precision)).update(SAMPLES)["learner/loss"]  # type: ignore[arg-type]
        for model, precision in ((exact, "full"), (rough, "bf16"))
    ]

    assert rough.dtype == torch.float32
    assert losses[0] != losses[1]
    assert losses[1] == pytest.approx(losses[0], rel=0.05)


# ---------------------------------------------------------------------- it can be resumed


def test_a_learner_that_is_resumed_makes_the_steps_it_would_have_made() -> None:
    settings = LearnerSettings(minibatches=3, epochs=2, kl_coefficient=0.1, warmup_steps=9, seed=4)
    model = SmallModel()
    learner = Learner(model, settings)
    learner.update(SAMPLES)
    file = io.BytesIO()
    torch.save({"weights": model.state(), "learner": learner.state()}, file)
    expected = learner.update(SAMPLES)

    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again = SmallModel(seed=8)
    resumed = Learner(again, settings)
    again.load_state(saved["weights"])
    resumed.load_state(saved["learner"])
    found = resumed.update(SAMPLES)

    assert {**found, "learner/seconds": 0} == {**expected, "learner/seconds": 0}
    assert torch.equal(weights_of(again), weights_of(model))
    assert (resumed.version, resumed.steps) == (2, 12)


# ---------------------------------------------------------------------- settings and imports


@pytest.mark.parametrize(
    "wrong",
    [
        {"learning_rate": -1.0},
        {"learning_rate": math.nan},
        {"betas": (0.9, 1.0)},
        {"epochs": 0},
        {"minibatches": 0},
        {"max_batch_tokens": 0},
        {"clip_low": 1.5},
        {"dual_clip": 1.0},
        {"importance_cap": 0.0},
        {"importance_cap": "high"},
        {"max_grad_norm": 0.0},
        {"threads": 0},
        {"level": "word"},
        {"aggregate": "sum"},
        {"kl_estimator": "k4"},
        {"objective": "q"},
        {"precision": "fp8"},
        {"optimiser": "sgd"},
    ],
    ids=str,
)
def test_settings_that_cannot_be_used_are_named(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match=f"{next(iter(wrong))} is "):
        LearnerSettings(**wrong)  # type: ignore[arg-type]
