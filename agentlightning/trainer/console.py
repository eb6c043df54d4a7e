"""The console: follows the store of a training, counts its rollouts, and shows how it goes.

It counts the store's notices and reads a bounded number of finished rollouts now and then; it queries the store for
counts only at the start and when it missed notices. Whatever goes wrong here ends the view, with one line in the log,
and leaves the training alone.
"""

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from typing import Any, Final

from typing_extensions import Self

from agentlightning.errors import SpansEvicted
from agentlightning.runner.failures import FailureNote
from agentlightning.store.base import LightningStore
from agentlightning.store.lifecycle import FINAL_ROLLOUT_STATUSES
from agentlightning.store.selection import run_id_of
from agentlightning.trainer.views import AttemptFailure, Figures, Sample, View
from agentlightning.types import Notice, RolloutStatus
from agentlightning.types.rewards import final_reward_of
from agentlightning.utils.json_values import token_count
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
UNREAD_ROLLOUTS: Final = 256
"""How many finished rollouts wait to be read; when more finish, the older ones are not read at all."""
LAST_READ_SECONDS: Final = 1.0
"""How long the reading of what is left at the end may last."""
SETTLE_SECONDS: Final = 0.05
"""At the end, notices count as complete when none has come for this long."""
MOST_SETTLES: Final = 20
STATUS_ORDER: Final[tuple[RolloutStatus, ...]] = (
    *("queuing", "requeuing", "preparing", "running"),
    *("succeeded", "failed", "cancelled"),
)
"""A rollout's life, in the order in which it is shown."""
_SUMMARY_FIELDS: Final = ("rollouts", "reward_mean", "reward_last", "tokens", "errors", "is_estimate")


