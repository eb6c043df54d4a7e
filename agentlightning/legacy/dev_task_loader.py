"""DevTaskLoader: a client without a server, for trying an agent on a few tasks in one process."""

import time
from collections.abc import Sequence
from typing import Any, ClassVar
from urllib.parse import quote, unquote

from agentlightning.errors import ConfigurationError, NotFound
from agentlightning.legacy.client import AgentLightningClient, Callback
from agentlightning.types import NamedResources, ResourcesUpdate, RolloutLegacy, RolloutMode, Task, TaskInput
from agentlightning.utils.deprecation import deprecated
from agentlightning.utils.json_values import JsonObject


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
        super().__init__(**{"endpoint": "local://", **kwargs})
        if not tasks:
            raise ConfigurationError("DevTaskLoader requires at least one task; tasks is empty.")
        if len({isinstance(task, Task) for task in tasks}) > 1:
            raise ConfigurationError(
                "All tasks must be either Task or TaskInput objects; tasks holds both, wrap the inputs in Task."
            )
        self._tasks = list(tasks)
        self._task_index = 0
        if not isinstance(resources, ResourcesUpdate):
            resources = ResourcesUpdate(resources_id="local", resources=resources)
        self._resources_update = resources
        self._rollouts: list[RolloutLegacy] = []

    @property
    def rollouts(self) -> list[RolloutLegacy]:
        """What was posted, in order."""
        return self._rollouts

    def _claim(self) -> Task | None:
        """The next task; after the last one comes the first again. None of a closed loader."""
        if self._closed.is_set():
            return None
        index = self._task_index
        self._task_index = (index + 1) % len(self._tasks)
        task = self._tasks[index]
        return task.model_copy() if isinstance(task, Task) else self._numbered(index, task)

    def submit_task(
        self,
        sample: TaskInput,
        mode: RolloutMode | None = None,
        resources_id: str | None = None,
        metadata: JsonObject | None = None,
    ) -> str | None:
        """Append a task to the list."""
        task = self._numbered(len(self._tasks), sample, mode=mode, metadata=metadata or {})
        self._tasks.append(task if resources_id is None else task.model_copy(update={"resources_id": resources_id}))
        return task.rollout_id

    def submit_tasks(
        self, samples: Sequence[TaskInput], mode: RolloutMode | None = None, resources_id: str | None = None
    ) -> list[str] | None:
        """Append tasks to the list."""
        return [rollout_id for sample in samples if (rollout_id := self.submit_task(sample, mode, resources_id))]

    def _numbered(self, index: int, sample: TaskInput, **fields: Any) -> Task:
        ids = {"rollout_id": f"local_task_{index + 1:03d}", "resources_id": self._resources_update.resources_id}
        return Task(input=sample, create_time=time.time(), **ids, **fields)

    def _resources(self, name: str) -> ResourcesUpdate | None:
        """The bundle, as the latest resources and under its own id."""
        own_id = self._resources_update.resources_id
        if name not in ("latest", quote(own_id, safe="")):
            raise NotFound(f"Resource ID '{unquote(name)}' not found; the only one here is '{own_id}'.")
        return self._resources_update

    def on_resources_update(self, callback: Callback) -> Callback:
        """Call back once, here and now: local resources do not change."""
        callback(self._resources_update)
        return callback

    def _deliver(self, rollouts: Sequence[RolloutLegacy], *, is_batch: bool) -> JsonObject | None:
        """Keep results."""
        ids = [rollout.rollout_id for rollout in rollouts]
        for rollout_id in ids:
            self._open_tasks.pop(rollout_id, None)
        self._rollouts.extend(rollouts)
        return {"status": "received", **({"rollout_ids": ids} if is_batch else {"rollout_id": ids[0]})}

    def __repr__(self) -> str:
        return f"DevTaskLoader(num_tasks={len(self._tasks)}, resources={self._resources_update.resources})"
