"""One generation: how it is to be sampled, what was sampled so far, and what came of it.

A log-probability is that of the chosen token in softmax(logits / temperature) over the whole vocabulary, before top-p
and top-k; with temperature 0 it is taken at temperature 1. The token that ended the generation is among the tokens, so
that the next turn's prompt reproduces what was sampled.

Choosing the next token of every row of a batch, each by its own wishes, in a few operations for all.

A row draws one number from its own source and takes the token where the summed probabilities pass it. So a request with
a seed gets the same tokens whichever requests share the batch with it, as long as the logits are the same.
"""

import math
import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch import Tensor

from agentlightning.errors import InvalidRequest

LEAST_TEMPERATURE: Final = 1e-6
"""Below it, logits divided by it leave the range of 32 bits; 0 stands for anything colder."""

FinishReason = Literal["stop", "length", "cancelled"]
OnToken = Callable[[int, float], Any]
"""Called with every token and its log-probability, as it is sampled, in the thread of the engine. Returning True ends
the generation with this token, as an end token would."""


@dataclass(frozen=True)
class Sampling:
    """The sampling options of one request; InvalidRequest for values that cannot be used."""

    max_new_tokens: int = 256
    temperature: float = 1.0
    """0 takes the most likely token every time."""
    top_p: float = 1.0
    """Sample among the likeliest tokens that together reach this share; 1 is all of them."""
    top_k: int = 0
    """Sample among this many of the likeliest tokens; 0 is all of them."""
    seed: int | None = None
    """The same seed, prompt and weights give the same tokens; None draws from the engine's own source."""
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end the generation, beside the model's own."""
    min_new_tokens: int = 0
    """Tokens that would end the generation are not sampled before there are this many."""
    top_logprobs: int = 0
    """How many alternatives are reported for every token."""

    def __post_init__(self) -> None:
        most, is_warm = self.max_new_tokens, LEAST_TEMPERATURE <= self.temperature < math.inf
        rules = (
            ("max_new_tokens", most >= 1, "it must be at least 1"),
            ("min_new_tokens", 0 <= self.min_new_tokens <= most, f"it must lie between 0 and max_new_tokens ({most})"),
            ("temperature", is_warm or self.temperature == 0, f"it must be 0 or at least {LEAST_TEMPERATURE:g}"),
            ("top_p", 0 < self.top_p <= 1, "it must lie above 0 and not above 1"),
            ("top_k", self.top_k >= 0, "it must be 0 (all tokens) or more"),
            ("top_logprobs", self.top_logprobs >= 0, "it must be 0 or more"),
        )
        for name, is_valid, requirement in rules:
            if not is_valid:
                raise InvalidRequest(f"{name} is {getattr(self, name)}; {requirement}.")


@dataclass
class Generation:
    """The outcome of one request."""

    token_ids: list[int]
    logprobs: list[float]
    """One for every token."""
    finish_reason: FinishReason
    weights_version: int
    """Of the weights that sampled the first token."""
    prompt_tokens: int
    top_logprobs: list[dict[int, float]] | None = None
    """For every token the likeliest ones, when the request asked for them."""
    last_weights_version: int | None = None
    """Of the weights that sampled the last token, when they changed on the way."""


class GenerationFuture(Future[Generation]):
    """A generation to come. Cancelling ends it at the next step; what was sampled until then is its result."""

    is_cancel_requested = False
    top_logprobs: list[dict[int, float]] | None = None
    """Of the tokens so far, where the request asked for them."""

    def cancel(self) -> bool:
        """Ask for an end; False when there was one already."""
        if self.done():
            return False
        self.is_cancel_requested = True
        return True


class SequenceState:
    """A sequence that waits for a slot or has one. Belongs to the thread that runs the engine's rounds."""

    def __init__(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        stop_ids: frozenset[int],
        limit: int,
        draw: Callable[[], float],
        on_token: OnToken | None = None,
    ) -> None:
        self.prompt = prompt
        self.sampling = sampling
        self.stop_ids = stop_ids
        self.limit = limit
        """New tokens at most: what the caller asked for, as far as the context has room."""
        self.draw = draw if sampling.seed is None else random.Random(sampling.seed).random
        """A number in [0, 1) for every token; of its own with a seed, so that other requests do not change it."""
        self.on_token = on_token
        self.future = GenerationFuture()
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.top_logprobs: list[dict[int, float]] | None = [] if sampling.top_logprobs else None
        self.future.top_logprobs = self.top_logprobs
        self.first_version = 0
        self.last_version = 0
        self.shared = 0
        """Tokens of the prompt that were read for another sequence."""
        self.is_of_current_weights = True
        """Whether all its keys and values are of the weights that are sampled from."""

    @property
    def cached(self) -> int:
        """Positions of its slot that are filled: all but the newest token."""
        return len(self.prompt) + len(self.token_ids) - 1

    def add(self, token_id: int, logprob: float, version: int) -> FinishReason | None:
        """Take a sampled token; the reason to end with it, if there is one."""
        if not self.token_ids:
            self.first_version = version
        self.last_version = version
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)
        is_enough = self.on_token is not None and self.on_token(token_id, logprob) is True
        if is_enough or token_id in self.stop_ids:
            return "stop"
        return "length" if len(self.token_ids) >= self.limit else None

    def finish(self, reason: FinishReason) -> None:
        """Complete the future with what was sampled."""
        generation = Generation(
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            finish_reason=reason,
            weights_version=self.first_version,
            prompt_tokens=len(self.prompt),
            top_logprobs=self.top_logprobs,
            last_weights_version=None if self.last_version == self.first_version else self.last_version,
        )
        with suppress(InvalidStateError):
            self.future.set_result(generation)

    def fail(self, error: Exception) -> None:
        with suppress(InvalidStateError):
            self.future.set_exception(error)


