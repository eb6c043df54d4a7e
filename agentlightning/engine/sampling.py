"""One generation: how it is to be sampled, what was sampled so far, and what came of it.

A log-probability is that of the chosen token in softmax(logits / temperature) over the whole vocabulary, before top-p
and top-k; with temperature 0 it is taken at temperature 1. The token that ended the generation is among the tokens, so
that the next turn's prompt reproduces what was sampled.
"""

import math
import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Literal

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
