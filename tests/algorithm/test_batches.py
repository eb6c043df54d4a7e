"""Rollouts in batches: sent in groups, waited for, read, withdrawn, and scored."""

import asyncio
import math
from dataclasses import replace
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.adapter import TraceToTrajectory
from agentlightning.algorithm.batches import Batches, FinishedRollout, TrainingUse, score_of
from agentlightning.algorithm.comparison import FailedReward, estimate
from agentlightning.errors import ConfigurationError, SpansEvicted, TrainingError
from agentlightning.store import InMemoryLightningStore
from agentlightning.types import Rollout, RolloutStatus
from tests.conftest import MakeSpan


async def finish(store: InMemoryLightningStore, make_span: MakeSpan, *, status: Any = "succeeded") -> Rollout:
    """Do the next rollout of the queue, with its number in the queue as reward."""
    claimed = await store.dequeue_rollout()
    assert claimed is not None
    reward = {"agentlightning.reward.0.name": "primary", "agentlightning.reward.0.value": float(claimed.input)}
    await store.add_span(make_span(claimed, name="agentlightning.annotation", attributes=reward))
    error = None if status == "succeeded" else {"error": {"type": "ValueError", "message": "no\nsecond line"}}
    await store.update_attempt(claimed.rollout_id, claimed.attempt.attempt_id, status=status, metadata=error)
    return claimed


async def test_copies_of_a_task_are_a_group_and_come_back_in_order(make_span: MakeSpan) -> None:
    store = InMemoryLightningStore()
    batches = Batches(store)
    sent = await batches.send([1, 2, 3], copies=2, metadata={"step": 7})
    for _ in range(6):
        await finish(store, make_span)

    finished = await batches.gather(sent)

    assert [one.rollout.input for one in finished] == [1, 1, 2, 2, 3, 3]
    assert [one.reward for one in finished] == [1.0, 1.0, 2.0, 2.0, 3.0, 3.0]
    assert [one.group for one in finished[::2]] == [one.group for one in finished[1::2]]
    assert len({one.group for one in finished}) == 3
    assert all(one.rollout.metadata == {"step": 7, "group": one.group} for one in finished)


async def test_rollouts_name_the_run_that_a_trainer_has_under_way() -> None:
    store = InMemoryLightningStore()

    @agl.algo
    async def twice(*, store: Any, train_dataset: Any) -> None:
        batches = Batches(store)
        await batches.gather(await batches.send(train_dataset, copies=2, metadata={"step": 0}))

    @agl.rollout
    async def agent(task: int) -> float:
        return float(task)

    trainer = agl.Trainer(algorithm=twice, store=store, strategy="shm", progress="off")
    await asyncio.to_thread(trainer.fit, agent, [1, 2])

    (run,) = await store.query_runs()
    assert len(await store.query_rollouts(run_id_in=[run.run_id], step_in=[0])) == 4


async def test_what_a_training_made_of_a_rollout_is_written_behind_its_spans(make_span: MakeSpan) -> None:
    store = InMemoryLightningStore()
    batches = Batches(store, run_id="run-1")
    sent = await batches.send([1, 2, 3])
    for _ in range(2):
        await finish(store, make_span)
    finished = await batches.gather(sent, timeout_seconds=0)  # nobody has begun with the third
    used, left_out = (one.rollout.rollout_id for one in finished)
    adapted = TraceToTrajectory().adapt(finished[0].spans)

    uses = {used: TrainingUse(advantage=0.5, calls={"a": "truncated"}), left_out: TrainingUse("no_variance")}
    await batches.record_uses(finished, uses, "tiny")

    prefix = "agentlightning.training"
    *_, last = found = await store.query_spans(used, "latest")
    named = {f"{prefix}.run_id": "run-1", f"{prefix}.model": "tiny", f"{prefix}.is_used": True}
    assert last.attributes == {**named, f"{prefix}.advantage": 0.5, f"{prefix}.left_out.a": "truncated"}
    assert TraceToTrajectory().adapt(list(found)) == adapted
    *_, last = await store.query_spans(left_out, "latest")
    assert (last.attributes[f"{prefix}.is_used"], last.attributes[f"{prefix}.reason"]) == (False, "no_variance")
    assert [one.status for one in await store.query_rollouts()] == ["succeeded", "succeeded", "cancelled"]


async def test_spans_that_were_dropped_are_an_error_of_that_rollout_alone(make_span: MakeSpan) -> None:
    class Forgetful(InMemoryLightningStore):
        forgotten: str | None = None

        async def query_spans(self, rollout_id: str, *args: Any, **options: Any) -> Any:
            if rollout_id == self.forgotten:
                raise SpansEvicted(f"The spans of '{rollout_id}' are gone.")
            return await super().query_spans(rollout_id, *args, **options)

    store = Forgetful()
    sent = await Batches(store).send([1, 2])
    store.forgotten = next(iter(sent.group_of))
    for _ in range(2):
        await finish(store, make_span)

    finished = await Batches(store).gather(sent)

    assert [one.reward for one in finished] == [None, 2.0]
    assert "SpansEvicted" in (finished[0].error or "")


