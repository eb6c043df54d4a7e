"""Rewards that come after the end of their rollout, over every back end."""

from typing import Any

import pytest

import agentlightning as agl
from agentlightning.semconv import AGL_LATE
from agentlightning.store import LightningStore
from agentlightning.types import AttemptedRollout
from agentlightning.types.rewards import named_rewards_of
from tests.contract.conftest import known

FORMATS: dict[str, dict[str, Any]] = {
    "emitted": {"name": "agentlightning.reward", "attributes": {"reward": 77.0}},
    "numbered": {"attributes": {"agentlightning.reward.0.name": "r", "agentlightning.reward.0.value": 77.0}},
    "agentops": {"attributes": {"agentops.task.output": '{"type": "reward", "value": 77.0}'}},
}


async def finished(store: LightningStore, make_span: Any, status: Any) -> AttemptedRollout:
    """A rollout with the reward 1.0 that is over."""
    rollout = await store.start_rollout("a")
    await store.add_span(make_span(rollout, sequence_id=1, name="agentlightning.reward", attributes={"reward": 1.0}))
    if status == "cancelled":
        await store.update_rollout(rollout.rollout_id, status=status)
    else:
        await store.update_attempt(rollout.rollout_id, "latest", status=status)
    return rollout


async def counted(store: LightningStore, rollout: AttemptedRollout) -> list[Any]:
    """The reward as readers of the store see it."""
    spans = await store.query_spans(rollout.rollout_id)
    stored = known(await store.get_rollout_by_id(rollout.rollout_id))
    triplets = agl.TracerTraceToTriplet().adapt(spans)
    return [stored.reward, agl.find_final_reward(spans), *named_rewards_of(spans).values(), *triplets]


@pytest.mark.parametrize("status", ["failed", "succeeded", "cancelled"])
@pytest.mark.parametrize("way", ["add_span", "add_many_spans", "finish_attempt"])
async def test_a_late_reward_is_kept_and_counts_nowhere(
    store: LightningStore, make_span: Any, way: str, status: Any
) -> None:
    rollout = await finished(store, make_span, status)
    for number, fields in enumerate(FORMATS.values(), 2):
        span = make_span(rollout, sequence_id=number, **fields)
        if way == "add_span":
            await store.add_span(span)
        elif way == "add_many_spans":
            await store.add_many_spans([span])
        else:
            await store.finish_attempt(rollout.rollout_id, rollout.attempt.attempt_id, "failed", spans=[span])

    assert await counted(store, rollout) == [1.0, 1.0, 1.0]
    marks = [AGL_LATE in span.attributes for span in await store.query_spans(rollout.rollout_id)]
    assert marks == [False, True, True, True]


async def test_the_mark_is_the_stores_alone(store: LightningStore, make_span: Any) -> None:
    rollout = await store.start_rollout("a")
    hidden = {"reward": 0.0, AGL_LATE: True}
    await store.add_span(make_span(rollout, sequence_id=1, name="agentlightning.reward", attributes=hidden))
    assert await counted(store, rollout) == [0.0, 0.0, 0.0]
    await store.update_attempt(rollout.rollout_id, "latest", status="succeeded")

    unset: dict[str, Any] = {"reward": 5.0, AGL_LATE: False}
    await store.add_many_spans([make_span(rollout, name="agentlightning.reward", attributes=unset)])

    assert await counted(store, rollout) == [0.0, 0.0, 0.0]


async def test_a_reward_of_a_retry_is_not_late(store: LightningStore, make_span: Any) -> None:
    rollout = await store.start_rollout("a", config=agl.RolloutConfig(max_attempts=2, retry_condition=["failed"]))
    await store.update_attempt(rollout.rollout_id, "latest", status="failed")
    retry = await store.start_attempt(rollout.rollout_id)
    await store.add_span(make_span(retry, sequence_id=1, name="agentlightning.reward", attributes={"reward": 0.5}))
    await store.finish_attempt(rollout.rollout_id, retry.attempt.attempt_id, "succeeded")

    assert await counted(store, retry) == [0.5, 0.5, 0.5]


async def test_a_late_finish_that_counts_brings_its_reward(store: LightningStore, clock: Any, make_span: Any) -> None:
    rollout = await store.start_rollout("a", config=agl.RolloutConfig(timeout_seconds=5))
    clock.advance(6)
    assert known(await store.get_rollout_by_id(rollout.rollout_id)).status == "failed"

    reward = make_span(rollout, name="agentlightning.reward", attributes={"reward": 0.5})
    await store.finish_attempt(rollout.rollout_id, rollout.attempt.attempt_id, "succeeded", spans=[reward])

    assert await counted(store, rollout) == [0.5, 0.5, 0.5]
