"""The client without a server."""

import asyncio
from typing import Any

import pytest

from agentlightning.legacy.dev_task_loader import DevTaskLoader
from agentlightning.types import ResourcesUpdate

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")


def test_inputs_become_numbered_tasks_and_begin_anew_at_the_end(resources: Any) -> None:
    loader = DevTaskLoader(["a", "b"], resources)

    tasks = [loader.poll_next_task() for _ in range(3)]

    assert [task.rollout_id for task in tasks] == ["local_task_001", "local_task_002", "local_task_001"]
    assert [task.input for task in tasks] == ["a", "b", "a"]
    assert {task.resources_id for task in tasks} == {"local"}
    assert all(task.create_time is not None for task in tasks)
    assert (loader.task_count, loader._task_index) == (3, 1)


def test_a_mapping_of_resources_is_wrapped(resources: Any) -> None:
    loader = DevTaskLoader(["a"], resources)

    latest = loader.get_latest_resources()

    assert (latest.resources_id, latest.resources) == ("local", resources)
    assert loader.get_resources_by_id("local") == latest == loader._resources_update


def test_a_bundle_of_resources_keeps_its_id(resources: Any) -> None:
    bundle = ResourcesUpdate(resources_id="mine", resources=resources)
    loader = DevTaskLoader(["a"], bundle)

    assert loader.get_latest_resources() is bundle
    assert loader.poll_next_task().resources_id == "mine"


def test_another_id_is_not_found(resources: Any) -> None:
    with pytest.raises(ValueError, match="Resource ID 'other' not found; the only one here is 'local'"):
        DevTaskLoader(["a"], resources).get_resources_by_id("other")


def test_a_submitted_task_is_served_after_the_others(resources: Any) -> None:
    loader = DevTaskLoader(["a"], resources)

    rollout_id = loader.submit_task("b", "val", None, {"k": "v"})
    more = asyncio.run(loader.submit_tasks_async(["c", "d"]))
    tasks = [loader.poll_next_task() for _ in range(4)]

    assert (rollout_id, *more) == ("local_task_002", "local_task_003", "local_task_004")
    assert [task.rollout_id for task in tasks] == ["local_task_001", rollout_id, *more]
    assert (tasks[1].input, tasks[1].mode, tasks[1].metadata) == ("b", "val", {"k": "v"})


def test_a_callback_is_told_of_the_bundle_at_once(resources: Any) -> None:
    told: list[ResourcesUpdate] = []
    loader = DevTaskLoader(["a"], resources)

    loader.on_resources_update(told.append)

    assert told == [loader.get_latest_resources()]
