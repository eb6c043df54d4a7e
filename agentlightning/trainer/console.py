"""The console: follows the store of a training, and shows how it goes.

It counts the store's notices and reads a bounded number of finished rollouts now and then; it queries the store for
counts only at the start and when it missed notices. Whatever goes wrong here ends the view, with one line in the log,
and leaves the training alone.
"""

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any, Final

from typing_extensions import Self

from agentlightning.errors import SpansEvicted
from agentlightning.runner.failures import FailureNote
from agentlightning.store.base import LightningStore
from agentlightning.store.lifecycle import FINAL_ROLLOUT_STATUSES
from agentlightning.store.rollout_index import run_id_of
from agentlightning.trainer.progress import STATUS_ORDER, UNREAD_ROLLOUTS, AttemptFailure, RolloutProgress, Sample
from agentlightning.trainer.views import View
from agentlightning.types import Notice
from agentlightning.types.rewards import final_reward_of
from agentlightning.verdict import Verdict

__all__ = ["Console"]

logger = logging.getLogger(__name__)

REFRESH_SECONDS: Final = 0.5
"""Between two turns of reading and showing."""
REST_SECONDS: Final = 0.1
"""While nobody waits for notices, they cost the store nothing."""
SAMPLES_PER_REFRESH: Final = 16
"""How many finished rollouts are read in a turn, and how many failed attempts."""
POINTS_PER_REFRESH: Final = 16
"""How many points of metrics are read in a turn, the last ones."""
SPANS_PER_ROLLOUT: Final = 500
"""How many spans of a rollout are read, the last ones."""
LAST_READ_SECONDS: Final = 1.0
"""How long the reading of what is left at the end may last."""
SETTLE_SECONDS: Final = 0.05
"""At the end, notices count as complete when none has come for this long."""
MOST_SETTLES: Final = 20
_SUMMARY_FIELDS: Final = ("rollouts", "reward_mean", "reward_last", "tokens", "errors", "is_estimate")


