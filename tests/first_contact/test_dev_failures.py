"""A run in which every rollout failed ends with one error, which shows the failure once."""

import asyncio
import logging
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.errors import TrainingError


def with_a_typo(task: Any) -> float:
    row = {"name": "Ada"}
    return float(len(row["nmae"]))


def runs_of(store: agl.LightningStore) -> list[Any]:
    return list(asyncio.run(store.query_runs()))


@agl.algo
async def waiting(*, store: agl.LightningStore, train_dataset: list[Any]) -> None:
    sent = [(await store.enqueue_rollout(input=task)).rollout_id for task in train_dataset]
    await store.wait_for_rollouts(rollout_ids=sent, timeout=60)


@pytest.mark.parametrize("algorithm", [agl.Baseline(), waiting], ids=["Baseline", "own"])
def test_a_fit_in_which_every_rollout_failed_says_why(algorithm: Any) -> None:
    trainer = agl.Trainer(algorithm=algorithm, strategy="shm", progress="off")

    with pytest.raises(TrainingError, match=r"^24 of 24 rollouts failed with KeyError: 'nmae'") as caught:
        trainer.fit(with_a_typo, list(range(24)))

    assert str(caught.value).count("Traceback") == 1
    assert 'row["nmae"]' in str(caught.value)
    assert "agentlightning/runner" not in str(caught.value)
    (run,) = runs_of(trainer.store)
    assert run.status == "failed"
    assert "24 of 24 rollouts failed with KeyError: 'nmae'" in run.summary["error"]


def test_a_fit_over_processes_in_which_every_rollout_failed_says_why() -> None:
    trainer = agl.Trainer(algorithm=agl.Baseline(), port=0, progress="off")

    with pytest.raises(TrainingError, match=r"^3 of 3 rollouts failed with KeyError: 'nmae'"):
        trainer.fit(with_a_typo, [1, 2, 3])


def test_a_dev_in_which_every_rollout_failed_says_why_once(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(TrainingError, match=r"^3 of 3 rollouts failed with KeyError: 'nmae'") as caught:
        agl.Trainer().dev(with_a_typo, [1, 2, 3])

    assert str(caught.value).count("Traceback") == 1
    assert "Traceback" not in "".join(capfd.readouterr())


def test_of_several_errors_the_most_frequent_is_shown_and_the_others_are_counted() -> None:
    def agent(task: int) -> float:
        if task == 0:
            raise ValueError("another")
        return with_a_typo(task)

    with pytest.raises(
        TrainingError, match=r"^4 of 4 rollouts failed, 3 of them with KeyError: 'nmae', the rest with 1"
    ):
        agl.Trainer(progress="off").dev(agent, [0, 1, 2, 3])


def test_one_rollout_that_succeeds_makes_a_run_of_failures_no_error() -> None:
    trainer = agl.Trainer(algorithm=agl.Baseline(), strategy="shm", progress="off")

    trainer.fit(lambda task: 1.0 if task == 3 else with_a_typo(task), [1, 2, 3])

    assert [run.status for run in runs_of(trainer.store)] == ["succeeded"]


def test_rollouts_of_earlier_runs_are_not_counted() -> None:
    store = agl.InMemoryLightningStore()
    agl.Trainer(store=store, progress="off").dev(lambda task: 1.0, [1, 2])

    with pytest.raises(TrainingError, match=r"^1 of 1 rollouts failed"):
        agl.Trainer(store=store, progress="off").dev(with_a_typo, [1])
    agl.Trainer(store=store, progress="off").dev(lambda task: 1.0, [1])


def test_an_algorithm_that_fails_keeps_its_own_error() -> None:
    @agl.algo
    async def failing(*, store: agl.LightningStore, train_dataset: list[Any]) -> None:
        await waiting(store=store, train_dataset=train_dataset)
        raise LookupError("nothing to learn from")

    with pytest.raises(LookupError, match="nothing to learn from") as caught:
        agl.Trainer(algorithm=failing, strategy="shm", progress="off").fit(with_a_typo, [1, 2])

    assert "2 of 2 rollouts failed with KeyError" in str(caught.value.__cause__)


def test_a_fit_logs_the_traceback_of_a_failure_once(caplog: pytest.LogCaptureFixture) -> None:
    trainer = agl.Trainer(algorithm=agl.Baseline(), strategy="shm", n_runners=3, progress="off")

    with caplog.at_level(logging.WARNING), pytest.raises(TrainingError):
        trainer.fit(with_a_typo, list(range(12)))

    assert len([record for record in caplog.records if record.exc_info]) == 1
    assert "A trace tree needs at least one span" not in caplog.text


def test_a_rollout_without_spans_is_no_reason_for_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        agl.Trainer(progress="off").dev(lambda task: None, [1])

    assert caplog.text == ""
