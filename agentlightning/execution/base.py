"""Execution strategies: where the algorithm and the runners run, and how they reach the store."""

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, runtime_checkable

from agentlightning.env_var import LightningEnvVar, resolve_bool_env_var
from agentlightning.execution.events import ExecutionEvent
from agentlightning.store.base import LightningStore
from agentlightning.utils.log_failures import log_failures

__all__ = [
    "AlgorithmBundle",
    "ExecutionStrategy",
    "IdentifiedRunner",
    "OwnsWorker",
    "PreparingBundle",
    "RunnerBundle",
    "at_start",
    "give_back",
    "owned_by",
    "resolve_managed_store_flag",
]

logger = logging.getLogger(__name__)


class AlgorithmBundle(Protocol):
    """All that the algorithm's side does."""

    async def __call__(self, store: LightningStore, event: ExecutionEvent) -> None: ...


@runtime_checkable
class PreparingBundle(AlgorithmBundle, Protocol):
    """An algorithm's side that brings the store in order before runners on other machines may reach it."""

    on_prepared: Callable[[], Awaitable[None]] | None
    """Awaited by the bundle when the store is in order; a strategy that serves the store sets it."""


OwnsWorker = Callable[[str], bool]
"""Whether an id in the store is that of a worker of ours."""


class RunnerBundle(Protocol):
    """All that one worker does."""

    async def __call__(self, store: LightningStore, worker_id: int, event: ExecutionEvent) -> None: ...


@runtime_checkable
class IdentifiedRunner(RunnerBundle, Protocol):
    """A runner bundle whose workers have ids in the store that the process which starts them knows: it has the work of
    those that die given back."""

    def at_start(self, start: int) -> "IdentifiedRunner":
        """The bundle for this start of its workers, from 0: each start of a worker has an id of its own."""
        ...

    def store_worker_id(self, number: int) -> str:
        """The id of the worker of this number."""
        ...

    def owns_worker(self, worker_id: str) -> bool:
        """Whether an id is that of any of its workers, at any start."""
        ...


def at_start(runner: RunnerBundle, start: int) -> RunnerBundle:
    """The bundle for this start of its workers."""
    return runner.at_start(start) if isinstance(runner, IdentifiedRunner) else runner


def owned_by(runner: RunnerBundle) -> OwnsWorker:
    """Says of an id in the store whether it is one of this bundle's workers."""
    return runner.owns_worker if isinstance(runner, IdentifiedRunner) else lambda worker_id: False


async def give_back(store: LightningStore, runner: RunnerBundle, number: int, start: int, reason: str) -> Sequence[str]:
    """Let others have the work of a worker that has died; returns the ids of its rollouts."""
    with log_failures(logger, "The work of runner-%d could not be given back.", number):
        started = at_start(runner, start)
        if isinstance(started, IdentifiedRunner):
            rollout_ids = await store.mark_worker_lost(started.store_worker_id(number), reason)
            if rollout_ids:
                logger.warning("Given back, because %s: %s.", reason, ", ".join(rollout_ids))
            return rollout_ids
    return ()


def resolve_managed_store_flag(value: bool | None) -> bool:
    """Whether a strategy makes the store reachable itself: as given, else AGL_MANAGED_STORE, else yes."""
    return value if value is not None else resolve_bool_env_var(LightningEnvVar.AGL_MANAGED_STORE, None, fallback=True)


class ExecutionStrategy:
    """Places one algorithm and its runners."""

    n_runners: int = 0
    """How many workers it places; zero if that is not its own to say."""
    is_interrupted: bool = False
    """Whether the last `execute` was ended by KeyboardInterrupt, after which it returns."""

    def execute(self, algorithm: AlgorithmBundle, runner: RunnerBundle, store: LightningStore) -> None:
        """Run both sides until the algorithm is done; returns when all has ended."""
        raise NotImplementedError
