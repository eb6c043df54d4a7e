"""Heartbeats: a worker reports to the store that it lives, and how its machine is doing."""

import asyncio
import logging
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Literal

from agentlightning.store.base import LightningStore
from agentlightning.store.claims import RUNNING_ATTEMPTS
from agentlightning.store.lifecycle import HEARTBEAT_INTERVAL
from agentlightning.utils.daemon_threads import DaemonThreads
from agentlightning.utils.log_failures import repeat
from agentlightning.utils.loop_thread import LoopThread
from agentlightning.utils.system_snapshot import system_snapshot

logger = logging.getLogger(__name__)

LaunchMode = Literal["thread", "asyncio"]
RunningAttempts = Callable[[], Sequence[tuple[str, str]]]
"""Gives the ids of rollout and attempt of all that a worker works on; called in any thread."""
LostAttempts = Callable[[Sequence[tuple[str, str]]], object]
"""Takes the ids of those that are the worker's no more; called in any thread."""


@dataclass(frozen=True)
class Heartbeat:
    """How often a worker reports, and from where."""

    interval_seconds: float = 10.0
    """Zero or less: never."""
    jitter_seconds: float = 0.5
    """Each pause is longer or shorter by up to this, so that many workers do not report at once."""
    launch_mode: LaunchMode = "thread"
    """`thread` goes on while an agent keeps the event loop busy."""
    includes_gpu: bool = False

    @contextmanager
    def beating(
        self, store: LightningStore, worker_id: str, running: RunningAttempts = tuple, lose: LostAttempts = tuple
    ) -> Iterator[None]:
        """Beat while the context lasts; each beat says what is `running`, and its answer what the worker has lost."""
        if self.interval_seconds <= 0:
            yield
        elif self.launch_mode == "asyncio":
            task = asyncio.create_task(self._beat(store, worker_id, running, lose), name=f"heartbeat-{worker_id}")
            try:
                yield
            finally:
                task.cancel()
        else:
            thread = LoopThread(f"heartbeat-{worker_id}")
            beating = thread.start_soon(self._beat(store, worker_id, running, lose))
            try:
                yield
            finally:
                beating.cancel()
                thread.stop()

    async def _beat(self, store: LightningStore, worker_id: str, running: RunningAttempts, lose: LostAttempts) -> None:
        await asyncio.sleep(random.uniform(0, self.jitter_seconds))
        # In threads that do not keep us from ending, should a driver or a disk hang.
        with closing(DaemonThreads("snapshot")) as threads:

            async def beat() -> None:
                snapshot = await threads.run(lambda: system_snapshot(self.includes_gpu))
                named = [list(ids) for ids in running()]
                stats = {**snapshot, HEARTBEAT_INTERVAL: self.interval_seconds}
                worker = await store.update_worker(worker_id, {**stats, RUNNING_ATTEMPTS: named} if named else stats)
                if lost := getattr(worker, "lost_attempts", ()):  # a store of the user's own may not know leases
                    lose(lost)

            def pause() -> float:
                return max(0.01, self.interval_seconds + random.uniform(-1, 1) * self.jitter_seconds)

            await repeat(beat, pause, logger, "The heartbeat of %s did not reach the store", worker_id)
