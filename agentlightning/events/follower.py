"""Following a store: every span once, in the order in which its rollout got it, from a position on.

A store keeps the spans of a rollout in the order of their arrival, so the number of spans read is a place to go on
from: nothing is lost or doubled, whatever happens to the subscription. Notices only say where to look; those that come
while a query is under way are answered by one query. After a gap, every rollout is looked at again.

Spans that stay open for a while are told of before they end. Whatever is open is asked for before the finished spans
are read, so a span that is neither open nor among those was left unfinished by an attempt that is over.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Literal

from agentlightning.errors import SpansEvicted
from agentlightning.store import LightningStore
from agentlightning.store.foreign import adapted
from agentlightning.store.lifecycle import FINAL_ROLLOUT_STATUSES, is_finished
from agentlightning.types import Notice, Rollout, Span

__all__ = ["Arrival", "SpanFollower", "current_positions"]

PAGE_SPANS = 500
"""How many spans are read at a time."""
PAGE_ROLLOUTS = 500
_NEVER = object()


@dataclass(frozen=True)
class Arrival:
    """One span, or that the spans of a rollout are gone."""

    rollout_id: str
    position: int
    """How many spans of the rollout have been read with this one."""
    span: Span | None
    """None if the store dropped the spans behind the position."""
    state: Literal["ended", "open", "unfinished"] = "ended"
    """`unfinished`: its attempt is over, and it never ended."""
    was_open: bool = False
    """Whether it was told of before, as open."""


async def current_positions(store: LightningStore) -> dict[str, int]:
    """Where every rollout stands now: a stream that is given these begins with what comes after."""
    return {rollout.rollout_id: await _count(store, rollout.rollout_id) async for rollout in _rollouts(store, None)}


async def _rollouts(store: LightningStore, wanted: frozenset[str] | None) -> AsyncIterator[Rollout]:
    """Rollouts page by page, in the order of their creation, which new ones do not disturb."""
    ids = None if wanted is None else sorted(wanted)
    offset = 0
    while page := await store.query_rollouts(rollout_id_in=ids, limit=PAGE_ROLLOUTS, offset=offset):
        for rollout in page:
            yield rollout
        offset += len(page)


async def _count(store: LightningStore, rollout_id: str) -> int:
    """The number of a rollout's spans; 0 if they were dropped, so that a stream tells of the loss."""
    try:
        return (await store.query_spans(rollout_id, limit=0)).total
    except SpansEvicted:
        return 0


