"""Rollouts of somebody else in the store of a training: its runners may run them, and its figures leave them out."""

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.algorithm import Baseline
from agentlightning.algorithm.batches import Batches
from agentlightning.errors import ConfigurationError, TrainingError
from agentlightning.store import InMemoryLightningStore, LightningStore
from agentlightning.verdict.evidence import read_evidence
from tests.trainer.trainings import a_trainer, runs_of

FOREIGN: Any = pytest.mark.parametrize("metadata", [None, {"run_id": "run-of-theirs"}], ids=["unnamed", "named"])


def sending(metadata: Any) -> Any:
    """An algorithm during which somebody else enqueues, to the same store."""

    @agl.algo
    async def algorithm(*, store: LightningStore, train_dataset: Any) -> None:
        batches = Batches(store)
        theirs = await store.enqueue_rollout("theirs", metadata=metadata)
        await batches.gather(await batches.send(train_dataset))
        assert await store.wait_for_rollouts(rollout_ids=[theirs.rollout_id], timeout=30)

    return algorithm


@agl.rollout
def failing_theirs(task: Any) -> float:
    assert task != "theirs"
    return 1.0


@agl.rollout
def failing_ours(task: Any) -> float:
    assert task == "theirs"
    return 1.0


@FOREIGN
def test_the_summary_and_the_verdict_count_what_the_run_sent(metadata: Any) -> None:
    store = InMemoryLightningStore()
    asyncio.run(store.enqueue_rollout("theirs", metadata=metadata))  # left by an earlier run

    a_trainer(store=store, algorithm=sending(metadata), progress="json").fit(failing_theirs, [1, 2])

    (run,) = runs_of(store)
    evidence = asyncio.run(read_evidence(store, run))
    assert (run.summary["rollouts"], run.summary["errors"]) == ({"succeeded": 2}, 0)
    assert sorted(one.task for one in evidence.rollouts) == ["1", "2"]


@FOREIGN
def test_a_training_fails_if_all_of_its_own_rollouts_did(metadata: Any) -> None:
    trainer = a_trainer(store=InMemoryLightningStore(), algorithm=sending(metadata))

    with pytest.raises(TrainingError, match="2 of 2 rollouts failed"):
        trainer.fit(failing_ours, [1, 2])


@FOREIGN
def test_a_training_whose_own_rollouts_succeed_does_not_fail_with_others(metadata: Any) -> None:
    store = InMemoryLightningStore()

    a_trainer(store=store, algorithm=sending(metadata)).fit(failing_theirs, [1, 2])

    assert runs_of(store)[0].status == "succeeded"


@FOREIGN
def test_the_table_of_dev_shows_what_it_sent(metadata: Any, capsys: pytest.CaptureFixture[str]) -> None:
    store = InMemoryLightningStore()

    @agl.rollout
    def agent(task: Any) -> float:
        asyncio.run(store.enqueue_rollout("theirs", metadata=metadata))
        return 1.0

    a_trainer(store=store, algorithm=None, progress="auto").dev(agent, [1, 2])

    assert "2 rollouts, mean reward 1.00, 0 failed" in capsys.readouterr().out


def test_rollouts_that_name_no_run_are_those_of_a_training_that_names_none() -> None:
    @agl.algo
    async def plain(*, store: LightningStore, train_dataset: Any) -> None:
        theirs = await store.enqueue_rollout("theirs", metadata={"run_id": "run-of-theirs"})
        sent = [theirs.rollout_id, *[(await store.enqueue_rollout(task)).rollout_id for task in train_dataset]]
        assert len(await store.wait_for_rollouts(rollout_ids=sent, timeout=30)) == 3

    store = InMemoryLightningStore()
    a_trainer(store=store, algorithm=plain, progress="json").fit(failing_theirs, [1, 2])

    (run,) = runs_of(store)
    assert run.summary["rollouts"] == {"succeeded": 2}
    assert sorted(one.task for one in asyncio.run(read_evidence(store, run)).rollouts) == ["1", "2"]


@pytest.mark.parametrize("status", ["running", "succeeded"])
def test_another_training_that_is_under_way_in_the_store_is_named(
    status: Any, caplog: pytest.LogCaptureFixture
) -> None:
    store, reports = InMemoryLightningStore(), {"reports": {"interval_seconds": 30.0}}
    other = asyncio.run(store.start_run("theirs", metadata=reports))
    if status != "running":
        asyncio.run(store.finish_run(other.run_id, status))

    a_trainer(store=store).fit(failing_theirs, [1])

    assert (f"Run '{other.run_id}' was under way in this store" in caplog.text) == (status == "running")


def test_another_training_that_began_later_is_named_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    others = []

    @agl.algo
    async def algorithm(*, store: LightningStore, train_dataset: Any) -> None:
        others.append(await store.start_run("theirs", metadata={"reports": {"interval_seconds": 30.0}}))
        await store.finish_run(others[0].run_id, "succeeded")
        batches = Batches(store)
        await batches.gather(await batches.send(train_dataset))

    store = InMemoryLightningStore()
    for one in (None, algorithm, None):  # what was before, and comes after, was not under way at the same time
        a_trainer(store=store, **({} if one is None else {"algorithm": one})).fit(failing_theirs, [1])

    assert caplog.text.count("was under way in this store") == 1
    assert f"Run '{others[0].run_id}' was under way" in caplog.text


async def test_a_queue_of_somebody_else_does_not_hold_up_the_baseline() -> None:
    store, baseline = InMemoryLightningStore(), Baseline(max_queue_length=0, polling_interval=0.1)
    await store.enqueue_rollout("theirs")
    baseline.set_store(store)
    baseline.set_run_id("run-of-ours")

    work = asyncio.ensure_future(baseline.run(train_dataset=[1]))
    async for notice in store.subscribe(["rollout"], after=0):
        if notice.name == "run-of-ours":
            break
    work.cancel()
    await asyncio.wait([work], timeout=10)

    assert work.cancelled()


UNDER_WAY = """
import sys, time
import agentlightning as agl

@agl.rollout
def agent(task):
    print("begun", flush=True)
    time.sleep(500)
    return 1.0

agl.Trainer(algorithm=agl.Baseline(), store=sys.argv[1], strategy="shm", progress="off").fit(agent, [1])
"""


def test_a_training_of_another_process_keeps_others_out_of_its_store_until_it_ends(tmp_path: Path) -> None:
    address = f"sqlite:///{tmp_path}/runs.db"
    with subprocess.Popen([sys.executable, "-c", UNDER_WAY, address], stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == "begun\n"
            for use in (a_trainer(store=address).dev, a_trainer(store=address, algorithm=Baseline()).fit):
                with pytest.raises(ConfigurationError, match=f"is under way in this store, in process {other.pid}"):
                    use(failing_theirs, [1])
        finally:
            other.kill()

    a_trainer(store=address).dev(failing_theirs, [1])  # at once: a process that is dead trains nothing
