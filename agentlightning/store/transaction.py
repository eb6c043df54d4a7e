"""The seam a back end implements: a few verbs of storage, valid within one transaction.

`store/behaviour` says what each operation does in these verbs and knows nothing of dictionaries or SQL. A back end
decides where and how transactions run. The rules between the two, which `docs/design/transactions.md` gives in full:

- Records are never changed in place: a behaviour reads one, makes a changed copy, and puts that. Whoever keeps a record
  may keep it by reference.
- A behaviour sees its own writes. It makes its selections before them, so a back end may hold writes back.
- When a behaviour raises, nothing it wrote remains. It may be run again, in a new transaction.
- With several writers, a rollout and all that hangs on it changes under one lock, from the first look at it on.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from agentlightning.store.notices import NoticeFields
from agentlightning.store.selection import Selection
from agentlightning.types import (
    Attempt,
    MetricPoint,
    NoticeKind,
    PaginatedResult,
    ResourcesUpdate,
    Rollout,
    Run,
    Span,
    Worker,
)


@dataclass(frozen=True, slots=True)
class Setting:
    """A value of the whole store."""

    name: str
    value: str


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """How large a span may be, how much all spans of one attempt, and how long a lease lasts at least."""

    span_bytes: int
    attempt_bytes: int
    attempt_spans: int
    lease_seconds: float


@dataclass(frozen=True, slots=True)
class OpenSpans:
    """The spans of a rollout that had begun and not ended when they were put; some may have ended since."""

    rollout_id: str
    spans: Sequence[Span]


Record = Rollout | Attempt | OpenSpans | ResourcesUpdate | Worker | Run | MetricPoint | Setting
KeyedT = TypeVar("KeyedT", bound=Rollout | OpenSpans | ResourcesUpdate | Worker | Run | Setting)
SelectedT = TypeVar("SelectedT", bound=Rollout | Span | ResourcesUpdate | Worker | Run | MetricPoint)


class Transaction(ABC):
    """Reads and writes that take effect together or not at all."""

    limits: StoreLimits
    cursor = 0
    """Number of the newest committed notice, where the transaction gives notices their cursors."""
    notices: list[NoticeFields]
    """Not committed yet."""

    # records of every kind

    @abstractmethod
    def get(self, kind: type[KeyedT], key: str) -> KeyedT | None:
        """The record of that id; open spans may be gone when their attempt is over."""

    @abstractmethod
    def put(self, record: Record) -> None:
        """Insert or replace. An attempt replaces that of its number, or is appended if its number is the next one; a
        metric point is always appended; a rollout whose status is none of the queue leaves the queue."""

    @abstractmethod
    def select(
        self, kind: type[SelectedT], selection: Selection, of: str | Attempt | None = None
    ) -> PaginatedResult[SelectedT]:
        """Records in the order of their insertion unless sorted.

        Args:
            of: For spans the id of their rollout, or their attempt; for metric points the id of their run.
        """

    # attempts and spans

    @abstractmethod
    def get_attempts(self, rollout_id: str) -> Sequence[Attempt]:
        """All attempts of a rollout, the first one first; empty if there is no such rollout."""

    @abstractmethod
    def append_spans(self, attempt: Attempt, spans: Sequence[Span], now: float) -> Attempt:
        """Keep copies of spans of an attempt, all or, beyond its quota, none. They are a sign of life: the attempt,
        with `last_heartbeat_time` set to `now`, is put and returned."""

    @abstractmethod
    def has_span(self, attempt: Attempt, span_id: str) -> bool: ...

    @abstractmethod
    def get_last_sequence(self, rollout_id: str) -> int:
        """The highest sequence id seen or given for a rollout, known or not; 0 at first."""

    @abstractmethod
    def put_last_sequence(self, rollout_id: str, sequence_id: int) -> None:
        """Remember a sequence id that was given out and that no span may ever show."""

    # queue

    @abstractmethod
    def push(self, rollout_id: str) -> None:
        """Put a rollout at the tail of the queue, unless it is queued already."""

    @abstractmethod
    def pop(self, limit: int) -> Sequence[str]:
        """Take up to `limit` rollouts from the head of the queue; none, if it is empty."""

    @abstractmethod
    def queue_ids(self) -> Sequence[str]:
        """The whole queue, its head first."""

    # schedule of the watchdog

    @abstractmethod
    def schedule(self, rollout_id: str, due: float | None) -> None:
        """Have the watchdog look at a rollout after that moment; None takes it off the schedule."""

    @abstractmethod
    def overdue(self, now: float) -> Sequence[str]:
        """Rollouts whose moment lies before `now`, the earliest first."""

    # the store as a whole

    def note(
        self,
        kind: NoticeKind,
        rollout_id: str | None = None,
        attempt_id: str | None = None,
        status: str | None = None,
        name: str | None = None,
        number: int | None = None,
    ) -> None:
        """Have subscribers told of a change once this transaction is committed (see `Notice`)."""
        cursor = self.cursor + len(self.notices) + 1
        self.notices.append((kind, cursor, rollout_id, attempt_id, status, name, number))

    @abstractmethod
    def counts(self) -> dict[str, int]:
        """Numbers of everything kept, under the names of `LightningStoreStatistics`."""
