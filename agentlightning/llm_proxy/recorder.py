"""Taking calls to the store, in batches, after their answers have gone out.

A call gets its sequence id while the model works, so that what the agent does after the answer has a higher one; its
spans are written behind the answer. While the store cannot be reached they wait: as many as memory is given for and,
where there is a journal, the others in it. A call that could not be stored is counted for its attempt, with the reason,
and logged: none is lost in silence.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from agentlightning.errors import StoreError, StoreUnavailable
from agentlightning.llm_proxy.journal import Journal, LeftBehind
from agentlightning.llm_proxy.ledgers import AttemptLedger, Ledgers
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


@dataclass(frozen=True)
class RecorderLimits:
    """How much may wait, and for how long."""

    waiting_calls: int = 20_000
    """In memory; so for the next."""
    waiting_bytes: int = 256 * 1024**2
    batch_calls: int = 100
    batch_bytes: int = 8 * 1024**2
    """A batch ends with the call that reaches this."""
    behind_calls: int = 500
    """While more than this wait for a store that can be reached, new calls are held back: served as fast as they come
    they would fill the memory."""
    behind_bytes: int = 16 * 1024**2
    patience_seconds: float = 5.0
    """How long a new call is held back at most."""
    linger_seconds: float = 0.005
    """How long the first call of a batch waits for others."""
    close_seconds: float = 10.0


class Recorder:
    """Brings the calls of one proxy to its store. Lives in the loop that serves; used from there only."""

    def __init__(
        self, store: LightningStore, journal: Journal | None = None, limits: RecorderLimits | None = None
    ) -> None:
        self.store = store
        self.journal = journal
        self.unattributed = 0
        """Calls that were served for no rollout, and are written nowhere."""
        self._limits = limits or RecorderLimits()
        self._ledgers = Ledgers()
        self._to_number: dict[str, CallRecord] = {}  # by span id, while they are in flight
        self._numbering = asyncio.Lock()  # one at a time, so that no call gets two numbers
        self._to_store: deque[CallRecord] = deque()
        self._set_aside: deque[tuple[str, Origin]] = deque()  # span ids of calls that wait in the journal alone
        self._waiting_bytes = 0
        self._has_work = asyncio.Event()
        self._has_unnumbered = asyncio.Event()
        self._settled: list[asyncio.Future[None]] = []
        self._recovering: asyncio.Task[None] | None = None
        self._has_told_of_outage = False
        self._has_told_of_disk = False

    @property
    def totals(self) -> AttemptLedger:
        """The calls of all attempts, counted."""
        return self._ledgers.totals

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Write while the block lasts, and at its end what is left."""
        tasks = [
            asyncio.create_task(self._number_always(), name="agl-proxy-numbers"),
            asyncio.create_task(self._store_always(), name="agl-proxy-spans"),
        ]
        try:
            yield
        finally:
            is_complete = await self.flush(timeout=self._limits.close_seconds)
            if self._recovering is not None:
                tasks.append(self._recovering)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if not is_complete:
                self._tell_left_over()
            if self.journal is not None:
                self.journal.close()

    def recover(self) -> None:
        """Begin to store what processes before us answered and could not store."""
        if self.journal is not None and self._recovering is None:
            self._recovering = asyncio.create_task(self._recover(self.journal), name="agl-proxy-recovery")

    def _tell_left_over(self) -> None:
        """What could not be stored before the end: it waits in the journal, or is lost."""
        for record in self._to_store:
            if self.journal is None or record.span_id not in self.journal:
                self._lose(record, "the proxy stopped before the store could be reached")
        lost = sum(self.totals.lost.values())
        if lost:
            logger.error("The spans of %d model calls are lost: the store did not take them.", lost)
        if self.journal is not None and self.totals.waiting:
            logger.error(
                "The spans of %d model calls are not stored yet; they wait in '%s'.",
                self.totals.waiting,
                self.journal.directory,
            )

    # ------------------------------------------------------------------ the gateway's side

    @property
    def is_behind(self) -> bool:
        """Whether calls come faster than the store takes them. One that cannot be reached is another matter."""
        limits = self._limits
        return not self._has_told_of_outage and (
            len(self._to_store) > limits.behind_calls or self._waiting_bytes > limits.behind_bytes
        )

    async def catch_up(self) -> None:
        """Wait until the recorder is behind no more, or for as long as a new call may be held back."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._limits.patience_seconds
        while self.is_behind and loop.time() < deadline:
            await self._until_something_settles(deadline - loop.time())

    def begin(self, record: CallRecord) -> None:
        """A call has come in."""
        self._ledgers.begin(record.origin)
        self._to_number[record.span_id] = record
        self._has_unnumbered.set()

    def finish(self, record: CallRecord) -> None:
        """A call is over: from here on it survives this process, if there is a journal. Call before its last byte."""
        record.ended = time.time()
        self._to_number.pop(record.span_id, None)
        self._ledgers.finish(record.origin)
        is_kept = self._is_written(record)
        if not self._is_full():
            if len(self._to_store) >= self._limits.batch_calls:
                record.asked = record.answer = None  # it will wait, and takes less room unread
            self._waiting_bytes += _weight(record)
            self._to_store.append(record)
        elif is_kept:
            self._set_aside.append((record.span_id, record.origin))
        else:
            self._lose(record, "too many calls wait for the store")
            self._tell()
        self._has_work.set()

    def _is_written(self, record: CallRecord) -> bool:
        """Write a call to the journal, if there is one; a disk that is full is no reason to refuse the answer."""
        if self.journal is None:
            return False
        try:
            self.journal.write(record)
        except OSError as error:
            if not self._has_told_of_disk:
                self._has_told_of_disk = True
                logger.error("Model calls cannot be kept in the journal, only in memory: %s", error)
            return False
        self._has_told_of_disk = False
        return True

    def _is_full(self) -> bool:
        return len(self._to_store) >= self._limits.waiting_calls or self._waiting_bytes >= self._limits.waiting_bytes

    async def flush(self, origin: Origin | None = None, *, timeout: float = 10.0, grace: float = 0.5) -> bool:
        """Wait until the finished calls of an attempt, or all, are settled; False if that took too long.

        Args:
            grace: How long calls that are still being answered are waited for.
        """
        loop = asyncio.get_running_loop()
        deadline, patience = loop.time() + timeout, loop.time() + grace
        if self._recovering is not None:
            await asyncio.wait([self._recovering], timeout=timeout)
            if not self._recovering.done():
                return False
        while True:
            counts = self.totals if origin is None else self._ledgers.of(origin)
            if not counts.waiting and (not counts.in_flight or loop.time() >= patience):
                return True
            left = (deadline if counts.waiting else min(patience, deadline)) - loop.time()
            if left <= 0:
                return not counts.waiting
            await self._until_something_settles(left)

    async def _until_something_settles(self, timeout: float) -> None:
        settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._settled.append(settled)
        await asyncio.wait([settled], timeout=timeout)
        if not settled.done():
            self._settled.remove(settled)

    def report(self, origin: Origin) -> AttemptLedger:
        """What became of an attempt's calls."""
        return self._ledgers.of(origin)

    # ------------------------------------------------------------------ numbers

    async def _number_always(self) -> None:
        while True:
            await self._has_unnumbered.wait()
            self._has_unnumbered.clear()
            fresh, self._to_number = list(self._to_number.values()), {}
            try:
                await self._number(fresh)
            except Exception as error:  # noqa: BLE001 # whoever writes the calls asks again, and tells what he hears
                logger.debug("Calls under way have no numbers yet: %r", error)

    async def _number(self, records: Sequence[CallRecord]) -> None:
        """Give each call its number; one that the store refuses is left without."""
        async with self._numbering:
            fresh = [record for record in records if record.sequence_id is None]
            if not fresh:
                return
            places = [(record.origin.rollout_id, record.origin.attempt_id) for record in fresh]
            try:
                numbers = await self.store.get_many_span_sequence_ids(places)
            except Exception as error:
                if _is_outage(error):
                    raise
                await self._number_singly(fresh)
                return
            for record, number in zip(fresh, numbers, strict=True):
                record.sequence_id = number

    async def _number_singly(self, records: Sequence[CallRecord]) -> None:
        for record in records:
            try:
                record.sequence_id = await self._next_number(record)
            except Exception as error:
                if _is_outage(error):
                    raise  # otherwise it is told when the call's spans are refused

    async def _next_number(self, record: CallRecord) -> int:
        return await self.store.get_next_span_sequence_id(record.origin.rollout_id, record.origin.attempt_id)

    # ------------------------------------------------------------------ spans

    async def _store_always(self) -> None:
        while True:
            await self._has_work.wait()
            await asyncio.sleep(self._limits.linger_seconds)
            self._has_work.clear()
            while self._to_store or self._set_aside:
                if not self._to_store:
                    self._take_back()
                batch = self._next_batch()
                await self._until_stored(batch)
                for record in batch:
                    self._to_store.popleft()
                    self._waiting_bytes -= _weight(record)
                self._tell()

    def _next_batch(self) -> list[CallRecord]:
        """The calls that waited longest; they stay in line until they are stored."""
        batch: list[CallRecord] = []
        size = 0
        for record in self._to_store:
            batch.append(record)
            size += _weight(record)
            if len(batch) >= self._limits.batch_calls or size >= self._limits.batch_bytes:
                break
        return batch

    def _take_back(self) -> None:
        """Read calls for a batch from the journal."""
        assert self.journal is not None
        size = 0
        while self._set_aside and len(self._to_store) < self._limits.batch_calls and size < self._limits.batch_bytes:
            span_id, origin = self._set_aside.popleft()
            try:
                record = self.journal.read(span_id)
            except (OSError, ValueError, TypeError) as error:
                self._count_lost(origin, f"{type(error).__name__}: {error}")
                continue
            size += _weight(record)
            self._waiting_bytes += _weight(record)
            self._to_store.append(record)

    async def _until_stored(self, batch: Sequence[CallRecord]) -> None:
        """Store or lose each call of a batch, however long the store is away."""
        pause = FIRST_PAUSE_SECONDS
        while True:
            try:
                await self._store([record for record in batch if not record.is_settled])
            except Exception as error:
                if not _is_outage(error):
                    logger.exception("A batch of %d model calls cannot be stored.", len(batch))
                    for record in batch:
                        self._give_up(record, error)
                    return
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
        spans = await self._spans_of(batch)
        try:
            await self.store.add_many_spans([span for both in spans.values() for span in both])
        except Exception as error:
            if _is_outage(error):
                raise
            await self._store_singly(batch, spans)
            return
        for record in batch:
            if record.span_id in spans:
                self._settle(record)
        await self._store_singly(batch, spans)

    async def _spans_of(self, batch: Sequence[CallRecord]) -> dict[str, list[Span]]:
        """By the id of the call's span; a call without a number has none yet, one that cannot be told is lost."""
        spans: dict[str, list[Span]] = {}
        for number, record in enumerate(batch):
            if number % _BREATHER == _BREATHER - 1 and len(self._to_store) < self._limits.batch_calls:
                await asyncio.sleep(0)  # not while many wait: a turn of a busy loop is long
            if record.sequence_id is not None:
                try:
                    spans[record.span_id] = spans_of(record)
                except Exception as error:  # a call of a shape that nobody thought of must not stop the others
                    logger.exception("The spans of a call of model '%s' cannot be made.", record.model)
                    self._give_up(record, error)
        return spans

    async def _store_singly(self, batch: Sequence[CallRecord], spans: dict[str, list[Span]]) -> None:
        """One by one, so that a call which the store refuses does not take others with it."""
        for record in batch:
            if record.is_settled:
                continue
            try:
                if record.sequence_id is None:
                    record.sequence_id = await self._next_number(record)
                await self.store.add_many_spans(spans.get(record.span_id) or spans_of(record))
            except Exception as error:
                if _is_outage(error):
                    raise
                self._give_up(record, error)
            else:
                self._settle(record)

    def _settle(self, record: CallRecord) -> None:
        record.is_settled = True
        self._ledgers.store(record.origin)
        if self.journal is not None:
            self.journal.settle(record.span_id)

    def _give_up(self, record: CallRecord, error: Exception) -> None:
        """Lose a call for what the store said; one whose store failed is kept in the journal, for the next start."""
        self._lose(record, _reason(error), is_refused=isinstance(error, (StoreError, ValueError, TypeError)))

    def _lose(self, record: CallRecord, reason: str, *, is_refused: bool = False) -> None:
        if record.is_settled:
            return
        record.is_settled, record.loss = True, "refused" if is_refused else "postponed"
        self._count_lost(record.origin, reason)
        if self.journal is not None and is_refused:
            self.journal.settle(record.span_id)

    def _count_lost(self, origin: Origin, reason: str) -> None:
        if not self._ledgers.of(origin).lost:
            logger.warning(
                "A model call of rollout '%s', attempt '%s', is not recorded (%s); further ones are counted only.",
                origin.rollout_id,
                origin.attempt_id,
                reason,
            )
        self._ledgers.lose(origin, reason)

    def _tell(self) -> None:
        waiting, self._settled = self._settled, []
        for settled in waiting:
            if not settled.done():
                settled.set_result(None)

    # ------------------------------------------------------------------ after a crash

    async def _recover(self, journal: Journal) -> None:
        recovered = 0
        try:
            with contextlib.closing(journal.left_behind()) as segments:
                for segment in segments:
                    await self._store_recovered(segment)
                    if not any(record.loss == "postponed" for record in segment.calls):
                        journal.forget(segment.path)
                    recovered += sum(record.loss is None for record in segment.calls)
        except OSError as error:
            logger.error("The journal '%s' cannot be read: %s", journal.directory, error)
        if recovered:
            logger.info("%d model calls of an earlier process were found in the journal and stored.", recovered)

    async def _store_recovered(self, segment: LeftBehind) -> None:
        calls = segment.calls
        for record in calls:
            self._ledgers.find(record.origin)
        for start in range(0, len(calls), self._limits.batch_calls):
            batch = calls[start : start + self._limits.batch_calls]
            await self._until_stored(batch)
            for record in batch:
                if record.loss != "postponed":
                    segment.settle(record.span_id)
            self._tell()


def _is_outage(error: Exception) -> bool:
    """Whether the store may take later what it did not take now. Stores of others raise what their networks raise."""
    is_network = isinstance(error, (OSError, asyncio.TimeoutError)) and not isinstance(error, StoreError)
    return is_network or isinstance(error, StoreUnavailable)


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _weight(record: CallRecord) -> int:
    return len(record.request) + len(record.sent) + len(record.response)
