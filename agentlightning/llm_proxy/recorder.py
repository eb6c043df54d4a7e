"""Recorder: brings the calls of a proxy to its store, and counts what became of each.

A call is handed over before the last byte of its answer, which waits until the store has the call: so what the agent
does next has a higher sequence id, and whoever reads a finished rollout finds its calls. A store that is away or slow
costs a caller a moment once; then answers go out at once, and the calls wait: as many as memory is given for and, where
there is a journal, the others in it. A call that could not be stored is counted for its attempt, with the reason.
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

from agentlightning.errors import PayloadTooLarge, StoreError
from agentlightning.llm_proxy.call_record import CallRecord, Origin, spans_of
from agentlightning.llm_proxy.journal import Journal, OldSegment
from agentlightning.store.base import LightningStore
from agentlightning.tracer.shipper import PendingItem, Shipper, ShipperLimits
from agentlightning.types import Span

logger = logging.getLogger(__name__)

CALL_LIMITS: Final = ShipperLimits(
    queued_bytes=256 * 1024**2, batch_items=100, batch_bytes=8 * 1024**2, linger_seconds=0.0, patience_seconds=3.0
)
CLOSE_SECONDS: Final = 10.0
MOST_ATTEMPTS: Final = 10_000
"""Whose calls are counted; idle ones are forgotten first."""
MOST_REASONS: Final = 16
"""Remembered for an attempt, since callers choose the ids that stand in them."""
OTHER_REASONS: Final = "other reasons"


@dataclass(slots=True)
class CallCounts:
    """The calls of one attempt, or of all."""

    in_flight: int = 0
    waiting: int = 0
    """Finished, and not stored yet."""
    stored: int = 0
    lost: Counter[str] = field(default_factory=Counter)
    """By reason."""

    def lose(self, reason: str) -> None:
        self.waiting -= 1
        self.lost[reason if reason in self.lost or len(self.lost) < MOST_REASONS else OTHER_REASONS] += 1


class PendingCall(PendingItem):
    """One finished call."""

    def __init__(self, recorder: "Recorder", record: CallRecord) -> None:
        super().__init__(len(record.request) + len(record.sent) + len(record.response))
        self.record = record
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when it is settled."""
        self.is_stored = False
        self.may_be_stored_later = False
        """Lost because the store failed, not because it refused the call."""
        self.with_raw = recorder.raw_spans
        self._recorder = recorder

    @property
    def owner(self) -> Origin:
        return self.record.origin

    @property
    def ended(self) -> float:
        return self.record.ended

    def make_spans(self) -> Sequence[Span]:
        return spans_of(self.record, with_raw=self.with_raw)

    def store(self, stored: Sequence[Span | None]) -> None:
        self.is_stored = True
        self._settle()
        self._recorder.note_stored(self.record)

    def lose(self, reason: str, error: Exception | None = None) -> None:
        if self.is_settled:
            return
        self.may_be_stored_later = not isinstance(error, (StoreError, ValueError, TypeError))
        self._settle()
        reason = reason if error is None else f"{type(error).__name__}: {error}"
        self._recorder.note_lost(self.record, reason, is_kept=self.may_be_stored_later)

    def _settle(self) -> None:
        self.is_settled = True
        if not self.done.done():
            self.done.set_result(None)


class _CallShipper(Shipper):
    """Numbers calls itself if they have two spans, which share a number; drops the second if it is too large."""

    def __init__(self, recorder: "Recorder", limits: ShipperLimits) -> None:
        super().__init__(recorder.store, limits)
        self._recorder = recorder

    async def _store(self, items: Sequence[PendingItem]) -> None:
        if self._recorder.raw_spans:
            fresh = [item.record for item in items if isinstance(item, PendingCall) and not item.record.sequence_id]
            owners = [(record.origin.rollout_id, record.origin.attempt_id) for record in fresh]
            for record, number in zip(fresh, await self.store.get_many_span_sequence_ids(owners), strict=True):
                record.sequence_id = number
        await super()._store(items)

    async def _sort_out(self, items: Sequence[PendingItem], error: Exception) -> None:
        call = items[0]
        if len(items) > 1 or not (
            isinstance(call, PendingCall) and call.with_raw and isinstance(error, PayloadTooLarge)
        ):
            await super()._sort_out(items, error)
            return
        logger.warning("A model call of %s is recorded without its raw span: %s", call.record.origin, error)
        call.with_raw = False
        await self.ship(items)

    def _note_progress(self) -> None:
        super()._note_progress()
        self._recorder.note_progress()


