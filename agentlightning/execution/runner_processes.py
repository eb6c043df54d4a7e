"""The processes of runners: waited for, and when one dies, what it was working on is given back."""

import asyncio
import functools
import logging
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from typing import Final

from agentlightning.execution.base import OwnsWorker, RunnerBundle
from agentlightning.execution.events import ExecutionEvent
from agentlightning.execution.processes import Deaths
from agentlightning.store.base import LightningStore
from agentlightning.store.capabilities import is_unable
from agentlightning.store.compound import mark_workers_lost

__all__ = ["LOOK_SECONDS", "RunnerProcesses", "recover_attempts"]

logger = logging.getLogger(__name__)

LOOK_SECONDS: Final = 0.1
"""How often runner processes are looked at."""


class RunnerProcesses:
    """The runner processes of a strategy, and what happens when one dies."""

    def __init__(
        self,
        processes: Sequence[BaseProcess],
        deaths: Deaths,
        runner: RunnerBundle,
        stop: ExecutionEvent,
        allowed_exit_codes: Sequence[int],
    ) -> None:
        self.processes = processes
        self.recovered: list[str] = []
        """Rollouts that were given back."""
        self._allowed = allowed_exit_codes
        self._owns_worker: OwnsWorker | None = getattr(runner, "owns_worker", None)
        self._token: str = getattr(runner, "worker_token", "")
        self._stop = stop
        self._is_dismissed = False
        self._deaths = deaths

    async def until_lost(self, store: LightningStore) -> None:
        """Give back what dead runners were working on; returns when the algorithm would wait for them in vain.

        That is when none is left and one of them died, or when one has failed and told all to stop.
        """
        told: set[int] = set()
        while True:
            while (death := self._deaths.next()) is not None:
                await self._recover(store, death.number, death.exit_code)
                self._deaths.hear(death)
            for number, process in enumerate(self.processes):
                if process.exitcode is not None and number not in told:
                    told.add(number)
                    await self._recover(store, number, process.exitcode)
            codes = [process.exitcode for process in self.processes]
            has_failed = any(code is not None and code not in self._allowed for code in codes)
            if has_failed and not self._is_dismissed and (None not in codes or self._stop.is_set()):
                return
            await asyncio.sleep(LOOK_SECONDS)

    def has_left(self) -> bool:
        """Whether all have ended."""
        return all(process.exitcode is not None for process in self.processes)

    def dismiss(self) -> None:
        """The algorithm needs nobody any more."""
        self._is_dismissed = True
        self._stop.set()

    async def until_ended(self, timeout: float) -> None:
        """Wait for all to end, for so long at most."""
        deadline = asyncio.get_running_loop().time() + timeout
        while any(process.exitcode is None for process in self.processes):
            if asyncio.get_running_loop().time() > deadline:
                return
            await asyncio.sleep(LOOK_SECONDS / 4)

    def give_back_at_the_end(self, store: LightningStore) -> None:
        """Give back what runners were at that had to be killed, so that it does not look as if they still worked."""
        killed = [(number, p.exitcode) for number, p in enumerate(self.processes) if p.exitcode]

        async def give_back() -> None:
            for number, exit_code in killed:
                await self._give_back(store, number, exit_code)

        if killed:
            asyncio.run(give_back())

    async def _recover(self, store: LightningStore, number: int, exit_code: int) -> None:
        if exit_code != 0 and not self._stop.is_set():
            await self._give_back(store, number, exit_code)

    async def _give_back(self, store: LightningStore, number: int, exit_code: int) -> None:
        """Without knowing the ids of the bundle's workers nothing is given back: others may have the same name."""
        if self._owns_worker is None:
            return
        reason = f"process runner-{number} died with exit code {exit_code}"
        try:
            is_lost = functools.partial(self._owns_worker, number=number)
            self.recovered += await recover_attempts(store, self._token, is_lost, reason)
        except Exception:  # the store's own time limits will settle its attempts
            logger.exception("What runner-%d was at could not be given back.", number)


async def recover_attempts(store: LightningStore, token: str, is_lost: Callable[[str], bool], reason: str) -> list[str]:
    """End the open attempts of workers that are lost; returns the ids of their rollouts.

    Args:
        token: Part of the ids of all workers among which they are looked for.
        is_lost: Says of an id whether that worker is.
    """
    recovered: list[str] = []
    try:
        for worker in await store.query_workers(worker_id_contains=token):
            if is_lost(worker.worker_id):
                recovered += await store.mark_worker_lost(worker.worker_id, reason)
    except Exception as error:
        if not is_unable(error):
            raise
        # A store of an earlier release, or a token that only lets us end attempts one by one.
        recovered += await mark_workers_lost(store, is_lost, reason)
    if recovered:
        logger.warning("Given back, because %s: %s.", reason, ", ".join(recovered))
    return recovered
