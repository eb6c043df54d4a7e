"""The queue in SQLite: positions in a table, its head read ahead."""

from collections import deque
from collections.abc import Sequence

from agentlightning.store.sqlite.rollout_tables import Entry, RolloutTables
from agentlightning.store.sqlite.session import Session

__all__ = ["QueueTable"]

READ_AHEAD = 256
"""How many entries are read at once."""


class QueueTable:
    """The table queue. An entry's place is also known to its rollout."""

    def __init__(self, session: Session, rollouts: RolloutTables) -> None:
        self._session = session
        self._rollouts = rollouts
        session.flush_with(self.flush)
        self.forget()

    def forget(self) -> None:
        """Remember nothing, hold nothing back."""
        self._head: deque[tuple[int, str]] = deque()
        self._is_whole = False  # whether `_head` is all of the queue
        self._last: int | None = None  # the tail's position
        self._changes: dict[int, int | None] = {}  # position -> rollout number, or None where it was left

    def flush(self) -> None:
        left = [(position,) for position, number in self._changes.items() if number is None]
        taken = [(position, number) for position, number in self._changes.items() if number is not None]
        if left:
            self._session.write("DELETE FROM queue WHERE position = ?", left)
        if taken:
            self._session.write("INSERT OR REPLACE INTO queue VALUES (?, ?)", taken)
        self._changes = {}

    def push(self, rollout_id: str, *, front: bool) -> None:
        entry = self._rollouts.find(rollout_id)
        assert entry is not None  # only a stored rollout is queued
        if entry.position is not None:
            return
        if front:
            position = self._session.select("SELECT coalesce(min(position), 0) - 1 FROM queue")[0][0]
        else:
            position = self._take_tail()
        self._session.hold_back(self._unpush, entry, position)
        entry.position = position
        self._changes[position] = entry.number
        if front:
            self._head.appendleft((position, rollout_id))
        elif self._is_whole:
            self._head.append((position, rollout_id))

    def _take_tail(self) -> int:
        if self._last is None:
            self._last = self._session.select("SELECT coalesce(max(position), 0) FROM queue")[0][0]
        self._last += 1
        return self._last

    def _unpush(self, entry: Entry, position: int) -> None:
        entry.position = None
        self._changes.pop(position, None)
        place = (position, entry.rollout.rollout_id)
        if place in self._head:
            self._head.remove(place)

    def pop(self) -> str | None:
        if not self._head and not self._is_whole:
            self._read_ahead()
        if not self._head:
            return None
        position, rollout_id = self._head.popleft()
        entry = self._rollouts.find(rollout_id)
        assert entry is not None  # a queued rollout is stored
        self._session.hold_back(self._unpop, entry, position, self._changes.get(position))
        entry.position = None
        self._changes[position] = None
        return rollout_id

    def _unpop(self, entry: Entry, position: int, change: int | None) -> None:
        self._head.appendleft((position, entry.rollout.rollout_id))
        self._restore(entry, position, change)

    def _restore(self, entry: Entry, position: int, change: int | None) -> None:
        entry.position = position
        self._changes.pop(position, None)
        if change is not None:
            self._changes[position] = change

    def unqueue(self, rollout_id: str) -> None:
        entry = self._rollouts.known(rollout_id)
        position = entry.position
        if position is None:
            return
        self._session.hold_back(self._reread, entry, position, self._changes.get(position))
        entry.position = None
        self._changes[position] = None
        if (position, rollout_id) in self._head:
            self._head.remove((position, rollout_id))

    def _reread(self, entry: Entry, position: int, change: int | None) -> None:
        self._restore(entry, position, change)
        self._head.clear()
        self._is_whole = False

    def _read_ahead(self) -> None:
        rows = self._session.select(f"{_SELECT_QUEUE} LIMIT {READ_AHEAD}")
        self._head = deque((position, rollout_id) for position, rollout_id in rows)
        self._is_whole = len(rows) < READ_AHEAD

    def ids(self) -> Sequence[str]:
        return [rollout_id for _, rollout_id in self._session.select(_SELECT_QUEUE)]


_SELECT_QUEUE = "SELECT position, rollout_id FROM queue JOIN rollouts ON number = rollout ORDER BY position"
