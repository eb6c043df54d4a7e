"""State of one backend between calls: its circuit breaker, its limits with the queue before them, its last failure.

Nothing here sends anything. The time comes from a `Clock`, so that a test can move it.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Literal, Protocol

from agentlightning.llm_proxy.backends.backend import Backend

logger = logging.getLogger(__name__)

FAILURES_TO_OPEN: Final = 5
FIRST_OPEN_SECONDS: Final = 10.0
LONGEST_OPEN_SECONDS: Final = 60.0
WINDOW_SECONDS: Final = 60.0
FAILURE_WEIGHS_SECONDS: Final = 5.0
LONGEST_ERROR: Final = 300
_NEVER: Final = float("-inf")


class Timer(Protocol):
    """A callback that runs later, unless it is cancelled."""

    def cancel(self) -> None: ...


class Clock:
    """The clock of the machine and the timers of the running loop."""

    def now(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Timer:
        return asyncio.get_running_loop().call_later(seconds, callback)


class CircuitBreaker:
    """After failures in a row, keeps calls away from a backend for a while and then lets one probe through.

    Closed, calls pass. Open, they do not, until the open time is over; the next call is then the probe (half-open). A
    response that begins closes the breaker on probation: a single failure opens it again, for twice as long, until a
    response has come to its end.
    """

    def __init__(self) -> None:
        self.state: Literal["closed", "open", "half-open"] = "closed"
        self.failures = 0
        """In a row, up to now."""
        self.opened_at = _NEVER
        """When it left the closed state."""
        self.open_until = _NEVER
        """When a probe may be sent."""
        self.changed_at = _NEVER
        """When a call last failed, or began while it was not closed."""
        self._open_seconds = FIRST_OPEN_SECONDS

    def allows(self, now: float) -> bool:
        return self.state == "closed" or (self.state == "open" and now >= self.open_until)

    def begin(self, now: float) -> None:
        """A call is being sent; one sent while the breaker is not closed is the probe."""
        if self.state != "closed":
            self.state = "half-open"
            self.changed_at = now

    def respond(self) -> None:
        """A response began."""
        if self.state != "closed":
            self.state = "closed"
            self.failures = FAILURES_TO_OPEN - 1

    def complete(self) -> None:
        """A response came to its end."""
        if self.state == "closed":
            self.failures = 0
            self._open_seconds = FIRST_OPEN_SECONDS

    def abandon(self, now: float) -> None:
        """A call ended without news of the backend; a probe has to be made again."""
        if self.state == "half-open":
            self.state = "open"
            self.open_until = now

    def fail(self, now: float) -> bool:
        """A call failed; True if that opened the breaker."""
        self.failures += 1
        self.changed_at = now
        if self.state == "open" or (self.state == "closed" and self.failures < FAILURES_TO_OPEN):
            return False
        if self.state == "closed":
            self.opened_at = now
        self.state = "open"
        self.open_until = now + self._open_seconds
        self._open_seconds = min(2 * self._open_seconds, LONGEST_OPEN_SECONDS)
        return True


class _RateLimit:
    """A limit on the amount used within any minute."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._total = 0
        self._used: deque[tuple[float, int]] = deque()

    def add(self, now: float, amount: int) -> None:
        self._used.append((now, amount))
        self._total += amount

    def wait_seconds(self, now: float) -> float:
        """Seconds until something may be used again."""
        while self._used and self._used[0][0] <= now - WINDOW_SECONDS:
            self._total -= self._used.popleft()[1]
        left = self._total
        for moment, amount in self._used:
            if left < self._limit:
                return 0.0
            left -= amount
            if left < self._limit:
                return moment + WINDOW_SECONDS - now
        return 0.0


