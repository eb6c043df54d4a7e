"""What a training shows while it runs, and at its end.

The console listens to the store's notices and reads a bounded number of finished rollouts now and then; it never asks
the store how things stand, except at the start and when it missed notices. It rests between its turns, during which
nothing is told to it and nobody pays for it. Whatever goes wrong here ends the show, with one line in the log, and
leaves the training alone.
"""

import asyncio
import logging
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, Final, Literal, get_args

from typing_extensions import Self, assert_never

from agentlightning.env_var import LightningEnvVar, resolve_str_env_var
from agentlightning.errors import ConfigurationError, SpansEvicted
from agentlightning.store.base import LightningStore
from agentlightning.store.lifecycle import FINAL_ROLLOUT_STATUSES
from agentlightning.trainer.line_view import LineView
from agentlightning.trainer.progress import (
    STATUS_ORDER,
    UNREAD_ROLLOUTS,
    Failure,
    Figures,
    Progress,
    last_failed,
    noted_failure,
    recorded_failure,
    sample_of,
)
from agentlightning.trainer.views import JsonView, View
from agentlightning.types import Notice, Span

__all__ = ["Console", "ProgressMode", "resolved_mode"]

logger = logging.getLogger(__name__)

ProgressMode = Literal["auto", "rich", "plain", "json", "off"]
_Work = Callable[[], Coroutine[Any, Any, None]]

_DUMB_TERMINALS: Final = ("dumb", "unknown")
"""Values of TERM that rich draws nothing on."""

REFRESH_SECONDS: Final = 0.5
"""Between two turns of reading and showing."""
LISTEN_SECONDS: Final = 0.1
"""Between two turns of listening. Longer rests mean larger batches, which burden the garbage collector."""
SAMPLES_PER_REFRESH: Final = 16
"""How many finished rollouts are read in a turn, and how many failed attempts."""
READ_SECONDS: Final = 0.005
"""How long a turn of reading may last, so that large rollouts cost no more than small ones."""
POINTS_PER_REFRESH: Final = 16
"""How many points of metrics are read in a turn, the last ones."""
SPANS_PER_ROLLOUT: Final = 500
"""How many spans of a rollout are read, the last ones."""
LAST_READ_SECONDS: Final = 1.0
"""How long the reading of what is left at the end may last."""
SETTLE_SECONDS: Final = 0.05
"""At the end, notices count as complete when none has come for this long."""
MOST_SETTLES: Final = 20
LEFTOVER_ROLLOUTS: Final = 1000
"""How many unfinished rollouts of an earlier training are looked at; further ones are counted when they are claimed."""


def resolved_mode(mode: ProgressMode | None) -> Literal["rich", "plain", "json", "off"]:
    """What is shown: as the caller says, else AGL_PROGRESS, else a live view on a terminal and lines elsewhere.

    None is `off`.
    """
    if mode is None:
        return "off"
    asked = mode if mode != "auto" else resolve_str_env_var(LightningEnvVar.AGL_PROGRESS, fallback="auto")
    for known in get_args(ProgressMode):
        if str(asked).strip().lower() == known:
            chosen: ProgressMode = known
            break
    else:
        source = "progress" if mode != "auto" else LightningEnvVar.AGL_PROGRESS.value
        raise ConfigurationError(f"{source} must be one of {', '.join(get_args(ProgressMode))}; it is {asked!r}.")
    if chosen != "auto":
        return chosen
    has_terminal = sys.stdout is not None and sys.stdout.isatty() and os.environ.get("TERM") not in _DUMB_TERMINALS
    return "rich" if has_terminal else "plain"


def _view_for(mode: ProgressMode | None, name: str) -> View | None:
    chosen = resolved_mode(mode)
    if chosen == "rich":
        from rich.console import Console as Terminal

        from agentlightning.trainer.terminal_view import TerminalView

        return TerminalView(Terminal(), name)
    if chosen == "plain":  # beside what the program itself writes to standard output
        return None if sys.stderr is None else LineView(sys.stderr, name)
    if chosen == "json":
        return JsonView(sys.stdout, name)
    if chosen == "off":
        return None
    assert_never(chosen)


