"""How far a training has come: counts, rewards, tokens and errors, from what the console hears and reads.

Pure bookkeeping, without a clock and without a store. Every notice is counted, in constant time; rewards, tokens and
errors stand in spans and attempts, so the bookkeeping only names the rollouts worth reading, the newest if there
are too many, and is told what was found. Where not all of them could be read, its figures are estimates and say so.
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeGuard

from agentlightning.semconv import AGL_EXCEPTION
from agentlightning.store.lifecycle import FINAL_ROLLOUT_STATUSES
from agentlightning.types import Attempt, Notice, RolloutStatus, Span
from agentlightning.types.rewards import final_reward_of

__all__ = [
    "STATUS_ORDER",
    "Curve",
    "Failure",
    "Figures",
    "Finished",
    "Progress",
    "Sample",
    "last_failed",
    "noted_failure",
    "recorded_failure",
    "sample_of",
]

CURVE_POINTS: Final = 32
"""The most points of a curve; it has at least half of them once it is long enough."""
RECENT_SAMPLES: Final = 200
"""From how many samples the tokens of a rollout are estimated."""
RECENT_MARKS: Final = 60
"""Over how many refreshes a rate is taken."""
ENOUGH_FINISHED: Final = 10
"""How many rollouts must have ended meanwhile; with fewer, the rate is that of the whole training."""
KEPT_FAILURES: Final = 3
UNREAD_ROLLOUTS: Final = 256
"""How many finished rollouts wait to be read; when more finish, the older ones are not read at all."""
UNREAD_FAILURES: Final = 16

STATUS_ORDER: Final[tuple[RolloutStatus, ...]] = (
    "queuing",
    "requeuing",
    "preparing",
    "running",
    "succeeded",
    "failed",
    "cancelled",
)
"""A rollout's life, in the order in which it is shown."""

_ERROR_STATUSES: Final = frozenset({"failed", "requeuing"})
_TOKEN_ATTRIBUTES: Final = ("gen_ai.usage.prompt_tokens", "gen_ai.usage.completion_tokens")
_ENDED_BADLY: Final = ("failed", "timeout", "unresponsive")


class Finished(NamedTuple):
    """A rollout that has ended, and how."""

    rollout_id: str
    status: str


@dataclass(frozen=True)
class Sample:
    """What the spans of one finished rollout say."""

    rollout_id: str
    status: str
    reward: float | None
    """None if there is none, or none that is a finite number."""
    tokens: int


@dataclass(frozen=True)
class Failure:
    """What went wrong with one attempt, in a line."""

    rollout_id: str
    attempt_id: str | None
    message: str


@dataclass(frozen=True)
class Figures:
    """Where a training stands at one moment."""

    elapsed_seconds: float
    rollouts: Mapping[str, int]
    """By status, in the order of a rollout's life; those that none has are left out."""
    finished: int
    total: int
    reward_mean: float | None
    reward_last: float | None
    rewards: int
    """How many rewards were read."""
    curve: Sequence[float]
    """Means of equally many rewards each, from the first to the last."""
    tokens: int
    tokens_per_second: float
    errors: int
    """Attempts that failed, including those that were tried again."""
    failures: Sequence[Failure]
    """The last few errors that were read."""
    eta_seconds: float | None
    """Until what is enqueued will be finished; None if that cannot be said."""
    is_estimate: bool
    """Whether rewards and tokens are of some of the finished rollouts, not of all."""


class Curve:
    """A row of means that covers everything it was given, however much: neighbours are merged when there are many."""

    def __init__(self, most_points: int = CURVE_POINTS) -> None:
        self._most_points = most_points
        self._sums: list[float] = []
        self._block = 1
        """How many values a point stands for."""
        self._filled = 0
        """How many values are in the last point."""

    def add(self, value: float) -> None:
        if not self._sums or self._filled == self._block:
            if len(self._sums) == self._most_points:
                self._sums = [a + b for a, b in zip(self._sums[::2], self._sums[1::2], strict=True)]
                self._block *= 2
            self._sums.append(0.0)
            self._filled = 0
        self._sums[-1] += value
        self._filled += 1

    @property
    def points(self) -> list[float]:
        if not self._sums:
            return []
        return [total / self._block for total in self._sums[:-1]] + [self._sums[-1] / self._filled]


