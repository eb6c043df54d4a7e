"""DevTaskLoader: a client without a server, for trying an agent on a few tasks in one process."""

import time
from collections.abc import Sequence
from typing import Any, ClassVar

from agentlightning.errors import ConfigurationError, NotFound
from agentlightning.legacy.client import AgentLightningClient, Json, Steps
from agentlightning.legacy.resources_watch import Callback
from agentlightning.types import NamedResources, ResourcesUpdate, RolloutLegacy, RolloutMode, Task, TaskInput
from agentlightning.utils.deprecation import deprecated

__all__ = ["DevTaskLoader"]

LOCAL_ENDPOINT = "local://"
LOCAL_RESOURCES_ID = "local"


class DevTaskLoader(AgentLightningClient):
    """Serves a list of tasks over and over, with one bundle of resources, and keeps what is posted."""

    _warning_stacklevel: ClassVar[int] = 4
    """The parent's warning skips our `__init__` and points at its caller as well."""
    _has_server: ClassVar[bool] = False

    def __init__(
        self, tasks: list[TaskInput] | list[Task], resources: NamedResources | ResourcesUpdate, **kwargs: Any
    ) -> None:
        """Take tasks and resources.

        Args:
            tasks: Inputs, or ready tasks, but not a mixture of both.
            resources: What every task is given.
            kwargs: Options of the parent class.
        """
        deprecated("DevTaskLoader is deprecated; use Trainer.dev.")
        super().__init__(**{"endpoint": LOCAL_ENDPOINT, **kwargs})
        if not tasks:
            raise ConfigurationError("DevTaskLoader requires at least one task; tasks is empty.")
        if len({isinstance(task, Task) for task in tasks}) > 1:
            raise ConfigurationError(
                "All tasks must be either Task or TaskInput objects; tasks holds both, wrap the inputs in Task."
            )
        self._tasks = list(tasks)
        self._task_index = 0
        self._resources_update = (
            resources
            if isinstance(resources, ResourcesUpdate)
            else ResourcesUpdate(resources_id=LOCAL_RESOURCES_ID, resources=resources)
        )
        self._rollouts: list[RolloutLegacy] = []

    @property
    def rollouts(self) -> list[RolloutLegacy]:
        """What was posted, in order."""
        return self._rollouts

    def _poll(self, timeout: float | None) -> Steps[Task | None]:
        """The next task, without a wait; after the last one comes the first again."""
        yield from ()
        index = self._task_index
        self._task_index = (index + 1) % len(self._tasks)
        self.task_count += 1
        task = self._tasks[index]
        polled = task.model_copy() if isinstance(task, Task) else self._numbered(index, task)
        self._open_tasks.add(polled)
        return polled

    def _submit(
        self, sample: TaskInput, mode: RolloutMode | None, resources_id: str | None, metadata: dict[str, Any] | None
    ) -> Steps[str | None]:
        """Append a task to the list."""
        yield from ()
        task = self._numbered(len(self._tasks), sample)
        given = {"mode": mode, "resources_id": resources_id or task.resources_id, "metadata": metadata or {}}
        self._tasks.append(task.model_copy(update=given))
        return task.rollout_id

    def _numbered(self, index: int, sample: TaskInput) -> Task:
        return Task(
            rollout_id=f"local_task_{index + 1:03d}",
            input=sample,
            resources_id=self._resources_update.resources_id,
            create_time=time.time(),
        )

    def _resources(self, resource_id: str | None) -> Steps[ResourcesUpdate | None]:
        """The bundle, if this is its id; None for a task that names none."""
        yield from ()
        if resource_id is None:
            return None
        if resource_id != self._resources_update.resources_id:
            raise NotFound(
                f"Resource ID '{resource_id}' not found; the only one here is '{self._resources_update.resources_id}'."
            )
        return self._resources_update

    def _latest_resources(self) -> Steps[ResourcesUpdate | None]:
        yield from ()
        return self._resources_update

    def on_resources_update(self, callback: Callback) -> Callback:
        """Call back once, here and now: local resources do not change."""
        callback(self._resources_update)
        return callback

    def _post(self, rollout: RolloutLegacy) -> Steps[Json | None]:
        """Keep a result."""
        yield from ()
        self._open_tasks.remove(rollout.rollout_id)
        self._rollouts.append(rollout)
        return {"status": "received", "rollout_id": rollout.rollout_id}

    def _post_many(self, rollouts: Sequence[RolloutLegacy]) -> Steps[Json | None]:
        yield from ()
        self._rollouts.extend(rollouts)
        return {"status": "received", "rollout_ids": [rollout.rollout_id for rollout in rollouts]}

    def __repr__(self) -> str:
        return f"DevTaskLoader(num_tasks={len(self._tasks)}, resources={self._resources_update.resources})"
