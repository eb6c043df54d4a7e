"""How far a training has come: counts, rewards, tokens and errors.

Pure bookkeeping, without a clock and without a store. Every notice is counted. Rewards, tokens and errors stand in
spans and attempts, so the bookkeeping queues the rollouts worth reading, the newest if there are too many. Where not
all of them could be read, the figures are estimates and say so.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

from agentlightning.store.lifecycle import FINAL_ROLLOUT_STATUSES
from agentlightning.types import Notice, RolloutStatus

UNREAD_ROLLOUTS: Final = 256
"""How many finished rollouts wait to be read; when more finish, the older ones are not read at all."""

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


@dataclass(frozen=True)
class Sample:
    """Result of one finished rollout, from its spans."""

    rollout_id: str
    status: str
    reward: float | None
    """None if there is none, or none that is a finite number."""
    tokens: int


@dataclass(frozen=True)
class AttemptFailure:
    """What went wrong with one attempt, in a line."""

    rollout_id: str
    attempt_id: str
    message: str


@dataclass(frozen=True)
class Figures:
    """Where a training stands at one moment."""

    seconds: float
    """Since it began."""
    rollouts: Mapping[str, int]
    """By status, in the order of a rollout's life; those that none has are left out."""
    finished: int
    total: int
    reward_mean: float | None
    reward_last: float | None
    tokens: int
    tokens_per_second: float
    errors: int
    """Attempts that failed, including those that were tried again."""
    eta_seconds: float | None
    """Until what is enqueued will be finished; None if unknown."""
    is_estimate: bool
    """Whether rewards and tokens are of some of the finished rollouts, not of all."""
    curve: Sequence[float] = ()
    """Means of equally many rewards each, from the first to the last."""
    failures: Sequence[AttemptFailure] = ()
    """The last few errors that were read."""


class Curve:
    """A bounded number of means that covers any number of values: neighbours are merged when there are many."""

    def __init__(self) -> None:
        self._means: list[float] = []
        self._block: list[float] = []
        self._block_size = 1

    def add(self, value: float) -> None:
        self._block.append(value)
        if len(self._block) == self._block_size:
            self._means.append(fmean(self._block))
            self._block = []
        # The most points of a curve; it has at least half of them once it is long enough.
        if len(self._means) == 32:
            self._means = [fmean(pair) for pair in zip(self._means[::2], self._means[1::2], strict=True)]
            self._block_size *= 2

    @property
    def points(self) -> list[float]:
        return [*self._means, fmean(self._block)] if self._block else list(self._means)


class RolloutProgress:
    """Counts what happens in a training; all moments are seconds of one clock."""

    def __init__(self, began: float) -> None:
        self.notices = 0
        """How many were counted."""
        self.unread: deque[tuple[str, str]] = deque(maxlen=UNREAD_ROLLOUTS)
        """Id and status of finished rollouts that are to be read."""
        self.unread_failures: deque[str] = deque(maxlen=16)
        """Ids of rollouts of which an attempt failed."""
        self.failures: deque[AttemptFailure] = deque(maxlen=3)
        self._began = began
        self._counts: dict[str, int] = dict.fromkeys(STATUS_ORDER, 0)
        self._open_statuses: dict[str, str] = {}
        """Status of every rollout that is not finished."""
        self._errors = 0
        self._samples = 0
        self._tokens = 0
        self._reward_sum = 0.0
        self._reward_count = 0
        self._reward_last: float | None = None
        self._curve = Curve()

    def count(self, notice: Notice) -> None:
        """Count a rollout's new status. One that ends without having been counted before belongs to somebody else."""
        rollout_id, status = notice.rollout_id, notice.status
        self.notices += 1
        if rollout_id is None or status is None or status not in self._counts:
            return
        before = self._open_statuses.pop(rollout_id, None)
        if status not in FINAL_ROLLOUT_STATUSES:
            self._open_statuses[rollout_id] = status
        elif before is None:
            return
        else:
            self.unread.append((rollout_id, status))
        if before is not None:
            self._counts[before] -= 1
        self._counts[status] += 1
        if status in ("failed", "requeuing"):
            self._errors += 1
            self.unread_failures.append(rollout_id)

    def recount(self, open_statuses: Mapping[str, str], finished: Mapping[str, int]) -> None:
        """Begin anew from what the store holds: the rollouts that are not finished, and how many of ours are."""
        self._open_statuses = dict(open_statuses)
        self._counts = {status: finished.get(status, 0) for status in STATUS_ORDER}
        for status in self._open_statuses.values():
            self._counts[status] += 1

    def add_sample(self, sample: Sample) -> None:
        self._samples += 1
        self._tokens += sample.tokens
        if sample.reward is not None:
            self._reward_sum += sample.reward
            self._reward_count += 1
            self._reward_last = sample.reward
            self._curve.add(sample.reward)

    def figures(self, now: float) -> Figures:
        """Where the training stands."""
        finished = sum(self._counts[status] for status in FINAL_ROLLOUT_STATUSES)
        remaining = len(self._open_statuses)
        rate = finished / (now - self._began) if now > self._began else 0.0
        tokens = self._tokens / self._samples if self._samples else 0.0
        return Figures(
            seconds=round(now - self._began, 3),
            rollouts={status: count for status, count in self._counts.items() if count},
            finished=finished,
            total=finished + remaining,
            reward_mean=self._reward_sum / self._reward_count if self._reward_count else None,
            reward_last=self._reward_last,
            tokens=round(tokens * finished),
            tokens_per_second=round(tokens * rate, 1),
            errors=self._errors,
            eta_seconds=round(remaining / rate, 1) if rate and remaining else None,
            is_estimate=self._samples + len(self.unread) < finished,
            curve=tuple(self._curve.points),
            failures=tuple(self.failures),
        )