class Progress:
    """Counts what happens in a training."""

    def __init__(self, began: float) -> None:
        """Begin at a moment; all moments are seconds of one clock, whichever it is."""
        self.notices = 0
        """How many were counted."""
        self._began = began
        self._counts: dict[str, int] = dict.fromkeys(STATUS_ORDER, 0)
        self._open_statuses: dict[str, str] = {}
        """Status of every rollout that is not finished."""
        self._errors = 0
        self._unread: deque[tuple[str, str]] = deque(maxlen=UNREAD_ROLLOUTS)
        self._unread_failures: deque[str] = deque(maxlen=UNREAD_FAILURES)
        self._samples = 0
        self._reward_sum = 0.0
        self._reward_count = 0
        self._reward_last: float | None = None
        self._curve = Curve()
        self._tokens = 0
        self._recent_tokens: deque[int] = deque(maxlen=RECENT_SAMPLES)
        self._failures: deque[Failure] = deque(maxlen=KEPT_FAILURES)
        self._marks: deque[tuple[float, int]] = deque([(began, 0)], maxlen=RECENT_MARKS)

    # ------------------------------------------------------------------ what is heard

    def count(self, notice: Notice) -> None:
        """Take note of a rollout's new status. One that ends without having been heard of before is none of ours."""
        rollout_id, status = notice.rollout_id, notice.status
        self.notices += 1
        counts, open_statuses = self._counts, self._open_statuses
        if rollout_id is None or status is None or status not in counts:
            return
        if status in FINAL_ROLLOUT_STATUSES:
            before = open_statuses.pop(rollout_id, None)
            if before is None:
                return
            self._unread.append((rollout_id, status))
        else:
            before = open_statuses.get(rollout_id)
            open_statuses[rollout_id] = status
        if before is not None:
            counts[before] -= 1
        counts[status] += 1
        if status in _ERROR_STATUSES:
            self._errors += 1
            self._unread_failures.append(rollout_id)

    def recount(self, open_statuses: Mapping[str, str], finished: Mapping[str, int]) -> None:
        """Begin anew from what the store says: the rollouts that are not finished, and how many of ours are."""
        self._open_statuses = dict(open_statuses)
        self._counts = {status: finished.get(status, 0) for status in STATUS_ORDER}
        for status in self._open_statuses.values():
            self._counts[status] += 1

    # ------------------------------------------------------------------ what is read

    def next_rollout(self) -> Finished | None:
        """A finished rollout nobody has read, the oldest one; each is named once. None if there is none."""
        return Finished(*self._unread.popleft()) if self._unread else None

    def next_failure(self) -> str | None:
        """A rollout of which an attempt failed, in the same way."""
        return self._unread_failures.popleft() if self._unread_failures else None

    def add_sample(self, sample: Sample) -> None:
        self._samples += 1
        self._tokens += sample.tokens
        self._recent_tokens.append(sample.tokens)
        if sample.reward is not None:
            self._reward_sum += sample.reward
            self._reward_count += 1
            self._reward_last = sample.reward
            self._curve.add(sample.reward)

    def add_failure(self, failure: Failure) -> None:
        self._failures.append(failure)

    def mark(self, now: float) -> None:
        """Remember how far it is, for the rates."""
        self._marks.append((now, self._finished))

    # ------------------------------------------------------------------ what is known

    @property
    def _finished(self) -> int:
        return sum(self._counts[status] for status in FINAL_ROLLOUT_STATUSES)

    def _rate(self, now: float) -> float:
        """Rollouts finished a second, of late if there are enough of them."""
        since, before = self._marks[0]
        if self._finished - before < ENOUGH_FINISHED:
            since, before = self._began, 0
        return (self._finished - before) / (now - since) if now > since else 0.0

    def figures(self, now: float) -> Figures:
        """Where the training stands."""
        finished, rate, remaining = self._finished, self._rate(now), len(self._open_statuses)
        per_rollout = sum(self._recent_tokens) / len(self._recent_tokens) if self._recent_tokens else 0.0
        tokens = self._tokens * finished / self._samples if self._samples else 0.0
        return Figures(
            elapsed_seconds=now - self._began,
            rollouts={status: count for status, count in self._counts.items() if count},
            finished=finished,
            total=finished + remaining,
            reward_mean=self._reward_sum / self._reward_count if self._reward_count else None,
            reward_last=self._reward_last,
            rewards=self._reward_count,
            curve=tuple(self._curve.points),
            tokens=round(tokens),
            tokens_per_second=rate * per_rollout,
            errors=self._errors,
            failures=tuple(self._failures),
            eta_seconds=remaining / rate if rate and remaining else None,
            is_estimate=self._samples + len(self._unread) < finished,
        )


def sample_of(finished: Finished, spans: Iterable[Span]) -> Sample:
    """Reward and tokens of a rollout, from the spans of its newest attempt."""
    read = list(spans)
    reward = final_reward_of(read)
    counts = [value for span in read for name in _TOKEN_ATTRIBUTES if _is_number(value := span.attributes.get(name))]
    return Sample(finished.rollout_id, finished.status, reward if _is_number(reward) else None, sum(map(int, counts)))


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, (int, float)) and math.isfinite(value)


def last_failed(attempts: Sequence[Attempt]) -> Attempt | None:
    """The newest attempt that failed; None if none did."""
    return next((attempt for attempt in reversed(attempts) if attempt.status in _ENDED_BADLY), None)


def noted_failure(attempt: Attempt) -> Failure | None:
    """What went wrong, as runners note it on the attempt; None if they did not."""
    noted = (attempt.metadata or {}).get("error")
    if not isinstance(noted, Mapping):
        return None
    return Failure(attempt.rollout_id, attempt.attempt_id, _one_line(noted.get("type"), noted.get("message")))


def recorded_failure(attempt: Attempt, spans: Iterable[Span]) -> Failure:
    """What went wrong, by the last exception among the spans, or else as far as the status tells."""
    recorded = [span.attributes for span in spans if span.name == AGL_EXCEPTION]
    message = f"the attempt ended as '{attempt.status}'"
    if recorded:
        message = _one_line(recorded[-1].get("exception.type"), recorded[-1].get("exception.message"))
    return Failure(attempt.rollout_id, attempt.attempt_id, message)


def _one_line(kind: object, message: object) -> str:
    """`ValueError: the first line`, without anything a terminal could take for a command."""
    first = next(iter(str(message or "").strip().splitlines()), "")
    text = ": ".join(part for part in (str(kind or ""), first) if part)
    return "".join(character if character.isprintable() else " " for character in text)
