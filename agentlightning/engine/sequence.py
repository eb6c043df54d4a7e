"""One request on its way through the engine: its prompt, what was sampled so far, and the caller who waits for it."""

import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any

from agentlightning.engine.generation import FinishReason, Generation
from agentlightning.engine.sampling import Sampling

__all__ = ["GenerationFuture", "OnToken", "Running"]

OnToken = Callable[[int, float], Any]
"""Called with every token and its log-probability, as it is sampled, in the thread of the engine. Returning True ends
the generation with this token, as an end token would."""


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


class Running:
    """A sequence that waits for a slot or has one. Belongs to the thread that runs the engine's rounds."""

    __slots__ = (
        "draw",
        "first_version",
        "future",
        "is_of_current_weights",
        "last_version",
        "limit",
        "logprobs",
        "on_token",
        "prompt",
        "sampling",
        "shared",
        "stop_ids",
        "token_ids",
        "top_logprobs",
    )

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
        """Take the token that was sampled; why the sequence ends with it, if it does."""
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
        """Hand what was sampled to the caller."""
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
        """Tell the caller that there will be no result."""
        with suppress(InvalidStateError):
            self.future.set_exception(error)
