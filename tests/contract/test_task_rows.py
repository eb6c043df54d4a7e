"""Inputs that are a `Task`, over every back end: stored as the plain input, and a `Task` again for the agent."""

from typing import Any

import pytest

from agentlightning.store import LightningStore
from agentlightning.types import EnqueueRolloutRequest, PromptTemplate, Rollout, Task

ROW = Task(rollout_id="row-7", input={"question": "why"}, mode="val", metadata={"level": 3})


async def by_start(store: LightningStore, **options: Any) -> Rollout:
    return await store.start_rollout(ROW, **options)


async def by_enqueue(store: LightningStore, **options: Any) -> Rollout:
    return await store.enqueue_rollout(input=ROW, **options)


async def by_batch(store: LightningStore, **options: Any) -> Rollout:
    return (await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=ROW, **options)]))[0]


WAYS = [by_start, by_enqueue, by_batch]


@pytest.mark.parametrize("way", WAYS)
async def test_the_input_of_a_task_is_stored_plainly_and_the_task_comes_back(store: LightningStore, way: Any) -> None:
    made = await way(store, metadata={"group": "g"})

    rollout = await store.get_rollout_by_id(made.rollout_id)

    assert rollout is not None
    assert (type(rollout.input), rollout.input, rollout.mode) == (dict, {"question": "why"}, "val")
    assert (rollout.metadata or {})["group"] == "g"
    task = Task.of_rollout(rollout)
    assert (task.rollout_id, task.input, task.mode) == (made.rollout_id, {"question": "why"}, "val")
    assert task.metadata == {"level": 3}
    assert made.rollout_id != "row-7"


@pytest.mark.parametrize("way", WAYS)
async def test_what_is_given_counts_before_what_the_task_says(store: LightningStore, way: Any) -> None:
    resources = await store.add_resources({"p": PromptTemplate(template="a", engine="f-string")})

    made = await way(store, mode="train", resources_id=resources.resources_id)

    task = Task.of_rollout(made)
    assert (made.mode, task.mode, task.resources_id) == ("train", "train", resources.resources_id)


async def test_rows_of_both_kinds_go_into_one_batch(store: LightningStore) -> None:
    requests = [EnqueueRolloutRequest(input=row) for row in ("plain", ROW)]

    plain, row = await store.enqueue_many_rollouts(requests)

    assert (plain.input, plain.metadata, row.input) == ("plain", {}, {"question": "why"})
    assert requests[1].input is ROW