class RolloutProgress:
    """Counts what happens in a training; all moments are seconds of one clock.

    Every notice is counted. Rewards, tokens and errors stand in spans and attempts, so the rollouts worth reading are
    queued, the newest if there are too many. Where not all could be read, the figures are estimates and say so.
    """

    def __init__(self, began: float) -> None:
        self._began = began
        self.notices = self._errors = self._samples = self._tokens = self._rewarded = 0
        self.unread: deque[tuple[str, str]] = deque(maxlen=UNREAD_ROLLOUTS)
        """Id and status of finished rollouts that are to be read."""
        self.unread_failures: deque[str] = deque(maxlen=16)
        """Ids of rollouts of which an attempt failed."""
        self.failures: deque[AttemptFailure] = deque(maxlen=3)
        self._counts: dict[str, int] = dict.fromkeys(STATUS_ORDER, 0)
        self._open_statuses: dict[str, str] = {}
        """Status of every rollout that is not finished."""
        self._reward_sum = 0.0
        self._last_rewards: deque[float] = deque(maxlen=32)

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
            self._rewarded += 1
            self._last_rewards.append(sample.reward)

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
            reward_mean=self._reward_sum / self._rewarded if self._rewarded else None,
            reward_last=self._last_rewards[-1] if self._last_rewards else None,
            tokens=round(tokens * finished),
            tokens_per_second=round(tokens * rate, 1),
            errors=self._errors,
            eta_seconds=round(remaining / rate, 1) if rate and remaining else None,
            is_estimate=self._samples + len(self.unread) < finished,
            curve=tuple(self._last_rewards),
            failures=tuple(self.failures),
        )


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
        self.view = view
        """None if nothing is shown, or nothing more."""
        self._store, self._address, self._served_at = store, address, served_at
        self._run_id, self._counts_all = run_id, counts_all
        self._points_read = 0
        self._is_named = False
        """Whether a rollout has named the run: from then on, one that names none is somebody else's."""
        self._began = time.monotonic()
        self._progress = RolloutProgress(self._began)
        self._finished_before: dict[str, int] = {}
        self._announced: deque[str] = deque()
        self.announce = self._announced.append
        """Have a text shown; from any thread."""
        self._is_listening, self._is_ending = asyncio.Event(), asyncio.Event()
        self._following: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        if self.view is not None:
            self._following = asyncio.create_task(self._follow(self.view), name="console")
            await self._is_listening.wait()  # before the training begins
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.summary()

    async def summary(self) -> dict[str, Any]:
        """Show the end of the training; returns how it went, for its run in the store, empty if nothing is shown."""
        self._is_ending.set()
        if self._following is not None:
            await asyncio.wait([self._following])
        figures = self._progress.figures(time.monotonic())
        return {} if self.view is None else {name: getattr(figures, name) for name in _SUMMARY_FIELDS}

    def conclude(self, verdict: Verdict) -> None:
        """Say what was gained, or why nothing was."""
        if self.view is not None:
            self._show_announced(self.view)
            self.view.conclude(verdict, has_steps=self._points_read > 0)

    async def _follow(self, view: View) -> None:
        """Count and show until the end; what goes wrong ends the view, and is logged once."""
        notices = counting = None
        try:
            notices = self._store.subscribe(["rollout"])
            await self._query_counts(is_start=True)
            counting = asyncio.create_task(self._count(notices), name="console-notices")
            view.begin(self._run_id, self._address or self._served_at)
            self._is_listening.set()
            await self._show(view, counting)
        except Exception as error:  # noqa: BLE001 # the training matters more
            self.view = None
            with suppress(Exception):  # of two errors the first is logged
                view.close()
            reason = "the store cannot be subscribed to" if isinstance(error, NotImplementedError) else repr(error)
            logger.warning("The training goes on, but its progress is not shown: %s.", reason)
        finally:
            self._is_listening.set()  # nobody need wait for it
            if counting is not None:
                counting.cancel()
                await asyncio.wait([counting])
            if (close := getattr(notices, "aclose", None)) is not None:
                await close()

    # ------------------------------------------------------------------ counting

    async def _count(self, notices: AsyncIterator[Notice]) -> None:
        """Count notices as they come, all that are there in one go."""
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

    async def _show(self, view: View, counting: "asyncio.Task[None]") -> None:
        """Read and show every so often; at the end, when all is counted that came before it, what is left."""
        while not self._is_ending.is_set():
            await self._rest(REFRESH_SECONDS)
            # How long a turn of reading may last, so that large rollouts cost no more than small ones.
            await self._read_within(view, SAMPLES_PER_REFRESH, 0.005)
            view.show(self._progress.figures(time.monotonic()))
            if counting.done():
                counting.result()
        for _ in range(MOST_SETTLES):
            counted = self._progress.notices
            await asyncio.sleep(SETTLE_SECONDS)
            if self._progress.notices == counted:
                break
        await self._read_within(view, UNREAD_ROLLOUTS, LAST_READ_SECONDS)
        await self._read_metrics(view)  # the last page, after the next
        self._show_announced(view)
        view.finish(self._progress.figures(time.monotonic()), self._address)

    def _show_announced(self, view: View) -> None:
        while self._announced:
            view.announce(self._announced.popleft())

    async def _read_within(self, view: View, most: int, seconds: float) -> None:
        """Read from a store that may not answer: then the figures are estimates."""
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._read(view, most, seconds), LAST_READ_SECONDS)

    async def _read(self, view: View, most: int, seconds: float) -> None:
        """Read what was announced and measured, some rollouts of which an attempt failed, and some that finished."""
        self._show_announced(view)
        await self._read_metrics(view)
        progress, deadline = self._progress, time.monotonic() + seconds
        for _ in range(most):
            if progress.unread_failures and time.monotonic() < deadline:
                for failure in await self._failures(progress.unread_failures.popleft()):
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
            token_count(span.attributes.get(name))
            for span in spans
            for name in ("gen_ai.usage.prompt_tokens", "gen_ai.usage.completion_tokens")
        ]
        tokens = sum(filter(None, counts))
        return Sample(rollout_id, status, reward if reward is not None and math.isfinite(reward) else None, tokens)

    async def _failures(self, rollout_id: str) -> list[AttemptFailure]:
        """What the newest attempt that failed says, if one did."""
        for attempt in reversed(await self._store.query_attempts(rollout_id)):
            if attempt.status in ("failed", "timeout", "unresponsive"):
                note = FailureNote.read(attempt.metadata)
                message = f"the attempt ended as '{attempt.status}'"
                if note is not None:
                    first_line = note.message.strip().partition("\n")[0]
                    message = f"{note.type}: {first_line}" if first_line else note.type
                return [AttemptFailure(rollout_id, attempt.attempt_id, message)]
        return []

    async def _read_metrics(self, view: View) -> None:
        """Read what the algorithm has added since; of more than fits in a turn, the last ones next time."""
        if self._run_id is None:
            return
        page = await self._store.query_metrics(self._run_id, offset=self._points_read, limit=POINTS_PER_REFRESH)
        for point in page:
            view.add(point)
        self._points_read = max(self._points_read + len(page), page.total - POINTS_PER_REFRESH)
