"""How the weights in the package were made: next-token prediction of the assistant's words in the curriculum.

The same seed, settings, machine and version of torch with one thread give the same weights, bit for bit; the script
behind `make tiny-model` prints their digest.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from agentlightning.engine.tiny.codec import TinyChatCodec
from agentlightning.engine.tiny.curriculum import CALCULATOR, conversation
from agentlightning.engine.tiny.model import TinyModel, TinyShape
from agentlightning.engine.tiny.tokenizer import ASSISTANT, END, PAD

__all__ = ["Batch", "Pretraining", "batch_of", "pretrain"]

BETAS: Final = (0.9, 0.98)
WEIGHT_DECAY: Final = 0.01
LARGEST_GRADIENT: Final = 1.0


@dataclass(frozen=True)
class Pretraining:
    """The settings with which the weights in the package were made."""

    seed: int = 7
    steps: int = 4_000
    batch_size: int = 64
    learning_rate: float = 3e-3
    warm_up_steps: int = 30
    least_rate: float = 0.05
    """The rate falls in a straight line to this share of itself."""

    def rate_at(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        rising = min(1.0, (step + 1) / self.warm_up_steps)
        falling = max(self.least_rate, 1 - step / self.steps)
        return self.learning_rate * rising * falling


@dataclass(frozen=True)
class Batch:
    """Conversations as rows of tokens, padded on the right."""

    ids: Tensor
    lengths: Tensor
    spoken: Tensor
    """Marks what the assistant wrote, its end tokens included."""


def pretrain(
    settings: Pretraining | None = None,
    shape: TinyShape | None = None,
    *,
    report: Callable[[int, float], None] = lambda step, loss: None,
) -> TinyModel:
    """A model trained from random weights; `report` is told the loss after every step."""
    settings = settings or Pretraining()
    rng = Random(settings.seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        model = TinyModel(shape)
    optimiser = torch.optim.AdamW(model.parameters(), betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True)
    for step in range(settings.steps):
        optimiser.param_groups[0]["lr"] = settings.rate_at(step)
        loss = _loss(model, batch_of(settings.batch_size, rng))
        optimiser.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), LARGEST_GRADIENT)
        optimiser.step()
        report(step, loss.item())
    return model


def batch_of(size: int, rng: Random) -> Batch:
    """Random conversations of the curriculum."""
    codec = TinyChatCodec()
    rows = [codec.render(conversation(rng), [CALCULATOR], add_generation_prompt=False) for _ in range(size)]
    longest = max(map(len, rows))
    return Batch(
        ids=torch.tensor([row + [PAD] * (longest - len(row)) for row in rows]),
        lengths=torch.tensor([len(row) for row in rows]),
        spoken=torch.tensor([_spoken(row) + [False] * (longest - len(row)) for row in rows]),
    )


def _loss(model: TinyModel, batch: Batch) -> Tensor:
    selected = batch.spoken[:, 1:]
    logits = model.logits(batch.ids[:, :-1], batch.lengths - 1, selected)
    return functional.cross_entropy(logits, batch.ids[:, 1:][selected])


def _spoken(row: Sequence[int]) -> list[bool]:
    marks, is_speaking = [], False
    for token in row:
        marks.append(is_speaking)
        is_speaking = token == ASSISTANT or (is_speaking and token != END)
    return marks
