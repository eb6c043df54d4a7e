"""The tasks that a client has polled and not reported yet, so that a bare result finds the task it belongs to.

A result belongs to the task that the same thread, or the same asyncio task, has polled. Tasks that the caller has let
go of do not count: a loop that gives one up and polls the next holds one. So there are several only where the caller
still holds several, and then nothing but an id can tell them apart.
"""

import asyncio
import threading
from typing import Any, NamedTuple
from weakref import ReferenceType, WeakKeyDictionary, ref

from agentlightning.errors import InvalidTransition
from agentlightning.types import Task

__all__ = ["OpenTasks"]


class _Polled(NamedTuple):
    caller: ReferenceType[Any]
    task: ReferenceType[Task]


class OpenTasks:
    """Tasks by who polled them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # protects the three fields below
        self._polled: list[_Polled] = []
        # Kept alive until the next poll, because a caller may hold no more than the task's input: the last task of each
        # caller, and the newest of all, whose caller may be a passing one, such as that of `asyncio.wait_for`.
        self._last: WeakKeyDictionary[Any, Task] = WeakKeyDictionary()
        self._newest: Task | None = None

    def add(self, task: Task) -> None:
        """Note that a task was polled, here."""
        caller = _caller()
        with self._lock:
            self._last[caller] = self._newest = task
            self._polled = [polled for polled in self._polled if polled.task() is not None]
            self._polled.append(_Polled(ref(caller), ref(task)))

    def remove(self, rollout_id: str) -> None:
        """Note that a result was reported, wherever its task was polled."""
        with self._lock:
            self._polled = [one for one in self._polled if (task := one.task()) and task.rollout_id != rollout_id]
            for caller in [caller for caller, task in self._last.items() if task.rollout_id == rollout_id]:
                del self._last[caller]
            if self._newest is not None and self._newest.rollout_id == rollout_id:
                self._newest = None

    def only(self, result: object) -> Task:
        """The task that a bare result belongs to; InvalidTransition if there is none, or more than one."""
        caller = _caller()
        with self._lock:
            held = [(one.caller(), task) for one in self._polled if (task := one.task()) is not None]
        tasks = [task for owner, task in held if owner is caller] or [task for _, task in held]
        if len(tasks) == 1:
            return tasks[0]
        kind = type(result).__name__
        if not tasks:
            raise InvalidTransition(
                f"post_rollout was given a {kind}, and no polled task is without a result; poll one first, or name the "
                "task with rollout_from_result(task, result)."
            )
        ids = sorted(task.rollout_id for task in tasks)
        raise InvalidTransition(
            f"post_rollout was given a {kind}, which may belong to any of {len(ids)} polled tasks, such as '{ids[0]}'; "
            "name the task with rollout_from_result(task, result)."
        )


def _caller() -> Any:
    """The asyncio task that runs, or else the thread."""
    try:
        running = asyncio.current_task()
    except RuntimeError:  # no event loop in this thread
        running = None
    return running or threading.current_thread()