class Recorder:
    """Records the calls of one proxy. Lives in the loop that serves; used from there only."""

    def __init__(
        self,
        store: LightningStore,
        journal: Journal | None = None,
        limits: ShipperLimits = CALL_LIMITS,
        *,
        raw_spans: bool = False,
        close_seconds: float = CLOSE_SECONDS,
    ) -> None:
        self.store = store
        self.journal = journal
        self.raw_spans = raw_spans
        self.totals = CallCounts()
        """The calls of all attempts."""
        self.unattributed = 0
        """Calls that were served for no rollout, and are recorded nowhere."""
        self._close_seconds = close_seconds
        self._shipper = _CallShipper(self, limits)
        self._counts: dict[Origin, CallCounts] = {}
        self._in_journal: deque[tuple[str, Origin]] = deque()  # span ids of calls that wait in the journal alone
        self._progress = asyncio.Event()  # set, and replaced, when something was settled
        self._recovering: asyncio.Task[None] | None = None
        self._has_warned_of_disk = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Store calls while the block lasts, and at its end what is left."""
        shipping = asyncio.create_task(self._shipper.run(), name="agl-proxy-spans")
        try:
            yield
        finally:
            is_complete = await self.flush(timeout=self._close_seconds)
            tasks = [shipping] if self._recovering is None else [shipping, self._recovering]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if not is_complete:
                self._report_left_over()
            if self.journal is not None:
                self.journal.close()

    def _report_left_over(self) -> None:
        """What could not be stored before the end waits in the journal, or is lost."""
        for call in self._shipper.outstanding():
            if isinstance(call, PendingCall) and (self.journal is None or call.record.span_id not in self.journal):
                call.lose("the proxy stopped before the store could be reached")
        lost = sum(self.totals.lost.values())
        if lost:
            logger.error("The spans of %d model calls are lost: the store did not take them.", lost)
        if self.journal is not None and self.totals.waiting:
            logger.error(
                "The spans of %d model calls are not stored yet; they wait in '%s'.",
                *(self.totals.waiting, self.journal.directory),
            )

    # ------------------------------------------------------------------ calls

    def begin(self, origin: Origin) -> None:
        """A call has come in."""
        for counts in self._counts_of(origin):
            counts.in_flight += 1

    def finish(self, record: CallRecord) -> PendingCall | None:
        """A call is over; if there is a journal, it survives this process. None if it waits in the journal alone."""
        record.ended = time.time()
        for counts in self._counts_of(record.origin):
            counts.in_flight -= 1
            counts.waiting += 1
        is_in_journal = self._write_to_journal(record)
        call = PendingCall(self, record)
        if self._shipper.has_room:
            if self._shipper.is_stalled:
                record.sent_json = record.answer = None  # it will wait, and takes less memory unread
            self._shipper.append(call)
            return call
        if is_in_journal:
            self._in_journal.append((record.span_id, record.origin))
            return None
        call.lose("too many calls wait for the store")
        self.note_progress()
        return call

    def _write_to_journal(self, record: CallRecord) -> bool:
        """Whether there is a journal that took the call; a full disk is no reason to refuse the answer."""
        if self.journal is None:
            return False
        try:
            self.journal.write(record)
        except OSError as error:
            if not self._has_warned_of_disk:
                logger.error("Model calls cannot be kept in the journal, only in memory: %s", error)
            self._has_warned_of_disk = True
            return False
        self._has_warned_of_disk = False
        return True

    @property
    def will_record(self) -> bool:
        """Whether a call that begins now will be recorded, as far as can be known."""
        return self.journal is not None or not self._shipper.is_stalled

    async def wait_stored(self, call: PendingCall | None) -> bool:
        """Wait until a call is stored; False if it is lost, or still waits after a moment."""
        if call is None:
            return False
        if not call.is_settled and not self._shipper.is_stalled:
            await asyncio.wait([call.done], timeout=self._shipper.limits.patience_seconds)
            if not call.is_settled:
                self._shipper.is_stalled = True
        return call.is_stored

    async def flush(self, origin: Origin | None = None, *, timeout: float = 10.0, grace: float = 0.5) -> bool:
        """Wait until the finished calls of an attempt, or all, are settled; False if that took too long.

        Args:
            grace: How long calls that are still being answered are waited for.
        """
        loop = asyncio.get_running_loop()
        deadline, grace_deadline = loop.time() + timeout, loop.time() + min(grace, timeout)
        if self._recovering is not None:
            await asyncio.wait([self._recovering], timeout=timeout)
            if not self._recovering.done():
                return False
        while True:
            counts = self.totals if origin is None else self.counts_of(origin)
            left = (deadline if counts.waiting else grace_deadline) - loop.time()
            if left <= 0 or not (counts.waiting or counts.in_flight):
                return not counts.waiting
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._progress.wait(), left)

    # ------------------------------------------------------------------ what became of calls

    def counts_of(self, origin: Origin) -> CallCounts:
        """The calls of one attempt; zero, if nothing is known of it."""
        return self._counts.get(origin.attempt) or CallCounts()

    def _counts_of(self, origin: Origin) -> tuple[CallCounts, CallCounts]:
        """The counts of an attempt, which are kept from now on, and of all."""
        origin = origin.attempt
        counts = self._counts.get(origin)
        if counts is None:
            if len(self._counts) >= MOST_ATTEMPTS:
                # A tenth at once, so that not every new attempt has to look for one to forget.
                idle = [key for key, known in self._counts.items() if not (known.in_flight or known.waiting)]
                for key in idle[: MOST_ATTEMPTS // 10]:
                    del self._counts[key]
            counts = self._counts[origin] = CallCounts()
        return counts, self.totals

    def note_stored(self, record: CallRecord) -> None:
        for counts in self._counts_of(record.origin):
            counts.waiting -= 1
            counts.stored += 1
        if self.journal is not None:
            self.journal.settle(record.span_id)

    def note_lost(self, record: CallRecord, reason: str, *, is_kept: bool) -> None:
        """Count a loss; a call that may be stored later stays in the journal, for the next start."""
        self._count_lost(record.origin, reason)
        if self.journal is not None and not is_kept:
            self.journal.settle(record.span_id)

    def _count_lost(self, origin: Origin, reason: str) -> None:
        counts, totals = self._counts_of(origin)
        if not counts.lost:
            logger.warning(
                "A model call of rollout '%s', attempt '%s', is not recorded (%s); further ones are counted only.",
                *(origin.rollout_id, origin.attempt_id, reason),
            )
        counts.lose(reason)
        totals.lose(reason.partition(":")[0])  # the kind of reason, without what the caller chose

    def note_progress(self) -> None:
        """Something was settled: wake those who wait for it, and take calls back from the journal if there is room."""
        self._progress.set()
        self._progress = asyncio.Event()
        while self._in_journal and not self._shipper.queue_length:
            self._take_back()

    def _take_back(self) -> None:
        """Queue a batch of calls from the journal."""
        assert self.journal is not None
        limits = self._shipper.limits
        size = 0
        for _ in range(min(limits.batch_items, len(self._in_journal))):
            span_id, origin = self._in_journal.popleft()
            try:
                call = PendingCall(self, self.journal.read(span_id))
            except (OSError, ValueError, TypeError) as error:
                self._count_lost(origin, f"{type(error).__name__}: {error}")
                continue
            self._shipper.append(call)
            size += call.weight
            if size >= limits.batch_bytes:
                return

    # ------------------------------------------------------------------ after a crash

    def recover(self) -> None:
        """Begin to store what earlier processes answered and could not store."""
        if self.journal is not None and self._recovering is None:
            self._recovering = asyncio.create_task(self._recover(self.journal), name="agl-proxy-recovery")

    async def _recover(self, journal: Journal) -> None:
        recovered = 0
        try:
            with contextlib.closing(journal.old_segments()) as segments:
                for segment in segments:
                    recovered += await self._store_recovered(segment)
        except OSError as error:
            logger.error("The journal '%s' cannot be read: %s", journal.directory, error)
        if recovered:
            logger.info("%d model calls of an earlier process were found in the journal and stored.", recovered)

    async def _store_recovered(self, segment: OldSegment) -> int:
        """Store the calls of a segment, which goes unless some may be stored later; how many were stored."""
        calls = [PendingCall(self, record) for record in segment.calls]
        for call in calls:
            for counts in self._counts_of(call.record.origin):
                counts.waiting += 1
        size = self._shipper.limits.batch_items
        for start in range(0, len(calls), size):
            batch = calls[start : start + size]
            await self._shipper.ship(batch)
            for call in batch:
                if not call.may_be_stored_later:
                    segment.settle(call.record.span_id)
        if not any(call.may_be_stored_later for call in calls):
            segment.remove()
        return sum(call.is_stored for call in calls)