class SpanFollower:
    """Reads spans as they come; used as an asynchronous context manager, within which it listens."""

    def __init__(
        self, store: LightningStore, *, rollout_ids: Iterable[str] | None = None, positions: Mapping[str, int]
    ) -> None:
        self._store = adapted(store)
        self._wanted = None if rollout_ids is None else frozenset(rollout_ids)
        self._open = set(self._wanted or ())
        """Of the rollouts asked for, those that are not known to be finished and read to their end."""
        self._positions = dict(positions)
        self._lost: set[str] = set()
        """Rollouts whose spans were dropped, which is told once."""
        self._to_read: dict[str, bool] = {}
        """Rollouts that may have new spans, and whether they were finished when that was learnt."""
        self._to_ask: set[str] = set()
        """Rollouts that may have new open spans."""
        self._changed: set[str] = set()
        """Rollouts whose status has changed, so that open spans of theirs may be left unfinished."""
        self._told: dict[str, dict[str, Span | None]] = {}
        """By rollout and span id, the open spans that were told of; None for those that were left unfinished."""
        self._is_told = asyncio.Event()
        self._failure: BaseException | None = None
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> "SpanFollower":
        notices: Any = self._store.subscribe(["rollout", "span"])
        self._stack.push_async_callback(notices.aclose)
        listening = asyncio.create_task(self._listen(notices), name="agl-event-follower")
        self._stack.push_async_callback(_ended, listening)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._stack.aclose()

    async def arrivals(self) -> AsyncGenerator[Arrival, None]:
        """Spans, first those that are there; ends if rollouts were named and all of them are finished."""
        await self._look_at_everything()
        while self._is_wanted():
            while self._to_read:
                rollout_id = next(iter(self._to_read))
                was_finished = self._to_read.pop(rollout_id)
                open_spans = await self._open_spans(rollout_id)
                for arrival in self._begun(rollout_id, open_spans or ()):
                    yield arrival
                is_more = True
                while is_more:
                    page = await self._page(rollout_id)
                    is_more = len(page) == PAGE_SPANS
                    for arrival in page:
                        yield arrival
                if open_spans is not None:
                    for arrival in self._unfinished(rollout_id, open_spans):
                        yield arrival
                if was_finished:
                    self._open.discard(rollout_id)
            if self._failure is not None:
                raise self._failure
            if self._is_wanted():
                await self._is_told.wait()
                self._is_told.clear()

    def _is_wanted(self) -> bool:
        return self._wanted is None or bool(self._open)

    async def _page(self, rollout_id: str) -> Sequence[Arrival]:
        """The next spans behind the position; empty if there are none."""
        offset = self._positions.get(rollout_id, 0)
        try:
            spans = await self._store.query_spans(rollout_id, offset=offset, limit=PAGE_SPANS, sort_by=None)
        except SpansEvicted:
            if rollout_id in self._lost:
                return ()
            self._lost.add(rollout_id)
            return (Arrival(rollout_id, offset, None),)
        self._positions[rollout_id] = offset + len(spans)
        told = self._told.get(rollout_id, {})
        return [
            Arrival(rollout_id, position, span, was_open=told.pop(span.span_id, _NEVER) is not _NEVER)
            for position, span in enumerate(spans, offset + 1)
        ]

    # ------------------------------------------------------------------ open spans

    async def _open_spans(self, rollout_id: str) -> Sequence[Span] | None:
        """What is open now; None if nothing has changed there."""
        is_changed = rollout_id in self._changed and bool(self._told.get(rollout_id))
        if not (is_changed or rollout_id in self._to_ask):
            return None
        self._to_ask.discard(rollout_id)
        self._changed.discard(rollout_id)
        return await self._store.query_open_spans(rollout_id)

    def _begun(self, rollout_id: str, open_spans: Sequence[Span]) -> Iterator[Arrival]:
        position = self._positions.get(rollout_id, 0)
        for span in open_spans:
            told = self._told.setdefault(rollout_id, {})
            if span.span_id not in told:
                told[span.span_id] = span
                yield Arrival(rollout_id, position, span, "open")

    def _unfinished(self, rollout_id: str, open_spans: Sequence[Span]) -> Iterator[Arrival]:
        position = self._positions.get(rollout_id, 0)
        still_open = {span.span_id for span in open_spans}
        told = self._told.get(rollout_id, {})
        for span_id, span in told.items():
            if span is not None and span_id not in still_open:
                told[span_id] = None  # should it end after all, its beginning is not told again
                yield Arrival(rollout_id, position, span, "unfinished")

    # ------------------------------------------------------------------ listening

    async def _listen(self, notices: AsyncIterator[Notice]) -> None:
        try:
            async for notice in notices:
                if notice.kind == "gap":
                    await self._look_at_everything()
                elif notice.rollout_id is not None:
                    self._look_at(
                        notice.rollout_id,
                        is_over=notice.status in FINAL_ROLLOUT_STATUSES,
                        is_changed=notice.kind == "rollout",
                        has_begun=notice.kind == "span" and notice.status == "open",
                    )
        except Exception as error:  # noqa: BLE001 # the boundary: whoever reads is told
            self._failure = error
            self._is_told.set()

    async def _look_at_everything(self) -> None:
        async for rollout in _rollouts(self._store, self._wanted):
            is_over = is_finished(rollout)
            self._look_at(rollout.rollout_id, is_over=is_over, is_changed=True, has_begun=not is_over)

    def _look_at(self, rollout_id: str, *, is_over: bool, is_changed: bool, has_begun: bool) -> None:
        if self._wanted is None or rollout_id in self._wanted:
            if is_changed:
                self._changed.add(rollout_id)
            if has_begun:
                self._to_ask.add(rollout_id)
            self._to_read[rollout_id] = is_over or self._to_read.get(rollout_id, False)
            self._is_told.set()


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
