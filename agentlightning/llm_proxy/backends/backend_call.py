"""One call to the backends: what it wants, tries made, retries and time left, the error to report.

Also the rules over statuses and headers that decide whether a call is tried again, and when.
"""

import hashlib
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from agentlightning.llm_proxy.backends.backend import Backend, BackendUnavailable, DeadlineExceeded, Try
from agentlightning.llm_proxy.backends.backend_state import BackendState, first_line
from agentlightning.utils.retries import retry_after_seconds

FIRST_BACKOFF_SECONDS: Final = 0.5
LONGEST_BACKOFF_SECONDS: Final = 8.0
_SERVER_ERRORS: Final = 500
_HASH_BYTES: Final = 8
_HASHES: Final = 1 << (8 * _HASH_BYTES)


class PreparedRequest(NamedTuple):
    """A request as it goes to one backend."""

    url: str
    body: bytes
    headers: Mapping[str, str] = {}
    """On top of the backend's own, which win."""


class TryAgain(Exception):
    """A try failed, and another follows; raised for the retry loop, never to a caller."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.seconds = seconds


class BackendCall(ABC):
    """One call on its way to a response."""

    def __init__(self, model: str = "", rollout_id: str = "") -> None:
        self.model = model
        self.rollout_id = rollout_id
        """For fair queueing and stickiness; empty for calls of no rollout."""
        self.resources_id: str | None = None
        """Version of the resources the call is pinned to; None takes the latest."""
        self.deadline: float | None = None
        """Moment on the pool's clock by which the response must have begun; None: the pool's default."""
        self.tries: list[Try] = []
        self.waited_seconds = 0.0
        """Time spent in queues of backends."""

    @abstractmethod
    def prepare(self, backend: Backend) -> PreparedRequest:
        """The request for the backend that was chosen, once per try; DialectNotServed to be given another one."""

    def begin(self, candidates: Sequence[BackendState], *, ends_at: float, num_retries: int) -> None:
        """Begin to look for a backend that answers; again, where the answer was of no use."""
        self.candidates = candidates
        """The backends that may serve it."""
        self.ends_at = ends_at
        self.tried: list[BackendState] = []
        """Backends that failed it."""
        self.unfit: list[BackendState] = []
        """Backends that do not speak its dialect."""
        self._retries_left = num_retries
        self._backoffs = 0
        self._free_retries_used: set[str] = set()

    @property
    def fit(self) -> list[BackendState]:
        return [state for state in self.candidates if state not in self.unfit]

    def choose(self, now: float) -> BackendState | None:
        """The backend for the next try; None if trying any would be in vain right now.

        One that was not tried yet comes before one that was, one at its rate limit after all that are not, and one
        that is out of use only when all are. The calls of one rollout go to one backend, the first in a ranking by the
        rollout's id and the weights (rendezvous hashing), so that its prefixes are in the cache there; when a backend
        comes or goes only its own rollouts move. Calls of no rollout go to the least busy backend, in turns.
        """
        free = [state for state in self.fit if state.is_free(now)]
        if free:
            candidates = [state for state in free if state not in self.tried] or free
            if self.rollout_id:
                return max(candidates, key=lambda state: _rank(self.rollout_id, state))
            best = min(candidates, key=lambda state: (state.admission.is_full, state.load(now), state.turn))
            best.turn += 1.0 / best.backend.weight
            return best
        held = [state for state in self.fit if state.breaker.allows(now)]
        if held:
            return min(held, key=lambda state: state.admission.wait_seconds(now))
        # For a second after a failure a model whose backends are all out of use is not tried again.
        rested = [state for state in self.fit if now - state.breaker.changed_at >= 1.0]
        return min(rested, key=lambda state: state.breaker.opened_at, default=None)

    def note(self, state: BackendState, outcome: str) -> None:
        self.tries.append(Try(state.backend.name, first_line(state.backend.redacted(outcome))))

    def use_free_retry(self, kind: str, now: float) -> bool:
        """Use the one free retry for each kind of failure after which no backend can have begun to work on the call."""
        is_harmless = kind == "stale" or (kind == "refused" and self._has_other(now))
        if kind in self._free_retries_used or not is_harmless:
            return False
        self._free_retries_used.add(kind)
        return True

    def next_pause(self, now: float) -> float | None:
        """Seconds before the next try, which this counts; None if there shall be no other."""
        if self._retries_left == 0:
            return None
        seconds = 0.0
        if not self._has_other(now):
            held_seconds = min((state.admission.wait_seconds(now) for state in self.fit), default=0.0)
            if held_seconds == 0:  # else the backend's queue is where to wait
                longest = min(FIRST_BACKOFF_SECONDS * 2.0 ** min(self._backoffs, 16), LONGEST_BACKOFF_SECONDS)
                seconds = longest * (0.5 + 0.5 * random.random())
                self._backoffs += 1
            if now + max(seconds, held_seconds) >= self.ends_at:
                return None
        self._retries_left -= 1
        return seconds

    def _has_other(self, now: float) -> bool:
        """Whether a backend that was not tried yet could take the call at once."""
        return any(state not in self.tried and state.is_free(now) for state in self.fit)

    def closing(self) -> BackendUnavailable:
        return BackendUnavailable("The proxy is closing and calls no backend any more.", tries=self.tries)

    def deadline_exceeded(self, where: str) -> DeadlineExceeded:
        return DeadlineExceeded(f"The deadline of the call passed {where}{self._after_tries}.", tries=self.tries)

    def rate_limited(self, state: BackendState, seconds: float) -> BackendUnavailable:
        """Every backend is at a rate limit for longer than the call has time."""
        message = (
            f"No backend of model '{self.model}' may be called before the call's deadline: '{state}' is at its "
            f"rate limit for another {seconds:.1f} s{self._after_tries}."
        )
        return BackendUnavailable(message, tries=self.tries, retry_after_seconds=seconds)

    def unavailable(self, now: float) -> BackendUnavailable:
        """No backend answered, and no other try shall be made."""
        reasons = [f"{one.backend} {one.outcome}" for one in self.tries]
        tried = {one.backend for one in self.tries}
        for state in self.candidates:
            name, breaker = state.backend.name, state.breaker
            if name in tried:
                continue
            if state in self.unfit:
                reasons.append(f"{name} does not speak the dialect of the call")
            elif breaker.state != "closed":
                seconds = max(breaker.open_until - now, 0.0)
                reasons.append(
                    f"{name} is out of use for another {seconds:.1f} s; its last failure: {state.last_error}"
                )
            else:
                reasons.append(f"{name} was not called")
        opens_in = min((max(state.breaker.open_until - now, 0.0) for state in self.candidates), default=0.0)
        return BackendUnavailable(
            f"No backend of model '{self.model}' answered: {'; '.join(reasons)}.",
            tries=self.tries,
            retry_after_seconds=opens_in or None,
        )

    @property
    def _after_tries(self) -> str:
        tries = "; ".join(f"{one.backend} {one.outcome}" for one in self.tries)
        return f" after {tries}" if tries else ""


def _rank(rollout_id: str, state: BackendState) -> float:
    """A backend's rank for a rollout: the highest wins, and wins as often as its weight says."""
    text = f"{rollout_id}\0{state.key}".encode("utf-8", "surrogatepass")
    digest = hashlib.blake2b(text, digest_size=_HASH_BYTES).digest()
    return -state.backend.weight / math.log((int.from_bytes(digest, "big") + 1) / (_HASHES + 1))


def is_retryable(status: int, headers: Mapping[str, str]) -> bool:
    """Whether the same call may succeed a little later."""
    wish = headers.get("x-should-retry")
    if wish in ("true", "false"):
        return wish == "true" and status >= 400
    return status in {408, 409, 429} or status >= _SERVER_ERRORS


def requested_hold_seconds(status: int, headers: Mapping[str, str]) -> float:
    """How long an overloaded backend wants no calls; 0 if it does not say."""
    if status not in {429, 503, 529}:
        return 0.0
    # No backend is left alone for more than an hour, whatever its `retry-after` says.
    return min(retry_after_seconds(headers) or 0.0, 3600.0)