class Console:
    """Follows a store and shows how a training goes."""

    def __init__(
        self,
        mode: ProgressMode | None,
        store: LightningStore,
        *,
        name: str,
        address: str | None,
        run_id: str | None = None,
        served_at: str | None = None,
        view: View | None = None,
    ) -> None:
        """Nothing is shown yet.

        Args:
            mode: `auto` is `rich` on a terminal, else `plain`; AGL_PROGRESS may say otherwise.
            name: What the training is called.
            address: Where the store can be found again; None, if nowhere.
            run_id: The run whose metrics are shown; None shows none.
            served_at: Where the store can be reached while the training runs, if that is not its address.
            view: Shows it in place of what the mode says.
        """
        self._store = store
        self._address = address
        self._served_at = served_at
        self._run_id = run_id
        self._has_metrics = False
        """Whether there may be metrics to read."""
        self._points_read = 0
        self._view = view if view is not None else _view_for(mode, name)
        self._progress = Progress(time.monotonic())
        self._finished_before: dict[str, int] = {}
        self._notices: AsyncIterator[Notice] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._is_ending = asyncio.Event()

    async def __aenter__(self) -> Self:
        if self._view is not None:
            try:
                self._notices = self._store.subscribe(["rollout"] if self._run_id is None else ["rollout", "metrics"])
                self._view.begin(self._run_id, self._address or self._served_at)
            except Exception as error:  # noqa: BLE001 # the training matters more
                self._go_quiet(error)
            else:
                self._begin(partial(self._follow, self._notices), "console-follow")
                self._begin(partial(self._show, self._view), "console-show")
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        try:
            await self._end_tasks()
        finally:
            self._finish()

    async def summary(self) -> dict[str, Any]:
        """How the training went, for its run in the store; empty if nothing is shown."""
        view = self._view
        if view is None:
            return {}
        await self._guarded(partial(self._catch_up, view))
        return _in_short(self._progress.figures(time.monotonic()))

    # ------------------------------------------------------------------ tasks

    def _begin(self, work: _Work, name: str) -> None:
        self._tasks.append(asyncio.create_task(self._guarded(work), name=name))

    async def _guarded(self, work: _Work) -> None:
        try:
            await work()
        except Exception as error:  # noqa: BLE001 # as above
            self._go_quiet(error)

    def _go_quiet(self, error: Exception) -> None:
        """Show nothing more, and say why, once."""
        view, self._view = self._view, None
        if view is None:
            return
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        with suppress(Exception):  # of two faults the first is told
            view.close()
        reason = "the store cannot be subscribed to" if isinstance(error, NotImplementedError) else repr(error)
        logger.warning("The training goes on, but its progress is not shown: %s.", reason)

    async def _end_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        close = getattr(self._notices, "aclose", None)
        if close is not None:
            await close()

    def _finish(self) -> None:
        if self._view is None:
            return
        try:
            self._view.finish(self._progress.figures(time.monotonic()), self._address)
        except Exception as error:  # noqa: BLE001 # as above
            self._go_quiet(error)

    # ------------------------------------------------------------------ listening

    async def _follow(self, notices: AsyncIterator[Notice]) -> None:
        """Count notices, all that are there in one go, then rest."""
        await self._look(is_start=True)
        turn = _Turn()
        async for notice in notices:
            if notice.kind == "rollout":
                self._progress.count(notice)
            elif notice.kind == "gap":
                self._has_metrics = self._run_id is not None
                await self._look()
            elif notice.name == self._run_id:
                self._has_metrics = True
            if turn.is_over:
                await self._rest(LISTEN_SECONDS)
                turn = _Turn()

    async def _rest(self, seconds: float) -> None:
        if not self._is_ending.is_set():
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._is_ending.wait(), seconds)

    async def _look(self, *, is_start: bool = False) -> None:
        """Count what the store holds. What is finished at the start is not of this training."""
        unfinished = [status for status in STATUS_ORDER if status not in FINAL_ROLLOUT_STATUSES]
        found = await self._store.query_rollouts(status_in=unfinished, limit=LEFTOVER_ROLLOUTS)
        totals: dict[str, int] = {}
        for status in STATUS_ORDER:
            if status in FINAL_ROLLOUT_STATUSES:
                totals[status] = (await self._store.query_rollouts(status_in=[status], limit=0)).total
        if is_start:
            self._finished_before = totals
        ours = {status: total - self._finished_before[status] for status, total in totals.items()}
        self._progress.recount({rollout.rollout_id: rollout.status for rollout in found}, ours)

    # ------------------------------------------------------------------ reading and showing

    async def _show(self, view: View) -> None:
        while not self._is_ending.is_set():
            await self._rest(REFRESH_SECONDS)
            await self._read(view, SAMPLES_PER_REFRESH, READ_SECONDS)
            await self._read_metrics(view)
            now = time.monotonic()
            self._progress.mark(now)
            view.show(self._progress.figures(now))

    async def _catch_up(self, view: View) -> None:
        """Count and read what is left at the end."""
        self._is_ending.set()
        for _ in range(MOST_SETTLES):
            known = self._progress.notices
            await asyncio.sleep(SETTLE_SECONDS)
            if self._progress.notices == known:
                break
        self._has_metrics = self._run_id is not None  # whether or not a notice has come through
        for _ in range(2):  # the next page, and the last
            await self._read_metrics(view)
        with suppress(asyncio.TimeoutError):  # what could not be read makes the figures estimates
            await asyncio.wait_for(self._read(view, UNREAD_ROLLOUTS, LAST_READ_SECONDS), LAST_READ_SECONDS)

    async def _read(self, view: View, most: int, seconds: float) -> None:
        """Read some rollouts of which an attempt failed, and some that are finished."""
        deadline = time.monotonic() + seconds
        for _ in range(most):
            rollout_id = self._progress.next_failure() if time.monotonic() < deadline else None
            if rollout_id is None:
                break
            failure = await self._failure(rollout_id)
            if failure is not None:
                self._progress.add_failure(failure)
                view.tell_failure(failure)
        for _ in range(most):
            finished = self._progress.next_rollout() if time.monotonic() < deadline else None
            if finished is None:
                break
            sample = sample_of(finished, await self._last_spans(finished.rollout_id, "latest"))
            self._progress.add_sample(sample)
            view.tell_rollout(sample)

    async def _read_metrics(self, view: View) -> None:
        """Read what the algorithm has added since; of more than fits in a turn, the last ones next time."""
        if self._run_id is None or not self._has_metrics:
            return
        self._has_metrics = False
        read = self._points_read
        page = await self._store.query_metrics(self._run_id, offset=read, limit=POINTS_PER_REFRESH)
        for point in page:
            view.tell_metrics(point)
        self._points_read = max(read + len(page), page.total - POINTS_PER_REFRESH)
        self._has_metrics = self._has_metrics or self._points_read < page.total

    async def _failure(self, rollout_id: str) -> Failure | None:
        attempt = last_failed(await self._store.query_attempts(rollout_id))
        if attempt is None:
            return None
        noted = noted_failure(attempt)
        return noted or recorded_failure(attempt, await self._last_spans(rollout_id, attempt.attempt_id))

    async def _last_spans(self, rollout_id: str, attempt_id: str) -> list[Span]:
        """In their order; none if the store has dropped them."""
        try:
            newest_first = await self._store.query_spans(
                rollout_id, attempt_id, limit=SPANS_PER_ROLLOUT, sort_order="desc"
            )
        except SpansEvicted:
            return []
        return list(newest_first)[::-1]


class _Turn:
    """Whether the event loop has gone on to something else since this was made: whether an `await` had to wait."""

    def __init__(self) -> None:
        self.is_over = False
        asyncio.get_running_loop().call_soon(self._end)

    def _end(self) -> None:
        self.is_over = True


def _in_short(figures: Figures) -> dict[str, Any]:
    return {
        "rollouts": dict(figures.rollouts),
        "reward_mean": figures.reward_mean,
        "reward_last": figures.reward_last,
        "tokens": figures.tokens,
        "errors": figures.errors,
        "is_estimate": figures.is_estimate,
    }