async def test_withdrawn_rollouts_are_cancelled_and_finished_ones_are_not(make_span: MakeSpan) -> None:
    store = InMemoryLightningStore()
    batches = Batches(store)
    for name in ("mine", "theirs"):
        await store.update_resources(name, {})
    sent = await batches.send([1, 2, 3], resources_id="theirs")
    await batches.send([4], resources_id="theirs")
    await batches.send([5], resources_id="mine")
    await finish(store, make_span)

    await batches.withdraw(sent.group_of)
    await batches.withdraw_left(["mine"])  # as a killed run leaves it

    statuses = [rollout.status for rollout in await store.query_rollouts()]
    assert statuses == ["succeeded", "cancelled", "cancelled", "queuing", "cancelled"]


async def test_interrupted_waiting_leaves_nothing_in_the_queue() -> None:
    store = InMemoryLightningStore()
    batches = Batches(store)
    waiting = asyncio.create_task(batches.gather(await batches.send([1, 2])))
    await asyncio.sleep(0)
    waiting.cancel()

    with pytest.raises(asyncio.CancelledError):
        await waiting

    assert [rollout.status for rollout in await store.query_rollouts()] == ["cancelled", "cancelled"]


async def test_late_rollouts_are_cancelled_and_the_others_are_returned(make_span: MakeSpan) -> None:
    store = InMemoryLightningStore()
    batches = Batches(store)
    sent = await batches.send([1, 2])
    await finish(store, make_span)

    over = await batches.gather(sent, timeout_seconds=0.05, with_spans=False)

    assert [(one.rollout.input, one.reward, one.spans) for one in over] == [(1, 1.0, [])]
    assert [rollout.status for rollout in await store.query_rollouts()] == ["succeeded", "cancelled"]


async def test_ids_of_ones_own_are_not_sent_twice() -> None:
    store = InMemoryLightningStore()
    first, second = [await Batches(store).send(["x", "y"], rollout_ids=["a", "b"]) for _ in range(2)]
    assert list(first.group_of) == list(second.group_of) == ["a", "b"]
    assert len(await store.query_rollouts()) == 2


@pytest.mark.parametrize("wrong", [{"copies": 0}, {"rollout_ids": ["a"]}], ids=str)
async def test_copies_and_ids_that_do_not_fit_the_tasks_are_refused(wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match="2 tasks in"):
        await Batches(InMemoryLightningStore()).send([1, 2], **wrong)


# ---------------------------------------------------------------------- scores


def finished(reward: float | None, status: RolloutStatus = "succeeded", error: str | None = None) -> FinishedRollout:
    rollout = Rollout(rollout_id="ro-1", input=None, start_time=0.0, status=status)
    return FinishedRollout(rollout, "group-0", [], reward, error)


def test_failures_are_counted_by_their_reasons_and_as_the_worst_reward() -> None:
    down = "ConnectionError: down"
    lost = [finished(1.0, "failed", down), finished(None, "failed", down), finished(None), finished(math.nan)]

    score = score_of([finished(0.5), *lost, finished(0.25)])

    assert score.reward == replace(estimate([0.5, 0.25, 0.0, 0.0, 0.0, 0.0]), failed=4, failed_reward=0.0)
    reasons = {down: 2, "succeeded, without a reward": 1, "succeeded, with the reward nan": 1}
    assert (score.failed, dict(score.errors)) == (4, reasons)
    bounds = {"validation/low": score.reward.low, "validation/high": score.reward.high}
    assert score.metrics() == {"validation/reward": 0.125, "validation/failed": 4.0, **bounds}


def test_no_tasks_have_no_score() -> None:
    with pytest.raises(TrainingError, match="None of 0 rollouts gave a reward; most often: there were no tasks"):
        score_of([])


@pytest.mark.parametrize(
    ("failed", "rewards", "mean", "words"),
    [
        ("worst", [1.0, 0.5], 0.5, "(n=3, 1 failed and count 0)"),
        ("worst", [-2.0, 1.0], -1.0, "(n=3, 1 failed and count -2)"),
        ("skip", [1.0, 0.5], 0.75, "(n=2, 1 failed and are left out)"),
        (-3, [1.0, 0.5], -0.5, "(n=3, 1 failed and count -3)"),
    ],
    ids=["worst is zero", "worst is negative", "skip", "number"],
)
def test_it_can_be_said_what_failures_count(
    failed: FailedReward, rewards: list[float], mean: float, words: str
) -> None:
    score = score_of([*map(finished, rewards), finished(None, "failed")], failed)
    assert score.reward.mean == mean
    assert str(score.reward).endswith(words)
