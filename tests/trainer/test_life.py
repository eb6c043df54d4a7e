"""Trainer: pausing, going on and stopping."""

import asyncio
from typing import Any

import pytest

from agentlightning.errors import InvalidTransition
from agentlightning.store import LightningStore
from agentlightning.types.lifecycle import LifecycleState
from tests.runner.working import PATIENCE_SECONDS, RESOURCES
from tests.trainer.trainings import Halving, a_trainer, endless, fitting, over_processes, rewards_of, runs_of, until

pytestmark = pytest.mark.usefixtures("nothing_is_left")


@pytest.mark.parametrize("make", [a_trainer, over_processes], ids=["threads", "processes"])
def test_a_stopped_training_ends_and_its_run_says_so(make: Any) -> None:
    trainer = make(algorithm=endless)
    thread = fitting(trainer, Halving())
    until(lambda: runs_of(trainer.store))

    trainer.stop()
    thread.join(PATIENCE_SECONDS)

    assert not thread.is_alive()
    assert [run.status for run in runs_of(trainer.store)] == ["stopped"]
    assert trainer.state is LifecycleState.STOPPED


def is_left_in_the_queue(store: LightningStore) -> bool:
    """Whether nobody claims a new rollout, for a while."""
    sent = asyncio.run(store.enqueue_rollout(2))
    return not asyncio.run(store.wait_for_rollouts(rollout_ids=[sent.rollout_id], timeout=0.5))


@pytest.mark.parametrize("make", [a_trainer, over_processes], ids=["threads", "processes"])
def test_a_paused_training_claims_nothing_until_it_resumes(make: Any) -> None:
    trainer = make(algorithm=None)
    thread = fitting(trainer, Halving())
    store = trainer.store
    asyncio.run(store.add_resources(RESOURCES))
    asyncio.run(store.enqueue_rollout(1))
    until(lambda: rewards_of(store) == [0.5])

    trainer.pause()
    until(lambda: is_left_in_the_queue(store))
    state = trainer.state
    sent = [rollout.rollout_id for rollout in asyncio.run(store.query_rollouts())]
    trainer.resume()
    resumed = asyncio.run(store.wait_for_rollouts(rollout_ids=sent, timeout=PATIENCE_SECONDS))
    trainer.stop()
    thread.join(PATIENCE_SECONDS)

    assert state is LifecycleState.PAUSED
    assert [rollout.status for rollout in resumed] == ["succeeded"] * len(sent)
    assert not thread.is_alive()


def test_a_training_is_the_only_one_of_its_trainer_and_ends_also_if_it_is_stopped_while_paused() -> None:
    trainer = a_trainer(algorithm=endless)
    thread = fitting(trainer, Halving())

    with pytest.raises(InvalidTransition):
        trainer.fit(Halving())
    trainer.pause()
    trainer.stop()
    thread.join(PATIENCE_SECONDS)

    assert not thread.is_alive()
