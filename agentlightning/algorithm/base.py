"""Algorithm: what learns. It reads and writes the store, and never meets a runner."""

import asyncio
import inspect
import weakref
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from agentlightning.adapter.base import TraceAdapter
from agentlightning.errors import ConfigurationError
from agentlightning.store.base import LightningStore
from agentlightning.store.forwarding import BlockingStore
from agentlightning.types import Dataset, NamedResources, TaskInput
from agentlightning.utils.json_values import JsonObject

if TYPE_CHECKING:
    from agentlightning.client import AgentLightningClient

__all__ = ["INITIAL_RESOURCES_ID", "Algorithm", "Tasks"]

Tasks: TypeAlias = Dataset[TaskInput]
"""A data set of tasks of any kind."""
INITIAL_RESOURCES_ID: Final = "default"
"""Under which the trainer publishes the initial resources."""


class Algorithm:
    """Base of algorithms. The trainer sets what it works with before it calls `run`."""

    # Class-level, so that subclasses need not call `super().__init__()`.
    reads_adapter: bool = True
    """Whether it learns from what the trainer's adapter makes of spans; if not, the trainer refuses to be given one."""
    _trainer_ref: "weakref.ref[Any] | None" = None
    _llm_proxy: Any = None
    _store: LightningStore | None = None
    _blocking_store: BlockingStore | None = None
    """While a plain `run` is called."""
    _initial_resources: NamedResources | None = None
    _adapter: TraceAdapter[Any] | None = None
    _run_id: str | None = None

    def is_async(self) -> bool:
        """Whether `run` is a coroutine function."""
        return inspect.iscoroutinefunction(self.run)

    def set_trainer(self, trainer: Any) -> None:
        self._trainer_ref = weakref.ref(trainer)

    @property
    def has_trainer(self) -> bool:
        """Whether a trainer runs it."""
        return self._trainer_ref is not None and self._trainer_ref() is not None

    def get_trainer(self) -> Any:
        """The trainer; ValueError if there is none."""
        trainer = None if self._trainer_ref is None else self._trainer_ref()
        if trainer is None:
            raise self._missing("trainer")
        return trainer

    def set_llm_proxy(self, llm_proxy: Any) -> None:
        self._llm_proxy = llm_proxy

    def get_llm_proxy(self) -> Any:
        """The proxy; None if the trainer has none."""
        return self._llm_proxy

    def set_adapter(self, adapter: TraceAdapter[Any]) -> None:
        self._adapter = adapter

    def get_adapter(self) -> TraceAdapter[Any]:
        """What turns spans into the algorithm's data; ValueError if there is none."""
        if self._adapter is None:
            raise self._missing("adapter")
        return self._adapter

    def set_store(self, store: LightningStore) -> None:
        self._store = store

    def get_store(self) -> LightningStore:
        """The store; ValueError if there is none.

        In a plain `run` it is a `BlockingStore`, whose operations need no `await`; in coroutines that such a `run`
        runs, it is the store itself.
        """
        if self._store is None:
            raise self._missing("store")
        if self._blocking_store is not None and not _is_in_event_loop():
            return self._blocking_store  # type: ignore[return-value] # the same operations, without await
        return self._store

    @contextmanager
    def blocking_store(self) -> Iterator[BlockingStore]:
        """Within it, synchronous code gets a store whose operations block; it is closed at the end."""
        if self._store is None:
            raise self._missing("store")
        before, store = self._blocking_store, BlockingStore(self._store)
        self._blocking_store = store
        try:
            yield store
        finally:
            store.close()
            if self._blocking_store is store:  # and not that of a later run, which began when this was abandoned
                self._blocking_store = before

    def abandon(self) -> None:
        """Close the store to a plain `run` that goes on, which nobody can end: its next call of the store raises."""
        if self._blocking_store is not None:
            self._blocking_store.close()

    def set_initial_resources(self, resources: NamedResources) -> None:
        self._initial_resources = resources

    def get_initial_resources(self) -> NamedResources | None:
        """What the user starts from; None if nothing was given."""
        return self._initial_resources

    def set_run_id(self, run_id: str | None) -> None:
        self._run_id = run_id

    def get_run_id(self) -> str | None:
        """The run in the store to which metrics belong; None outside of a trainer."""
        return self._run_id

    def run_summary(self) -> JsonObject:
        """What the run in the store keeps of the last run beside its counts, as JSON; override it to keep a result."""
        return {}

    def resume_hint(self) -> str:
        """One sentence for somebody who stopped the run: how to go on; empty if there is nothing to say."""
        return ""

    def _missing(self, part: str) -> ConfigurationError:
        return ConfigurationError(
            f"{type(self).__name__} has no {part}; run it through a Trainer, or call set_{part} first."
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)

    async def before_runners(self) -> None:
        """Bring the store in order before any runner claims; the trainer awaits it once, right before `run`.

        Override it to withdraw what an interrupted training left in the queue. A runner that others started, on a store
        that a server of its own serves, does not wait for it.
        """

    def run(
        self, train_dataset: Tasks | None = None, val_dataset: Tasks | None = None
    ) -> None | Coroutine[Any, Any, None]:
        """Learn; plain or a coroutine function."""
        raise NotImplementedError(f"{type(self).__name__} must define run(train_dataset, val_dataset).")

    def get_client(self) -> "AgentLightningClient":
        """A client of the legacy protocol, for algorithms that serve it themselves. Deprecated."""
        raise NotImplementedError(f"{type(self).__name__} serves no legacy clients.")


def _is_in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
