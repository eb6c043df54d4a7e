"""Taking calls to the store, in batches, after their answers have gone out.

A call gets its sequence id while the model works, so that what the agent does after the answer has a higher one; its
spans are written behind the answer. While the store cannot be reached they wait. A call that could not be stored is
counted for its attempt, with the reason, and logged: none is lost in silence.
"""

import asyncio
import contextlib
import logging
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

from agentlightning.errors import StoreError, StoreUnavailable
from agentlightning.llm_proxy.journal import Journal
from agentlightning.llm_proxy.records import CallRecord, Origin
from agentlightning.llm_proxy.spans import spans_of
from agentlightning.store.base import LightningStore
from agentlightning.types import Span

__all__ = ["AttemptLedger", "Recorder", "RecorderLimits"]

logger = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS: Final = 0.05
LONGEST_PAUSE_SECONDS: Final = 2.0
_BREATHER: Final = 8
"""Calls that are turned into spans before others get their turn on the loop."""

_Place = tuple[str, str]


@dataclass(frozen=True)
class RecorderLimits:
    """How much may wait, and for how long."""

    waiting_calls: int = 20_000
    waiting_bytes: int = 256 * 1024**2
    batch_calls: int = 100
    linger_seconds: float = 0.005
    """How long the first call of a batch waits for others."""
    close_seconds: float = 10.0


@dataclass
class AttemptLedger:
    """The calls of one attempt, counted."""

    in_flight: int = 0
    waiting: int = 0
    stored: int = 0
    lost: Counter[str] = field(default_factory=Counter)
    """By reason."""

    @property
    def is_idle(self) -> bool:
        return not (self.in_flight or self.waiting or self.lost)


