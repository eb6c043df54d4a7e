"""Fitting: the loss, the epochs, the early end, and going on from a checkpoint."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from agentlightning.algorithm.grpo.checkpoints import Checkpoints
from agentlightning.algorithm.grpo.learner import Learner
from agentlightning.algorithm.grpo.samples import Sample
from agentlightning.algorithm.grpo.settings import LearnerSettings
from agentlightning.algorithm.sft.examples import FittingSettings, Split
from agentlightning.algorithm.sft.sft import Fitting, sft_loss
from agentlightning.engine.model import logits_of
from agentlightning.errors import ConfigurationError
from tests.algorithm.grpo.small_model import SmallModel

MODEL_LEARNS = LearnerSettings(objective="likelihood", learning_rate=0.02, minibatches=1, threads=1)


def sample(prompt: list[int], response: list[int], group: str = "task") -> Sample:
    ids = prompt + response
    mask = [0] * len(prompt) + [1] * len(response)
    return Sample(ids, mask, [None] * len(ids), advantage=1.0, version=None, group=group, rollout_id="ro")


TRAIN = [sample([n, n], [7, 8, 10], group=str(n)) for n in range(6)]
HELD_OUT = [sample([0, 3], [7, 8, 10], group="held")]


def fitting(
    split: Split, checkpoints: Checkpoints | None = None, *, model: type[SmallModel] = SmallModel, **chosen: Any
) -> Fitting:
    settings = FittingSettings(**{"epochs": 4, "batch_size": 2, **chosen})
    return Fitting(Learner(model(), MODEL_LEARNS), split, settings, checkpoints=checkpoints)


def run(one: Fitting) -> list[dict[str, float]]:
    found = [one.judge()]
    while not one.is_over:
        found.append(one.run_epoch())
    one.finish()
    return found


def by_hand(model: SmallModel, samples: list[Sample]) -> float:
    """The mean cross-entropy, one token at a time."""
    losses: list[float] = []
    for one in samples:
        for place, is_chosen in enumerate(one.loss_mask):
            if is_chosen:
                ids = torch.tensor([one.token_ids[:place]])
                last = torch.zeros_like(ids, dtype=torch.bool)
                last[0, -1] = True
                logits = logits_of(model, ids, torch.tensor([place]), last)[0].tolist()
                total = math.log(sum(math.exp(value) for value in logits))
                losses.append(total - logits[one.token_ids[place]])
    return sum(losses) / len(losses)


def likeliest(prompt: list[int]) -> int:
    """What an untrained model says first."""
    last = torch.tensor([[False] * (len(prompt) - 1) + [True]])
    return int(logits_of(SmallModel(), torch.tensor([prompt]), torch.tensor([len(prompt)]), last)[0].argmax())


class AdaptedModel(SmallModel):
    """Trains an addition to one of its weights alone, as adapters are one; its state has the sum of both."""

    def __init__(self) -> None:
        super().__init__()
        self.added = torch.nn.Parameter(torch.zeros_like(self.inner))

    def hidden(self, ids: Tensor, attention_lengths: Tensor, selected: Tensor) -> Tensor:
        embedded = self.embedding.detach()[ids]
        counts = torch.arange(1, ids.shape[1] + 1, dtype=self.dtype)[None, :, None]
        hidden = (embedded.cumsum(1) / counts + embedded) @ (self.inner.detach() + self.added)
        return hidden[selected].tanh()

    def head(self) -> Tensor:
        return self.outer.detach()

    def trainable(self) -> dict[str, torch.nn.Parameter]:
        return {"added": self.added}

    def state(self) -> dict[str, Tensor]:
        found = super().state()
        added = found.pop("added")
        return {**found, "inner": found["inner"] + added}

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: shape for name, shape in super().state_shapes().items() if name != "added"}

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        super().load_state({**tensors, "added": torch.zeros_like(self.added)})


class TestLoss:
    @pytest.mark.parametrize("max_batch_tokens", [1, 7, 1000])
    def test_it_is_the_cross_entropy_of_the_chosen_tokens_in_packs_of_any_size(self, max_batch_tokens: int) -> None:
        model = SmallModel()
        samples = [sample([1, 2, 3], [4]), sample([5], [6, 7, 8, 9]), sample([2], [2])]
        found = sft_loss(Learner(model, LearnerSettings(max_batch_tokens=max_batch_tokens)), samples)
        assert found == pytest.approx(by_hand(model, samples), abs=1e-12)

    def test_it_is_what_the_learner_minimises(self) -> None:
        model = SmallModel()
        still = Learner(model, LearnerSettings(objective="likelihood", learning_rate=0.0, minibatches=1))
        assert still.update(TRAIN)["learner/loss"] == pytest.approx(sft_loss(still, TRAIN), abs=1e-9)


class TestEpochs:
    def test_the_examples_become_likelier_and_so_do_those_held_out(self) -> None:
        found = run(fitting(Split(TRAIN, HELD_OUT), epochs=30))
        assert found[-1]["sft/loss"] < 0.5 < found[1]["sft/loss"]
        assert found[-1]["sft/held_out_loss"] < found[0]["sft/held_out_loss"] / 2

    def test_an_epoch_that_is_cancelled_counts_as_not_made(self) -> None:
        one = fitting(Split(TRAIN, []))
        assert one.run_epoch(lambda: True) == {}
        assert (one.epoch, one.learner.steps) == (0, 0)

    @pytest.mark.parametrize("model", [SmallModel, AdaptedModel])
    def test_it_ends_when_the_held_out_loss_no_longer_falls_and_leaves_the_best_weights(
        self, model: type[SmallModel]
    ) -> None:
        contrary = [sample([6, 6], [1, 2, 3], group="held")]
        one = fitting(Split(TRAIN, contrary), model=model, epochs=50, patience=2)

        found = run(one)

        losses = [entry["sft/held_out_loss"] for entry in found]
        assert one.epoch < 50
        assert losses.index(min(losses)) == len(losses) - 3
        assert sft_loss(one.learner, contrary) == pytest.approx(min(losses))
        assert one.best_loss == min(losses)

    @pytest.mark.parametrize("wrong", [{"epochs": 0}, {"batch_size": 0}, {"patience": 0}])
    def test_what_cannot_be_used_is_named(self, wrong: dict[str, int]) -> None:
        with pytest.raises(ConfigurationError, match=next(iter(wrong))):
            FittingSettings(**wrong)


class TestResuming:
    @pytest.mark.parametrize(
        ("model", "held_out"),
        [(SmallModel, []), (SmallModel, HELD_OUT), (AdaptedModel, [])],
        ids=["nothing held out", "held out", "adapters"],
    )
    def test_a_run_that_was_stopped_reaches_the_same_weights(
        self, tmp_path: Path, model: type[SmallModel], held_out: list[Sample]
    ) -> None:
        split, checkpoints = Split(TRAIN, held_out), Checkpoints(tmp_path)
        whole = fitting(split, model=model)
        run(whole)
        run(fitting(split, checkpoints, model=model, epochs=2))

        second = fitting(split, checkpoints, model=model)
        latest = checkpoints.latest()
        assert latest is not None
        second.resume(latest, checkpoints.best())
        while not second.is_over:
            second.run_epoch()
        second.finish()

        assert second.epoch == 4
        for name, weight in whole.learner.model.trainable().items():
            assert torch.equal(second.learner.model.trainable()[name], weight)

    def test_a_run_that_begins_anew_keeps_the_checkpoints_of_the_one_before(self, tmp_path: Path) -> None:
        for epochs in (3, 2):
            run(fitting(Split(TRAIN, []), Checkpoints(tmp_path / "tiny"), epochs=epochs))

        latest = [Checkpoints(place / "tiny").latest() for place in (tmp_path / "earlier-1", tmp_path)]

        assert [one.step for one in latest if one is not None] == [3, 2]

    def test_where_no_epoch_was_better_the_weights_of_the_beginning_remain(self, tmp_path: Path) -> None:
        contrary = [sample([n, n], [likeliest([n, n])], group="held") for n in range(6)]
        split, checkpoints = Split(TRAIN, contrary), Checkpoints(tmp_path)
        first = fitting(split, checkpoints, epochs=8)
        losses = [entry["sft/held_out_loss"] for entry in run(first)]
        assert min(losses) == losses[0]

        second = fitting(split, checkpoints, epochs=9)
        latest = checkpoints.latest()
        assert latest is not None
        assert checkpoints.best() is None
        second.resume(latest, None)
        second.run_epoch()
        second.finish()

        for name, weight in SmallModel().state().items():
            assert torch.equal(second.learner.model.state()[name], weight)
