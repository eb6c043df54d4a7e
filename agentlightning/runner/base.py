"""Runner: claims rollouts from the store, runs the agent on them, and reports."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from typing_extensions import Self

from agentlightning.litagent import LitAgent
from agentlightning.store.base import LightningStore
from agentlightning.types import Hook, NamedResources, ParallelWorkerBase, Rollout, RolloutMode
from agentlightning.types.lifecycle import Component, lifecycle_of
from agentlightning.utils.log_failures import log_failures
from agentlightning.utils.loop_thread import run_in_loop

if TYPE_CHECKING:
    from agentlightning.execution.events import ExecutionEvent

__all__ = ["Runner"]

logger = logging.getLogger(__name__)

T_task = TypeVar("T_task")
_T = TypeVar("_T")


class Runner(Component, ParallelWorkerBase, Generic[T_task]):
    """Base of runners; `T_task` is the type of the tasks."""

    _kind = "runner"

    def init(self, agent: LitAgent[T_task], **kwargs: Any) -> None:
        """Take the agent; called once, before workers start."""
        raise NotImplementedError

    def init_worker(self, worker_id: int, store: LightningStore, **kwargs: Any) -> None:
        """Take the store, in the worker that will use it."""
        raise NotImplementedError

    def run(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("A runner is not run; await `iter` for the queue, or `step` for one task.")

    def teardown(self, *args: Any, **kwargs: Any) -> None:
        """Undo `init`."""
        raise NotImplementedError

    def teardown_worker(self, worker_id: int, *args: Any, **kwargs: Any) -> None:
        """Undo `init_worker`."""
        raise NotImplementedError

    @contextmanager
    def run_context(
        self,
        *,
        agent: LitAgent[T_task],
        store: LightningStore,
        hooks: Sequence[Hook] | None = None,
        worker_id: int | None = None,
    ) -> Iterator[Self]:
        """The runner, ready to `step` and `iter`: for scripts and notebooks without a trainer."""
        number = worker_id or 0
        with ExitStack() as undoing:
            self.init(agent=agent, hooks=hooks)
            undoing.callback(_quietly, self.teardown, "Error during runner teardown")
            self.init_worker(worker_id=number, store=store)
            undoing.callback(_quietly, lambda: self.teardown_worker(number), "Error during runner worker teardown")
            yield self

    def start(self) -> None:
        """Work off the queue as `iter` does, in the background, until `stop`; call `init` and `init_worker` before."""
        lifecycle_of(self).step("start")
        lifecycle_of(self).work_in_background(lambda: run_in_loop(self._iter_started(), "agl-runner"))

    async def _iter_started(self) -> None:
        """As `iter`, of a runner that has taken the step `start`."""
        await self.iter()

    async def iter(self, *, event: "ExecutionEvent | None" = None) -> None:
        """Work off the queue until the event is set."""
        raise NotImplementedError

    async def step(
        self,
        input: T_task,
        *,
        resources: NamedResources | None = None,
        mode: RolloutMode | None = None,
        event: "ExecutionEvent | None" = None,
    ) -> Rollout:
        """Run the agent on one task, past the queue, and return the finished rollout."""
        raise NotImplementedError

    def step_sync(
        self, input: T_task, *, resources: NamedResources | None = None, mode: RolloutMode | None = None
    ) -> Rollout:
        """As `step`, for plain code, also where an event loop runs in the calling thread."""
        return run_in_loop(self.step(input, resources=resources, mode=mode), "agl-runner")


def _quietly(undo: Callable[[], object], message: str) -> None:
    with log_failures(logger, message):  # what the body raised matters more
        undo()