class Console:
    """Follows a store and shows how a training goes.

    Args:
        address: Where the store can be found again; None, if nowhere.
        run_id: The run whose metrics are shown; None shows none.
        counts_all: Whether rollouts of other runs count too, as for runners that serve whatever is enqueued.
        served_at: Where the store can be reached while the training runs, if that is not its address.
    """

    def __init__(
        self,
        view: View | None,
        store: LightningStore,
        *,
        address: str | None = None,
        run_id: str | None = None,
        counts_all: bool = False,
        served_at: str | None = None,
    ) -> None:
        self._view = view
        self._store = store
        self._address = address
        self._served_at = served_at
        self._run_id = run_id
        self._points_read = 0
        self._counts_all = counts_all
        self._is_named = False
        """Whether a rollout has named the run: from then on, one that names none is somebody else's."""
        self._began = time.monotonic()
        self._progress = RolloutProgress(self._began)
        self._finished_before: dict[str, int] = {}
        self._announced: deque[str] = deque()  # by any thread
        self._tasks: list[asyncio.Task[None]] = []
        self._is_listening, self._is_ending = asyncio.Event(), asyncio.Event()

    async def __aenter__(self) -> Self:
        if self._view is not None:
            self._tasks = [
                asyncio.create_task(self._guarded(work, self._view), name="console")
                for work in (self._follow, self._show)
            ]
            await self._is_listening.wait()  # before the training begins
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._view is not None:
            await self._guarded(self._finish, self._view)

    async def _finish(self, view: View) -> None:
        self._show_announced(view)
        view.finish(self._progress.figures(time.monotonic()), self._address)

    @property
    def is_shown(self) -> bool:
        return self._view is not None

    def announce(self, text: str) -> None:
        """Have a text shown; from any thread."""
        self._announced.append(text)

    def _show_announced(self, view: View) -> None:
        while self._announced:
            view.announce(self._announced.popleft())

    def conclude(self, verdict: Verdict) -> None:
        """Say what was gained, or why nothing was."""
        if self._view is not None:
            self._view.conclude(verdict, has_steps=self._points_read > 0)

    async def summary(self) -> dict[str, Any]:
        """How the training went, for its run in the store; empty if nothing is shown."""
        if self._view is None:
            return {}
        await self._guarded(self._catch_up, self._view)
        figures = self._progress.figures(time.monotonic())
        return {name: getattr(figures, name) for name in _SUMMARY_FIELDS}

    async def _guarded(self, work: Callable[[View], Awaitable[None]], view: View) -> None:
        try:
            await work(view)
        except Exception as error:  # noqa: BLE001 # the training matters more
            self._go_quiet(error)

    def _go_quiet(self, error: Exception) -> None:
        """Show nothing more, and log why, once."""
        view, self._view = self._view, None
        self._is_listening.set()  # nobody need wait for it
        if view is None:
            return
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        with suppress(Exception):  # of two errors the first is logged
            view.close()
        reason = "the store cannot be subscribed to" if isinstance(error, NotImplementedError) else repr(error)
        logger.warning("The training goes on, but its progress is not shown: %s.", reason)

    # ------------------------------------------------------------------ counting

    async def _follow(self, _view: View) -> None:
        """Count notices as they come, all that are there in one go."""
        notices = self._store.subscribe(["rollout"])
        try:
            await self._query_counts(is_start=True)
            self._is_listening.set()
            await self._count(notices)
        finally:
            close = getattr(notices, "aclose", None)
            if close is not None:
                await close()

    async def _count(self, notices: AsyncIterator[Notice]) -> None:
        counted_at = time.monotonic()
        async for notice in notices:
            if notice.kind == "rollout":
                self._count_rollout(notice)
            elif notice.kind == "gap":
                await self._query_counts()
            # Notices are counted for so long before a rest.
            if time.monotonic() - counted_at >= 0.01:
                await self._rest(REST_SECONDS)
                counted_at = time.monotonic()

    def _count_rollout(self, notice: Notice) -> None:
        """Count a rollout that names this run; until one does, those that name none."""
        if notice.name is not None and notice.name == self._run_id and not self._is_named:
            self._is_named, self._progress = True, RolloutProgress(self._began)
        if self._counts_all or notice.name == (self._run_id if self._is_named else None):
            self._progress.count(notice)

    async def _rest(self, seconds: float) -> None:
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._is_ending.wait(), seconds)

    async def _query_counts(self, *, is_start: bool = False) -> None:
        """Count what the store holds. What is finished at the start is not of this training."""
        own = None if self._counts_all or self._run_id is None or is_start else [self._run_id]
        self._is_named = own is not None and (await self._store.query_rollouts(run_id_in=own, limit=0)).total > 0
        own = own if self._is_named else None
        # How many unfinished rollouts of an earlier training are looked at; further ones are counted when they are
        # claimed.
        found = await self._store.query_rollouts(
            status_in=[status for status in STATUS_ORDER if status not in FINAL_ROLLOUT_STATUSES],
            run_id_in=own,
            limit=1000,
        )
        finished: dict[str, int] = {
            status: (await self._store.query_rollouts(status_in=[status], run_id_in=own, limit=0)).total
            for status in STATUS_ORDER
            if status in FINAL_ROLLOUT_STATUSES
        }
        if is_start:
            self._finished_before = finished
        before = {} if self._is_named else self._finished_before
        self._progress.recount(
            {one.rollout_id: one.status for one in found if self._counts_all or run_id_of(one) in (None, self._run_id)},
            {status: total - before.get(status, 0) for status, total in finished.items()},
        )

    # ------------------------------------------------------------------ reading and showing

    async def _show(self, view: View) -> None:
        view.begin(self._run_id, self._address or self._served_at)
        while not self._is_ending.is_set():
            await self._rest(REFRESH_SECONDS)
            self._show_announced(view)
            # How long a turn of reading may last, so that large rollouts cost no more than small ones.
            await self._read(view, SAMPLES_PER_REFRESH, 0.005)
            await self._read_metrics(view)
            view.show(self._progress.figures(time.monotonic()))

    async def _catch_up(self, view: View) -> None:
        """Count and read what is left at the end."""
        self._is_ending.set()
        for _ in range(MOST_SETTLES):
            known = self._progress.notices
            await asyncio.sleep(SETTLE_SECONDS)
            if self._progress.notices == known:
                break
        for _ in range(2):  # the next page, and the last
            await self._read_metrics(view)
        with suppress(asyncio.TimeoutError):  # what could not be read makes the figures estimates
            await asyncio.wait_for(self._read(view, UNREAD_ROLLOUTS, LAST_READ_SECONDS), LAST_READ_SECONDS)

    async def _read(self, view: View, most: int, seconds: float) -> None:
        """Read some rollouts of which an attempt failed, and some that are finished."""
        progress, deadline = self._progress, time.monotonic() + seconds
        for _ in range(most):
            if progress.unread_failures and time.monotonic() < deadline:
                failure = await self._failure(progress.unread_failures.popleft())
                if failure is not None:
                    progress.failures.append(failure)
                    view.add(failure)
        for _ in range(most):
            if progress.unread and time.monotonic() < deadline:
                sample = await self._sample(*progress.unread.popleft())
                progress.add_sample(sample)
                view.add(sample)

    async def _sample(self, rollout_id: str, status: str) -> Sample:
        """Reward and tokens, from the spans of the newest attempt; the store may have dropped them."""
        try:
            newest_first = await self._store.query_spans(
                rollout_id, "latest", limit=SPANS_PER_ROLLOUT, sort_order="desc"
            )
            spans = list(newest_first)[::-1]
        except SpansEvicted:
            spans = []
        reward = final_reward_of(spans)
        counts = [
            span.attributes.get(name)
            for span in spans
            for name in ("gen_ai.usage.prompt_tokens", "gen_ai.usage.completion_tokens")
        ]
        tokens = sum(int(count) for count in counts if isinstance(count, (int, float)) and math.isfinite(count))
        return Sample(rollout_id, status, reward if reward is not None and math.isfinite(reward) else None, tokens)

    async def _failure(self, rollout_id: str) -> AttemptFailure | None:
        """What the newest attempt that failed says; None if none did."""
        for attempt in reversed(await self._store.query_attempts(rollout_id)):
            if attempt.status in ("failed", "timeout", "unresponsive"):
                note = FailureNote.read(attempt.metadata)
                message = f"the attempt ended as '{attempt.status}'"
                if note is not None:
                    first_line = note.message.strip().partition("\n")[0]
                    message = f"{note.type}: {first_line}" if first_line else note.type
                return AttemptFailure(rollout_id, attempt.attempt_id, message)
        return None

    async def _read_metrics(self, view: View) -> None:
        """Read what the algorithm has added since; of more than fits in a turn, the last ones next time."""
        if self._run_id is None:
            return
        page = await self._store.query_metrics(self._run_id, offset=self._points_read, limit=POINTS_PER_REFRESH)
        for point in page:
            view.add(point)
        self._points_read = max(self._points_read + len(page), page.total - POINTS_PER_REFRESH)