class AdmissionQueue:
    """The limits of one backend (parallel requests, calls and tokens per minute) and the calls that wait for them.

    There is one queue for each rollout, first come first served, and the queues take turns, so that a rollout with
    many calls does not starve the others.
    """

    def __init__(
        self, clock: Clock, *, max_parallel: int | None = None, rpm: int | None = None, tpm: int | None = None
    ) -> None:
        self.in_flight = 0
        self.waiting = 0
        self._clock = clock
        self._max_parallel = float("inf") if max_parallel is None else max_parallel
        self._calls = None if rpm is None else _RateLimit(rpm)
        self._tokens = None if tpm is None else _RateLimit(tpm)
        self._held_until = _NEVER
        self._queues: dict[str, deque[asyncio.Future[bool]]] = {}
        """By rollout, in the order in which they are served next."""
        self._timer: Timer | None = None

    @property
    def is_full(self) -> bool:
        return self.in_flight >= self._max_parallel

    def wait_seconds(self, now: float) -> float:
        """Seconds for which no call may start, by the rate limits or the backend's own `retry-after`."""
        seconds = max(self._held_until - now, 0.0)
        for limit in (self._calls, self._tokens):
            if limit is not None:
                seconds = max(seconds, limit.wait_seconds(now))
        return seconds

    def try_acquire(self, now: float) -> bool:
        """Start a call at once, if the limits allow it and no other waits."""
        if self._queues or self.is_full or self.wait_seconds(now) > 0:
            return False
        self._start(now)
        return True

    async def acquire(self, rollout_id: str, deadline: float) -> bool:
        """Wait for a call's turn; False if another backend may be better now. TimeoutError at the deadline."""
        turn: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._queues.setdefault(rollout_id, deque()).append(turn)
        self.waiting += 1
        expiry = self._clock.call_later(max(deadline - self._clock.now(), 0.0), lambda: self._expire(rollout_id, turn))
        self._admit()
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._remove(rollout_id, turn)
            elif turn.exception() is None and turn.result():  # admitted at the moment of the cancellation
                self.release()
            raise
        finally:
            expiry.cancel()

    def release(self) -> None:
        self.in_flight -= 1
        if self._queues:
            self._admit()

    def hold(self, until: float) -> None:
        """Start no call before then."""
        self._held_until = max(self._held_until, until)
        self.evict()

    def use_tokens(self, count: int) -> None:
        if self._tokens is not None:
            self._tokens.add(self._clock.now(), count)

    def evict(self) -> None:
        """Have every waiting call look for another backend."""
        queues, self._queues = self._queues, {}
        for queue in queues.values():
            self.waiting -= len(queue)
            for turn in queue:
                if not turn.done():
                    turn.set_result(False)
        self._stop_timer()

    def _start(self, now: float) -> None:
        self.in_flight += 1
        if self._calls is not None:
            self._calls.add(now, 1)

    def _admit(self) -> None:
        """Start as many calls as the limits allow, and come back when only time stands in the way."""
        self._stop_timer()
        while self._queues and not self.is_full:
            now = self._clock.now()
            seconds = self.wait_seconds(now)
            if seconds > 0:
                self._timer = self._clock.call_later(seconds, self._admit)
                return
            rollout_id = next(iter(self._queues))
            queue = self._queues.pop(rollout_id)
            turn = queue.popleft()
            if queue:
                self._queues[rollout_id] = queue
            self.waiting -= 1
            if not turn.done():
                self._start(now)
                turn.set_result(True)

    def _expire(self, rollout_id: str, turn: "asyncio.Future[bool]") -> None:
        if not turn.done():
            self._remove(rollout_id, turn)
            turn.set_exception(TimeoutError())

    def _remove(self, rollout_id: str, turn: "asyncio.Future[bool]") -> None:
        queue = self._queues.get(rollout_id)
        if queue is None or turn not in queue:
            return
        queue.remove(turn)
        self.waiting -= 1
        if not queue:
            del self._queues[rollout_id]
        if not self._queues:
            self._stop_timer()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class BackendState:
    """A backend in use, with what is remembered from call to call."""

    def __init__(self, backend: Backend, clock: Clock, *, nth: int = 0) -> None:
        self.backend = backend
        self.nth = nth
        """Among backends of the same address and model."""
        self.key = f"{backend.base_url} {backend.model} {nth}"
        """The same in every process and after every change of the list, so that rollouts stay where they are."""
        self.breaker = CircuitBreaker()
        self.admission = AdmissionQueue(
            clock, max_parallel=backend.max_parallel_requests, rpm=backend.rpm, tpm=backend.tpm
        )
        self.turn = 0.0
        """Calls given to it, divided by its weight: the lowest is next among equals."""
        self.failures = 0
        self.last_error = ""
        self._clock = clock

    def load(self, now: float) -> float:
        """Calls for its weight; recent failures count as calls, since a backend that fails fast seems idle."""
        calls = self.admission.in_flight + self.admission.waiting
        if now - self.breaker.changed_at < FAILURE_WEIGHS_SECONDS:
            calls += self.breaker.failures
        return calls / self.backend.weight

    def is_free(self, now: float) -> bool:
        """Whether a call may start at once, but for the limit of parallel requests."""
        return self.breaker.allows(now) and self.admission.wait_seconds(now) == 0

    def fail(self, message: str) -> None:
        """A call failed by this backend's fault."""
        self.note_error(message)
        if self.breaker.fail(self._clock.now()):
            logger.warning("Backend %s is out of use; its last failure: %s", self, self.last_error)
            self.admission.evict()

    def note_error(self, message: str) -> None:
        self.failures += 1
        self.last_error = first_line(self.backend.redacted(message))

    def abandon(self) -> None:
        """A call ended without news of the backend."""
        self.breaker.abandon(self._clock.now())
        self.admission.release()

    def describe(self) -> dict[str, Any]:
        """The state in plain values, without secrets."""
        backend = self.backend
        return {
            "name": backend.name,
            "model": backend.model_name,
            "provider": backend.provider,
            "upstream_model": backend.model,
            "version": backend.version,
            "resources_id": backend.resources_id,
            "weight": backend.weight,
            "max_parallel_requests": backend.max_parallel_requests,
            "breaker": self.breaker.state,
            "on_hold_seconds": round(self.admission.wait_seconds(self._clock.now()), 3),
            "in_flight": self.admission.in_flight,
            "waiting": self.admission.waiting,
            "failures": self.failures,
            "last_error": self.last_error,
        }

    def __str__(self) -> str:
        return self.backend.name


def first_line(text: str) -> str:
    """The first line of a text, cut where it is long."""
    line = text.strip().partition("\n")[0]
    return line if len(line) <= LONGEST_ERROR else line[:LONGEST_ERROR] + "..."
