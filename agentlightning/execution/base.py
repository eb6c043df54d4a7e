"""Execution strategies: where the algorithm and the runners run, and how they reach the store."""

from collections.abc import Awaitable, Callable
from typing import Protocol, runtime_checkable

from agentlightning.env_var import LightningEnvVar, resolve_bool_env_var
from agentlightning.execution.events import ExecutionEvent
from agentlightning.store.base import LightningStore

__all__ = [
    "AlgorithmBundle",
    "ExecutionStrategy",
    "OwnsWorker",
    "PreparingBundle",
    "RunnerBundle",
    "resolve_managed_store_flag",
]


class AlgorithmBundle(Protocol):
    """All that the algorithm's side does."""

    async def __call__(self, store: LightningStore, event: ExecutionEvent) -> None: ...


@runtime_checkable
class PreparingBundle(AlgorithmBundle, Protocol):
    """An algorithm's side that brings the store in order before runners on other machines may reach it."""

    on_prepared: Callable[[], Awaitable[None]] | None
    """Awaited by the bundle when the store is in order; a strategy that serves the store sets it."""


class OwnsWorker(Protocol):
    """Whether an id in the store is that of a worker of ours, and of this number if one is given."""

    def __call__(self, worker_id: str, number: int | None = None) -> bool: ...


class RunnerBundle(Protocol):
    """All that one worker does; one with a method `owns_worker` has what its dead workers claimed given back."""

    async def __call__(self, store: LightningStore, worker_id: int, event: ExecutionEvent) -> None: ...


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