# ---------------------------------------------------------------------- sampler


_NEVER: Final = float("-inf")


@dataclass(frozen=True)
class SampledTokens:
    """What was chosen, row by row."""

    token_ids: list[int]
    logprobs: list[float]
    """In softmax(logits / temperature), before anything was left out of the choice."""
    top_logprobs: list[dict[int, float]] | None
    """The likeliest tokens, as many as the row that asked for most; None when none asked."""


def sample_tokens(logits: Tensor, rows: Sequence[SequenceState]) -> SampledTokens:
    """Choose from the logits [n, vocab] of n rows."""
    logits = logits.float()
    temperatures = [row.sampling.temperature or 1.0 for row in rows]
    if any(temperature != 1.0 for temperature in temperatures):
        logits = logits / torch.tensor(temperatures, device=logits.device).unsqueeze(1)
    logprobs = logits.log_softmax(-1)
    choosable = _without_early_ends(logprobs, rows)
    choosable = _truncated(choosable, rows)
    is_greedy = [row.sampling.temperature == 0 for row in rows]
    if all(is_greedy):
        token_ids = choosable.argmax(-1)
    else:
        token_ids = _drawn(choosable, rows)
        if any(is_greedy):
            greedy = torch.tensor(is_greedy, device=logits.device)
            token_ids = torch.where(greedy, choosable.argmax(-1), token_ids)
    chosen = logprobs.gather(1, token_ids.unsqueeze(1)).squeeze(1)
    ids, likelihoods = torch.stack([token_ids.double(), chosen.double()]).tolist()  # the device is waited for once
    return SampledTokens([int(number) for number in ids], likelihoods, _likeliest(logprobs, rows))


def _without_early_ends(logprobs: Tensor, rows: Sequence[SequenceState]) -> Tensor:
    """Tokens that end a row are left out while it has fewer than it was asked for."""
    early = [number for number, row in enumerate(rows) if len(row.token_ids) < row.sampling.min_new_tokens]
    if not early:
        return logprobs
    places = [(number, token) for number in early for token in rows[number].stop_ids]
    left_out = torch.tensor(places, dtype=torch.long).reshape(-1, 2).to(logprobs.device)
    choosable = logprobs.clone()
    choosable[left_out[:, 0], left_out[:, 1]] = _NEVER
    return choosable


def _truncated(choosable: Tensor, rows: Sequence[SequenceState]) -> Tensor:
    """Only the likeliest tokens stay, in the rows that ask for top-k or top-p; the very likeliest always does."""
    asking = [n for n, row in enumerate(rows) if row.sampling.top_k or row.sampling.top_p < 1]
    if not asking:
        return choosable
    device, vocabulary = choosable.device, choosable.shape[1]
    numbers = torch.tensor(asking, device=device)
    ordered, order = choosable[numbers].sort(stable=True, dim=-1, descending=True)
    ranks = torch.arange(vocabulary, device=device).unsqueeze(0)
    top_k = torch.tensor([rows[n].sampling.top_k or vocabulary for n in asking], device=device).unsqueeze(1)
    top_p = torch.tensor([rows[n].sampling.top_p for n in asking], device=device).unsqueeze(1)
    probabilities = ordered.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    is_out = ((ranks >= top_k) | ((before >= top_p) & (top_p < 1))) & (ranks > 0)
    kept = ordered.masked_fill(is_out, _NEVER)
    return choosable.index_copy(0, numbers, torch.empty_like(kept).scatter_(1, order, kept))


def _drawn(choosable: Tensor, rows: Sequence[SequenceState]) -> Tensor:
    sums = choosable.exp().cumsum(-1, dtype=torch.float64)
    # Whatever rounding does, a drawn number stays below the sum of the probabilities.
    numbers = torch.tensor([[row.draw() * (1 - 1e-12)] for row in rows], dtype=torch.float64, device=choosable.device)
    token_ids = torch.searchsorted(sums, numbers * sums[:, -1:], right=True).squeeze(1)
    return token_ids.clamp_(max=choosable.shape[1] - 1)  # beyond the end only where a row is not a number


def _likeliest(logprobs: Tensor, rows: Sequence[SequenceState]) -> list[dict[int, float]] | None:
    count = max(row.sampling.top_logprobs for row in rows)
    if not count:
        return None
    values, order = logprobs.topk(min(count, logprobs.shape[1]), -1)
    return [dict(zip(ids, row, strict=True)) for ids, row in zip(order.tolist(), values.tolist(), strict=True)]
