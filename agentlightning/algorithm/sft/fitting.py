"""Fitting a model to examples: epochs, the loss on what is held out, an early end, and checkpoints.

The order of an epoch follows from the seed and its number, and the learner's state is in every checkpoint, so a run
that is resumed makes the steps it would have made. An epoch that was interrupted is made again from its beginning.
"""

import logging
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field

import torch
from torch import Tensor

from agentlightning.algorithm.grpo.checkpoints import Checkpoint, Checkpoints, adapters_of
from agentlightning.algorithm.grpo.learner import Learner
from agentlightning.algorithm.grpo.packing import Row
from agentlightning.algorithm.grpo.policy import ADAPTERS
from agentlightning.algorithm.grpo.samples import Sample
from agentlightning.algorithm.sft.examples import FittingSettings, Split
from agentlightning.utils.json_values import JsonObject

logger = logging.getLogger(__name__)


def sft_loss(learner: Learner, samples: Sequence[Sample]) -> float:
    """The mean cross-entropy of the tokens that were chosen in the samples, in nats; no weight is changed."""
    found = [logprobs for _, logprobs in learner.evaluated([Row.of(sample, learner.model) for sample in samples])]
    return -float(torch.cat(found).mean(dtype=torch.float64))


@dataclass
class Fitting:
    """One model on its way. Where something is held out, `finish` leaves the weights of the best epoch."""

    learner: Learner
    """With the objective "likelihood", one minibatch and one epoch."""
    examples: Split
    settings: FittingSettings
    _: KW_ONLY
    checkpoints: Checkpoints | None = None
    """Where each epoch is saved; None saves nothing."""
    progress: JsonObject = field(default_factory=dict)
    """Kept in each checkpoint for the caller."""
    epoch: int = 0
    """Epochs made."""
    best_loss: float | None = None
    """The lowest held-out loss so far, that before the first epoch included."""
    _stale_epochs: int = 0
    _best: dict[str, Tensor] | None = None
    """The trained weights of the best epoch: adapters as such, for merged into 16 bits they would be lost."""

    def __post_init__(self) -> None:
        steps = self.settings.epochs * -(-len(self.examples.train) // self.settings.batch_size)
        self.learner.settings = self.learner.settings.planned(steps, self.settings.seed or 0)

    @property
    def is_over(self) -> bool:
        patience = self.settings.patience
        return self.epoch >= self.settings.epochs or (patience is not None and self._stale_epochs >= patience)

    def resume(self, latest: Checkpoint, best: Checkpoint | None) -> None:
        """Go on after an epoch that was saved; the model has the weights with which the run began."""
        began = self._trained()
        self.learner.load_state(latest.learner_state())
        self._take(_trained_in(latest))
        saved = latest.progress
        self.epoch, self.best_loss, self._stale_epochs = saved["epoch"], saved["best_loss"], saved["stale_epochs"]
        if self.best_loss is not None:  # without a checkpoint that is best, no epoch was better than none
            self._best = began if best is None else _trained_in(best)

    def run_epoch(self, is_cancelled: Callable[[], bool] = lambda: False) -> dict[str, float]:
        """Go through the examples once; the metrics. Cancelled, it ends early and counts as not made."""
        order = list(self.examples.train)
        random.Random(f"{self.settings.seed or 0}/{self.epoch}").shuffle(order)
        loss = tokens = 0.0
        size = self.settings.batch_size
        for start in range(0, len(order), size):
            if is_cancelled():
                return {}
            figures = self.learner.update(order[start : start + size])
            loss += figures["learner/loss"] * figures["learner/tokens"]
            tokens += figures["learner/tokens"]
        self.epoch += 1
        metrics = {"sft/loss": loss / tokens, "sft/tokens": tokens, "sft/epoch": float(self.epoch)}
        metrics |= {"sft/grad_norm": figures["learner/grad_norm"]} | self.judge()
        logger.info("Epoch %d: %s", self.epoch, ", ".join(f"{name} {value:.4g}" for name, value in metrics.items()))
        return metrics

    def finish(self) -> None:
        """Leave the best weights in the model."""
        if self._best is not None:
            self._take(self._best)

    def _trained(self) -> dict[str, Tensor]:
        """A copy of the trained weights, on the CPU."""
        return {name: weight.detach().to("cpu", copy=True) for name, weight in self.learner.model.trainable().items()}

    def _take(self, trained: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, weight in self.learner.model.trainable().items():
                weight.copy_(trained[name])

    def judge(self) -> dict[str, float]:
        """Take the held-out loss of the model as it is, and keep its weights if that is the lowest; the metrics."""
        is_best = False
        metrics: dict[str, float] = {}
        if self.examples.held_out:
            found = sft_loss(self.learner, self.examples.held_out)
            metrics["sft/held_out_loss"] = found
            is_best = self.best_loss is None or found < self.best_loss
            self._stale_epochs = 0 if is_best else self._stale_epochs + 1
        if is_best:
            self.best_loss = found
            self._best = self._trained()
        if self.checkpoints is not None and self.epoch:
            self._save(self.checkpoints, is_best=is_best)
        return metrics

    def _save(self, checkpoints: Checkpoints, *, is_best: bool) -> None:
        if self.epoch == 1:  # a run that goes on is beyond it
            checkpoints.set_aside()
        checkpoints.save(
            self.epoch,
            model_state=self.learner.model.state(),
            learner_state={**self.learner.state(), ADAPTERS: adapters_of(self.learner.model)},
            progress={
                **self.progress,
                "epoch": self.epoch,
                "best_loss": self.best_loss,
                "stale_epochs": self._stale_epochs,
            },
            is_best=is_best,
        )


def _trained_in(checkpoint: Checkpoint) -> dict[str, Tensor]:
    return checkpoint.learner_state()[ADAPTERS] or checkpoint.model_state()
