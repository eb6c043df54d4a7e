"""Published methods again, as padded tensors over all sampled answers, from the formulas of the papers.

It shares nothing with what it checks: advantages, penalties, returns, ratios and means are computed here, in torch,
over a rectangle of all rollouts in which padding is masked.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass
class Answer:
    """One answer to a prompt, with the log-probabilities of the engine that sampled it."""

    prompt: list[int]
    chosen: list[int]
    old: list[float]
    reward: float


Rollouts = list[list[Answer]]
"""By group; all groups are equally large."""


def token_logprobs(model: nn.Module, answer: Answer) -> Tensor:
    """Of each chosen token, computed one prefix after the other."""
    found = []
    for place, token in enumerate(answer.chosen):
        ids = torch.tensor([[*answer.prompt, *answer.chosen[:place]]])
        selected = torch.zeros_like(ids, dtype=torch.bool)
        selected[0, -1] = True
        logits = model.logits(ids, torch.tensor([ids.shape[1]]), selected)[0]  # type: ignore[operator]
        found.append(torch.log_softmax(logits, -1)[token])
    return torch.stack(found)


def dapo_penalty(length: int, longest: int, cache: int) -> float:
    """Equation 13 of DAPO, case by case."""
    if length <= longest - cache:
        return 0.0
    if length <= longest:
        return ((longest - cache) - length) / cache
    return -1.0


def grouped(rewards: Tensor, *, by_deviation: bool) -> Tensor:
    """[groups, size]: rewards less the mean of their group, by its deviation or not."""
    centred = rewards - rewards.mean(1, keepdim=True)
    return centred / (rewards.std(1, keepdim=True) + 1e-6) if by_deviation else centred


def per_turn(rewards: list[list[float]], discount: float) -> list[list[float]]:
    """Of one group, rollouts of several turns: what follows from each turn, compared with the others that got there."""
    most = max(map(len, rewards))
    table = torch.full((len(rewards), most), torch.nan, dtype=torch.float64)
    for row, own in enumerate(rewards):
        for turn in range(len(own)):
            table[row, turn] = sum(discount ** (later - turn) * own[later] for later in range(turn, len(own)))
    found = torch.zeros_like(table)
    for turn in range(most):
        there = ~table[:, turn].isnan()
        column = table[there, turn]
        if len(column) > 1 and column.max() > column.min():
            found[there, turn] = (column - column.mean()) / (column.std() + 1e-6)
    return [found[row, : len(own)].tolist() for row, own in enumerate(rewards)]


def loss(model: nn.Module, rollouts: Rollouts, method: str, *, longest: int = 1, cache: int = 1) -> Tensor:
    """What the method minimises, over every answer that was sampled."""
    answers = [answer for group in rollouts for answer in group]
    width = max(len(answer.chosen) for answer in answers)
    shape = len(answers), width
    new, old = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
    mask = torch.zeros(shape, dtype=torch.float64)
    for row, answer in enumerate(answers):
        length = len(answer.chosen)
        new[row, :length] = token_logprobs(model, answer)
        old[row, :length] = torch.tensor(answer.old, dtype=torch.float64)
        mask[row, :length] = 1
    rewards = torch.tensor([[answer.reward for answer in group] for group in rollouts], dtype=torch.float64)
    if method == "dapo":
        penalties = [[dapo_penalty(len(answer.chosen), longest, cache) for answer in group] for group in rollouts]
        rewards = rewards + torch.tensor(penalties, dtype=torch.float64)
    gains = grouped(rewards, by_deviation=method != "dr_grpo").flatten()[:, None]
    if method == "gspo":
        ratio = torch.exp(((new - old) * mask).sum(1) / mask.sum(1))
        clipped = ratio.clamp(1 - 3e-4, 1 + 4e-4)
        return -torch.minimum(ratio * gains[:, 0], clipped * gains[:, 0]).mean()
    ratio = torch.exp(new - old)
    if method == "cispo":
        return -(ratio.clamp(max=5).detach() * gains * new * mask).sum() / mask.sum()
    clipped = ratio.clamp(0.8, 1.28 if method != "dr_grpo" else 1.2)
    each = -torch.minimum(ratio * gains, clipped * gains) * mask
    return each.sum() / (len(answers) * longest if method == "dr_grpo" else mask.sum())