class Recorder:
    """Brings the calls of one proxy to its store. Lives in the loop that serves; used from there only."""

    def __init__(
        self, store: LightningStore, journal: Journal | None = None, limits: RecorderLimits | None = None
    ) -> None:
        self.store = store
        self.journal = journal
        self.totals = AttemptLedger()
        self.unattributed = 0
        """Calls that were served for no rollout, and are written nowhere."""
        self._limits = limits or RecorderLimits()
        self._ledgers: dict[_Place, AttemptLedger] = {}
        self._to_number: deque[CallRecord] = deque()
        self._numbering = asyncio.Lock()  # one at a time, so that no call gets two numbers
        self._to_store: deque[CallRecord] = deque()
        self._waiting_bytes = 0
        self._has_work = asyncio.Event()
        self._has_unnumbered = asyncio.Event()
        self._settled: list[asyncio.Future[None]] = []
        self._recovering: asyncio.Task[None] | None = None
        self._has_told_of_outage = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Write while the block lasts, and at its end what is left."""
        tasks = [asyncio.create_task(self._number_always()), asyncio.create_task(self._store_always())]
        if self.journal is not None:
            self._recovering = asyncio.create_task(self._recover(self.journal))
            tasks.append(self._recovering)
        try:
            yield
        finally:
            if not await self.flush(timeout=self._limits.close_seconds):
                logger.error("%s", self._told_left_over())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self.journal is not None:
                self.journal.close()

    def _told_left_over(self) -> str:
        left = len(self._to_store)
        if self.journal is not None:
            return f"The spans of {left} model calls are not stored yet; they wait in '{self.journal.directory}'."
        return f"The spans of {left} model calls are lost: the store could not be reached before the proxy stopped."

    # ------------------------------------------------------------------ the gateway's side

    def begin(self, record: CallRecord) -> None:
        """A call has come in."""
        self._ledger(record.origin).in_flight += 1
        self.totals.in_flight += 1
        self._to_number.append(record)
        self._has_unnumbered.set()

    def finish(self, record: CallRecord) -> None:
        """A call is over: from here on it survives this process, if there is a journal. Call before its last byte."""
        record.ended = time.time()
        ledger = self._ledger(record.origin)
        for counts in (ledger, self.totals):
            counts.in_flight -= 1
            counts.waiting += 1
        if self.journal is not None:
            try:
                self.journal.write(record)
            except OSError as error:
                logger.error("A model call could not be kept in the journal: %s", error)
        if self._is_full():
            self._lose(record, "too many calls wait for the store", keep_in_journal=True)
            return
        self._waiting_bytes += _weight(record)
        self._to_store.append(record)
        self._has_work.set()

    def _is_full(self) -> bool:
        return len(self._to_store) >= self._limits.waiting_calls or self._waiting_bytes >= self._limits.waiting_bytes

    async def flush(self, origin: Origin | None = None, *, timeout: float = 10.0, grace: float = 0.5) -> bool:
        """Wait until the finished calls of an attempt, or all, are settled; False if that took too long.

        Args:
            grace: How long calls that are still being answered are waited for.
        """
        now = asyncio.get_running_loop().time()
        deadline, patience = now + timeout, now + grace
        if origin is None and self._recovering is not None:
            await asyncio.wait([self._recovering], timeout=timeout)
        while True:
            counts = self.totals if origin is None else self._ledger(origin)
            now = asyncio.get_running_loop().time()
            until = deadline if counts.waiting else patience if counts.in_flight else 0.0
            if not counts.waiting and (not counts.in_flight or now >= patience):
                return True
            if now >= until:
                return False
            settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._settled.append(settled)
            await asyncio.wait([settled], timeout=until - now)

    def report(self, origin: Origin) -> AttemptLedger:
        """What became of an attempt's calls; it is forgotten when nothing of it is under way."""
        place = (origin.rollout_id, origin.attempt_id)
        ledger = self._ledgers.get(place, AttemptLedger())
        if not (ledger.in_flight or ledger.waiting):
            self._ledgers.pop(place, None)
        return ledger

    def _ledger(self, origin: Origin) -> AttemptLedger:
        return self._ledgers.setdefault((origin.rollout_id, origin.attempt_id), AttemptLedger())

    # ------------------------------------------------------------------ numbers

    async def _number_always(self) -> None:
        while True:
            await self._has_unnumbered.wait()
            self._has_unnumbered.clear()
            fresh = [self._to_number.popleft() for _ in range(len(self._to_number))]
            with contextlib.suppress(StoreUnavailable):  # whoever writes the calls will ask again
                await self._number(fresh)

    async def _number(self, records: Sequence[CallRecord]) -> None:
        """Give each call its number; one that the store refuses is left without."""
        async with self._numbering:
            fresh = [record for record in records if record.sequence_id is None]
            if not fresh:
                return
            places = [(record.origin.rollout_id, record.origin.attempt_id) for record in fresh]
            try:
                numbers = await self.store.get_many_span_sequence_ids(places)
            except StoreUnavailable:
                raise
            except StoreError:
                await self._number_singly(fresh)
                return
            for record, number in zip(fresh, numbers, strict=True):
                record.sequence_id = number

    async def _number_singly(self, records: Sequence[CallRecord]) -> None:
        for record in records:
            with contextlib.suppress(StoreError):  # told when its spans are refused
                record.sequence_id = await self.store.get_next_span_sequence_id(
                    record.origin.rollout_id, record.origin.attempt_id
                )

    # ------------------------------------------------------------------ spans

    async def _store_always(self) -> None:
        while True:
            await self._has_work.wait()
            await asyncio.sleep(self._limits.linger_seconds)
            self._has_work.clear()
            while self._to_store:
                batch = [self._to_store[number] for number in range(min(len(self._to_store), self._limits.batch_calls))]
                await self._until_stored(batch)
                for record in batch:
                    self._to_store.popleft()
                    self._waiting_bytes -= _weight(record)
                self._tell()

    async def _until_stored(self, batch: Sequence[CallRecord]) -> None:
        pause = FIRST_PAUSE_SECONDS
        while True:
            try:
                await self._store(batch)
            except StoreUnavailable as error:
                if not self._has_told_of_outage:
                    self._has_told_of_outage = True
                    logger.warning("The store cannot be reached; model calls wait for it: %s", error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
            else:
                self._has_told_of_outage = False
                return

    async def _store(self, batch: Sequence[CallRecord]) -> None:
        """Number and store a batch; may be called again after a failure, for the store keeps one of each span."""
        await self._number(batch)
        spans: dict[str, list[Span]] = {}
        for number, record in enumerate(batch):
            if number % _BREATHER == _BREATHER - 1:
                await asyncio.sleep(0)
            if record.sequence_id is not None:
                spans[record.span_id] = spans_of(record)
        try:
            await self.store.add_many_spans([span for both in spans.values() for span in both])
        except StoreUnavailable:
            raise
        except (StoreError, ValueError, TypeError):
            await self._store_singly(batch, spans)
            return
        for record in batch:
            if record.sequence_id is None:
                await self._store_unnumbered(record)
            else:
                self._settle(record)

    async def _store_unnumbered(self, record: CallRecord) -> None:
        """A call that got no number; the reason is that of the store, which is asked once more."""
        try:
            await self._store_one(record, None)
        except StoreUnavailable:
            raise
        except (StoreError, ValueError, TypeError) as error:
            self._lose(record, f"{type(error).__name__}: {error}")

    async def _store_singly(self, batch: Sequence[CallRecord], spans: dict[str, list[Span]]) -> None:
        """One by one, so that a call which the store refuses does not take others with it."""
        for record in batch:
            try:
                await self._store_one(record, spans.get(record.span_id))
            except StoreUnavailable:
                raise
            except (StoreError, ValueError, TypeError) as error:
                self._lose(record, f"{type(error).__name__}: {error}")

    async def _store_one(self, record: CallRecord, spans: list[Span] | None) -> None:
        if spans is None:
            record.sequence_id = await self.store.get_next_span_sequence_id(
                record.origin.rollout_id, record.origin.attempt_id
            )
            spans = spans_of(record)
        await self.store.add_many_spans(spans)
        self._settle(record)

    def _settle(self, record: CallRecord) -> None:
        if record.is_settled:
            return
        record.is_settled = True
        for counts in (self._ledger(record.origin), self.totals):
            counts.waiting -= 1
            counts.stored += 1
        if self.journal is not None:
            self.journal.settle(record.span_id)

    def _lose(self, record: CallRecord, reason: str, *, keep_in_journal: bool = False) -> None:
        if record.is_settled:
            return
        record.is_settled = True
        for counts in (self._ledger(record.origin), self.totals):
            counts.waiting -= 1
            counts.lost[reason] += 1
        if sum(self._ledger(record.origin).lost.values()) == 1:
            logger.warning(
                "A model call of rollout '%s', attempt '%s', is not recorded (%s); further ones are counted only.",
                record.origin.rollout_id,
                record.origin.attempt_id,
                reason,
            )
        if self.journal is not None and not keep_in_journal:
            self.journal.settle(record.span_id)

    def _tell(self) -> None:
        waiting, self._settled = self._settled, []
        for settled in waiting:
            if not settled.done():
                settled.set_result(None)
        for place in [place for place, ledger in self._ledgers.items() if ledger.is_idle]:
            if self._ledgers[place].stored and len(self._ledgers) > self._limits.waiting_calls:
                del self._ledgers[place]  # nobody asked for so long that keeping it would be a leak

    # ------------------------------------------------------------------ after a crash

    async def _recover(self, journal: Journal) -> None:
        """Store what a process before us answered and could not store."""
        recovered = 0
        for path, records in journal.left_behind():
            for start in range(0, len(records), self._limits.batch_calls):
                batch = records[start : start + self._limits.batch_calls]
                for record in batch:
                    for counts in (self._ledger(record.origin), self.totals):
                        counts.waiting += 1
                await self._until_stored(batch)
                recovered += len(batch)
                self._tell()
            journal.forget(path)
        if recovered:
            logger.info("%d model calls of an earlier process were found in the journal and stored.", recovered)


def _weight(record: CallRecord) -> int:
    return len(record.request) + len(record.sent) + len(record.response)
