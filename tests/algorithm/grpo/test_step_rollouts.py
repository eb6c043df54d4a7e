"""Groups are handed out whole and once, the complete ones first; what is not learned from is taken again."""

import asyncio
from collections.abc import Callable, Iterable

import pytest

import agentlightning as agl
from agentlightning.algorithm.batches import Batches
from agentlightning.algorithm.grpo.step_rollouts import StepRollouts
from agentlightning.algorithm.grpo.tasks import Curriculum, ShuffledTasks
from agentlightning.errors import EngineError


class InOrder(ShuffledTasks):
    def _begin_pass(self, number: int) -> None:
        super()._begin_pass(number)
        self._order = list(range(self._size))


def step_rollouts(store: agl.LightningStore, check: Callable[[], None] = lambda: None) -> StepRollouts:
    curriculum = Curriculum("abcdefgh", 0, InOrder())
    return StepRollouts(Batches(store), curriculum, copies=2, resources_id="grpo-train", check=check)


async def finish(store: agl.LightningStore, tasks: Iterable[str]) -> None:
    """All rollouts of these tasks succeed."""
    for rollout in await store.query_rollouts(status_in=["queuing"]):
        if rollout.input in tasks:
            await store.update_rollout(rollout.rollout_id, status="succeeded")


async def test_a_step_takes_complete_groups_and_stragglers_go_on() -> None:
    store = agl.InMemoryLightningStore()
    rollouts = step_rollouts(store)
    await rollouts.send(2, step=0)
    await rollouts.send(2, step=1)
    await finish(store, "bd")

    first = await rollouts.take(2)
    rollouts.learned(first)
    await finish(store, "ac")
    second = await rollouts.take(2)

    assert [one.rollout.input for one in first] == ["b", "b", "d", "d"]
    assert [one.rollout.input for one in second] == ["a", "a", "c", "c"]
    assert rollouts.under_way == 0


async def test_a_group_is_not_handed_out_in_part() -> None:
    store = agl.InMemoryLightningStore()
    rollouts = step_rollouts(store)
    await rollouts.send(1, step=0)
    one, other = await store.query_rollouts()
    await store.update_rollout(one.rollout_id, status="succeeded")

    taking = asyncio.create_task(rollouts.take(1))
    done, _ = await asyncio.wait([taking], timeout=0.2)
    await store.update_rollout(other.rollout_id, status="failed")

    assert not done
    assert [one.rollout.status for one in await taking] == ["succeeded", "failed"]


async def test_tasks_under_way_and_handed_out_are_taken_again() -> None:
    store = agl.InMemoryLightningStore()
    rollouts = step_rollouts(store)
    await rollouts.send(2, step=0)
    await rollouts.send(2, step=1)
    await finish(store, "ad")

    finished = await rollouts.take(2)
    before = rollouts.curriculum.state()["open"]
    rollouts.learned(finished)

    assert (before, rollouts.curriculum.state()["open"]) == ([0, 1, 2, 3], [1, 2])
    await rollouts.withdraw()
    assert rollouts.curriculum.state()["open"] == [1, 2]


async def test_withdrawn_rollouts_are_cancelled() -> None:
    store = agl.InMemoryLightningStore()
    rollouts = step_rollouts(store)
    await rollouts.send(2, step=0)
    await finish(store, "a")

    await rollouts.withdraw()

    statuses = {rollout.input: rollout.status for rollout in await store.query_rollouts()}
    assert statuses == {"a": "succeeded", "b": "cancelled"}
    assert rollouts.under_way == 0


async def test_waiting_ends_where_no_engine_is_left() -> None:
    def gone() -> None:
        raise EngineError("The engine's process has ended.")

    store = agl.InMemoryLightningStore()
    rollouts = step_rollouts(store, gone)
    await rollouts.send(1, step=0)

    with pytest.raises(EngineError, match="has ended"):
        await rollouts.take(1)

    await rollouts.withdraw()
