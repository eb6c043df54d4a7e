"""What GRPO reports before and after a training, and with which rewards, where turns are judged by themselves."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="GRPO needs torch")

import agentlightning as agl  # noqa: E402 # after the check for torch
from agentlightning.algorithm.grpo import SampleSettings  # noqa: E402
from agentlightning.algorithm.grpo.settings import LearnerSettings  # noqa: E402
from agentlightning.algorithm.sft.examples import FittingSettings  # noqa: E402
from tests.algorithm.grpo.training import (  # noqa: E402
    TASKS,
    Asking,
    SharedEngine,
    ask,
    curve,
    every_second,
    fit,
    grpo,
    trainer,
)


def judged_by_temperature(agent: Asking, task: Any, rollout: Any, said: str) -> float:
    """In validation: 0.25 for greedy answers, 0.75 for sampled ones; one is told from the other by its resources."""
    if rollout.mode != "val":
        return every_second(agent, task, rollout, said)
    return 0.25 if rollout.resources_id.endswith("val") else 0.75


def test_before_and_after_are_measured_greedily_and_as_training_samples(engine: SharedEngine) -> None:
    algorithm = grpo(steps=2, validate_every=1)
    made = trainer(algorithm, concurrency=2)

    made.fit(Asking(judged_by_temperature), TASKS, TASKS[:3])

    estimates = (algorithm.baseline, algorithm.result, algorithm.sampled_baseline, algorithm.sampled_result)
    assert [one and one.mean for one in estimates] == [0.25, 0.25, 0.75, 0.75]
    (run,) = asyncio.run(made.store.query_runs())
    assert run.summary["validation_before"]["mean"] == run.summary["validation_after"]["mean"] == 0.25
    assert run.summary["validation_before_sampled"]["mean"] == 0.75
    assert (run.summary["gain"]["mean"], run.summary["gain_sampled"]["mean"]) == (0.0, 0.0)
    assert [point["validation/reward"] for point in curve(made, "validation/reward")] == [0.25] * 3
    assert [point["validation/sampled_reward"] for point in curve(made, "validation/sampled_reward")] == [0.75] * 2


def test_validation_that_samples_as_training_does_is_made_once(engine: SharedEngine) -> None:
    algorithm = grpo(steps=1, validation_temperature=1.0)
    made = trainer(algorithm, concurrency=2)

    made.fit(Asking(every_second), TASKS, TASKS[:2])

    assert algorithm.sampled_baseline is None
    assert algorithm.sampled_result is None
    assert len(asyncio.run(made.store.query_rollouts(mode_in=["val"]))) == 4


def test_run_that_goes_on_keeps_the_sampled_baseline(engine: SharedEngine, tmp_path: Path) -> None:
    first = grpo(steps=1, checkpoints=tmp_path, save_every=1)
    trainer(first, concurrency=2).fit(Asking(judged_by_temperature), TASKS, TASKS[:2])
    second = grpo(steps=2, checkpoints=tmp_path, save_every=1, resume=True)

    made = trainer(second, concurrency=2)
    made.fit(Asking(judged_by_temperature), TASKS, TASKS[:2])

    assert second.sampled_baseline == first.sampled_baseline
    (run,) = asyncio.run(made.store.query_runs())
    assert run.summary["gain_sampled"]["n"] == 2


def test_validation_rollouts_name_the_step_after_which_they_ran(engine: SharedEngine) -> None:
    made = trainer(grpo(steps=2, validate_every=1, validation_temperature=1.0), concurrency=2)

    made.fit(Asking(every_second), TASKS, TASKS[:1])

    found = asyncio.run(made.store.query_rollouts(mode_in=["val"]))
    assert sorted((one.metadata or {})["step"] for one in found) == [-1, 0, 1]


# ---------------------------------------------------------------------- rewards of turns


class TwoTurns(Asking):
    """Gets a reward for each of two turns: 1 or 0 for the first, and 0.25 for the last."""

    async def rollout_async(self, task: Any, resources: Any, rollout: Any) -> None:  # type: ignore[override] # emits its rewards
        said = await ask(resources["main_llm"], rollout, str(task))
        self.seen[f"{rollout.mode}/{task}"] += 1
        agl.emit_reward(1.0 if rollout.mode == "val" else self.judge(self, task, rollout, said))
        await ask(resources["main_llm"], rollout, f"{task} {said}")
        agl.emit_reward(0.25)


def test_with_credit_by_turn_figures_and_target_follow_the_return(engine: SharedEngine) -> None:
    sampling = SampleSettings(credit="turn", discount=0.5)
    algorithm = grpo(steps=20, sampling=sampling, target_reward=0.625, validation_temperature=1.0)
    made = trainer(algorithm, concurrency=1)

    made.fit(TwoTurns(every_second), TASKS, TASKS[:2])

    assert algorithm.baseline is not None
    assert algorithm.baseline.mean == pytest.approx(1.0 + 0.5 * 0.25)
    assert algorithm.progress.best == algorithm.result.mean == pytest.approx(1.125)  # type: ignore[union-attr] # it validated
    assert [point["reward/mean"] for point in curve(made, "reward/mean")] == [pytest.approx(0.5 + 0.5 * 0.25)] * 5
    (run,) = asyncio.run(made.store.query_runs())
    assert run.summary["reward_kind"] == "return of the turns of a rollout, discount 0.5"


def test_without_credit_by_turn_the_last_reward_counts_and_is_not_called_a_return(engine: SharedEngine) -> None:
    made = fit(grpo(steps=1), TwoTurns(every_second))

    assert [point["reward/mean"] for point in curve(made, "reward/mean")] == [0.25]
    (run,) = asyncio.run(made.store.query_runs())
    assert "reward_kind" not in run.summary


# ---------------------------------------------------------------------- one seed


@pytest.mark.parametrize(
    ("learning", "seed"), [(None, 3), (LearnerSettings(minibatches=1), 3), (LearnerSettings(seed=5), 5)]
)
def test_one_seed_serves_the_whole_training_unless_learning_has_its_own(
    learning: LearnerSettings | None, seed: int
) -> None:
    assert grpo(seed=3, learning=learning).learning.seed == seed


def test_seed_of_fine_tuning_is_that_of_its_order() -> None:
    assert agl.SFT("tiny", seed=3, fitting=FittingSettings(epochs=1)).fitting.seed == 3
