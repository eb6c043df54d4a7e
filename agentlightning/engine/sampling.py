"""How one generation is to be sampled: the caller's wishes, checked before they reach the engine."""

import math
from dataclasses import dataclass
from typing import Final

from typing_extensions import Self

from agentlightning.errors import InvalidRequest

__all__ = ["Sampling"]

LEAST_TEMPERATURE: Final = 1e-6
"""Below it, logits that are divided by it leave the range of 32 bits; who wants it colder wants 0."""


@dataclass(frozen=True)
class Sampling:
    """The choices of one request; the defaults sample from the model as it is."""

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

    def checked(self) -> Self:
        """Itself, when every value can be used; InvalidRequest says in words which cannot."""
        if self.max_new_tokens < 1:
            raise InvalidRequest(f"max_new_tokens is {self.max_new_tokens}; at least 1 is needed.")
        if not 0 <= self.min_new_tokens <= self.max_new_tokens:
            raise InvalidRequest(
                f"min_new_tokens is {self.min_new_tokens}; it must lie between 0 and max_new_tokens "
                f"({self.max_new_tokens})."
            )
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise InvalidRequest(f"temperature is {self.temperature}; it must be a number that is not negative.")
        if 0 < self.temperature < LEAST_TEMPERATURE:
            raise InvalidRequest(f"temperature is {self.temperature}; it must be 0 or at least {LEAST_TEMPERATURE:g}.")
        if not 0 < self.top_p <= 1:
            raise InvalidRequest(f"top_p is {self.top_p}; it must lie above 0 and not above 1.")
        if self.top_k < 0:
            raise InvalidRequest(f"top_k is {self.top_k}; it must be 0 (all tokens) or more.")
        if self.top_logprobs < 0:
            raise InvalidRequest(f"top_logprobs is {self.top_logprobs}; it must be 0 or more.")
        return self
