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
from typing import TypeVar

from agentlightning.store.claims import Grant
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

__all__ = ["Record", "RecordT", "Transaction"]

Record = ResourcesUpdate | Worker | Run | Grant
RecordT = TypeVar("RecordT", ResourcesUpdate, Worker, Run, Grant)


class Transaction(ABC):
    """Reads and writes that take effect together or not at all."""

    cursor = 0
    """Number of the newest committed notice, where the transaction gives notices their cursors."""
    notices: list[NoticeFields]
    """Not committed yet."""

    # rollouts

    @abstractmethod
    def get_rollout(self, rollout_id: str) -> Rollout | None: ...

    @abstractmethod
    def put_rollout(self, rollout: Rollout) -> None:
        """Insert or replace."""

    @abstractmethod
    def select_rollouts(self, selection: Selection) -> PaginatedResult[Rollout]:
        """Rollouts in the order of their insertion unless sorted."""

    # attempts

    @abstractmethod
    def get_attempts(self, rollout_id: str) -> Sequence[Attempt]:
        """All attempts of a rollout, the first one first; empty if there is no such rollout."""

    @abstractmethod
    def put_attempt(self, attempt: Attempt) -> None:
        """Replace the attempt of that number, or append it if the number is the next one."""

    @abstractmethod
    def remove_latest_attempt(self, rollout_id: str) -> None: ...

    # spans

    @abstractmethod
    def append_spans(self, attempt: Attempt, spans: Sequence[Span], now: float) -> Attempt:
        """Keep copies of spans of an attempt. They are a sign of life: the attempt, with `last_heartbeat_time` set to
        `now`, is put and returned."""

    @abstractmethod
    def has_span(self, attempt: Attempt, span_id: str) -> bool: ...

    @abstractmethod
    def select_spans(self, rollout_id: str, attempt: Attempt | None, selection: Selection) -> PaginatedResult[Span]:
        """Spans of a rollout, or of one attempt, in the order of their insertion unless sorted."""

    @abstractmethod
    def put_open_spans(self, rollout_id: str, spans: Sequence[Span]) -> None:
        """Replace what is kept of the open spans of a rollout, which may be dropped once its latest attempt is over."""

    @abstractmethod
    def get_open_spans(self, rollout_id: str) -> Sequence[Span]:
        """What was put last; some of it may have ended since."""

    def are_spans_evicted(self, rollout_id: str) -> bool:
        return False

    @abstractmethod
    def get_last_sequence(self, rollout_id: str) -> int:
        """The highest sequence id seen or given for a rollout, known or not; 0 at first."""

    @abstractmethod
    def put_last_sequence(self, rollout_id: str, sequence_id: int) -> None:
        """Remember a sequence id that was given out and that no span may ever show."""

    # queue

    @abstractmethod
    def push(self, rollout_id: str, *, front: bool = False) -> None:
        """Put a rollout at the tail (or head) of the queue, unless it is queued already."""

    @abstractmethod
    def pop(self, limit: int) -> Sequence[str]:
        """Take up to `limit` rollouts from the head of the queue; none, if it is empty."""

    @abstractmethod
    def unqueue(self, rollout_id: str) -> None:
        """Take a rollout out of the queue, if it is there."""

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

    # resources, workers, runs, grants: records under one key; old grants may be dropped

    @abstractmethod
    def get_record(self, kind: type[RecordT], key: str) -> RecordT | None: ...

    @abstractmethod
    def put_record(self, record: Record) -> None: ...

    @abstractmethod
    def select_records(self, kind: type[RecordT], selection: Selection) -> PaginatedResult[RecordT]:
        """Records in the order of their insertion unless sorted."""

    @abstractmethod
    def get_setting(self, name: str) -> str | None: ...

    @abstractmethod
    def put_setting(self, name: str, value: str) -> None: ...

    # metrics

    @abstractmethod
    def append_metrics(self, point: MetricPoint) -> None: ...

    @abstractmethod
    def get_metrics(self, run_id: str, step: int | None = None) -> Sequence[MetricPoint]:
        """All points of a run, or of one step of it, by step and then by insertion."""

    # notices

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

    def relieve(self) -> None:  # noqa: B027 # most back ends need not do anything
        """A long operation has written much; a back end that holds writes back may let go of them now."""

    @abstractmethod
    def counts(self) -> dict[str, int]:
        """Numbers of everything kept, under the names of `LightningStoreStatistics`."""
