"""A verdict says no more than its run shows: chance is told from no gain, a cause from what stands beside it."""

from typing import Any

import pytest

from agentlightning.algorithm.batches import Batches
from agentlightning.verdict import Verdict, verdict_of_run
from tests.verdict.recorded import Recorded, learned
from tests.verdict.test_verdict import FAULTS, RISING, SAME, Fault, curve, judged, judged_with, recorded

BASELINE = {"mean": 0.3, "low": 0.2, "high": 0.4, "n": 32}
SAMPLED: dict[str, Any] = {"validation_before": {**BASELINE, "mean": 0.0}, "validation_before_sampled": BASELINE}
GREEDY: dict[str, Any] = {"validation_temperature": 0.0, "temperature": 1.0}


async def test_a_cause_is_no_reason_why_a_run_is_too_short() -> None:
    noisy = Fault("", groups=[[0.0, 1.0, 0.0, 1.0]] * 4, points=[learned()] * 2, options={"answers": SAME})
    found = await judged(noisy)
    assert found.sentence.startswith("Too short to say what was gained: 2 steps of learning. Equal answers to the same")


async def test_a_run_that_learned_is_not_told_that_nothing_was_gained() -> None:
    found = await judged(
        Fault("", points=curve(reward=[0.5] * 8), options={"task": "the same"}, groups=[[0.0, 1.0]] * 4)
    )
    assert found.sentence.startswith("No gain can be told from chance (+0.000 [")
    assert found.sentence.endswith(")). All 8 rollouts have the same task.")


@pytest.mark.parametrize("rewards", [RISING, RISING[::-1]], ids=["rising", "falling"])
async def test_a_model_that_did_not_change_has_neither_gained_nor_lost(rewards: list[float]) -> None:
    found = await judged(Fault("", points=curve(reward=rewards, kl=[1e-9] * len(rewards))))
    assert (found.outcome, found.sentence[:20]) == ("no gain", "Nothing was gained (")


@pytest.mark.parametrize(
    ("summary", "advice"),
    [
        (
            {"gain": {"mean": 0.1, "low": -0.1, "high": 0.3, "n": 20}},
            "Validate on more than 20 tasks, or train longer.",
        ),
        ({}, "Give tasks to validate on, or train longer."),
        (
            {
                "gain": {"mean": 0.0, "low": -0.1, "high": 0.1, "n": 20},
                "validation_after": {"mean": 1.0, "low": 0.8, "high": 1.0, "n": 20},
            },
            "Validation had the highest reward that was seen (1) before and after; take harder tasks.",
        ),
    ],
    ids=["validated", "without validation", "at the ceiling"],
)
async def test_advice_without_a_cause_is_about_how_it_was_measured(summary: Any, advice: str) -> None:
    found = await judged(Fault("", points=curve(reward=[0.5, 0.45, 0.55, 0.5, 0.48, 0.52])), summary)
    assert found.sentence.endswith(advice)


@pytest.mark.parametrize(
    ("rewards", "unit"),
    [
        (RISING, "the last 2 against the baseline of 32 validation tasks)"),
        ([0.8, 0.81, 0.79, 0.8, 0.81, 0.79], "the last 2 against the first 2)"),
    ],
    ids=["same tasks", "easier tasks"],
)
async def test_a_stopped_run_is_judged_by_its_baseline_unless_its_tasks_are_others(
    rewards: list[float], unit: str
) -> None:
    found = await judged_with(GREEDY, Fault("", points=curve(reward=rewards)), SAMPLED, status="stopped")
    assert unit in found.sentence
    assert "baseline 0.300 on 32 tasks, sampled as in training; not validated at the end." in found.sentence


async def test_a_stopped_run_is_told_to_run_to_its_end() -> None:
    validated: list[dict[str, float]] = [{"validation/reward": 0.5}, {"validation/sampled_reward": 0.5}]
    fault = Fault("", points=[*validated, *FAULTS["too few steps"].points])
    found = await judged_with({"steps": 4}, fault, status="stopped")
    assert found.findings[0].advice == "Let it run to its end; tens of steps are usual."


async def test_a_gain_does_not_hide_that_rollouts_fail() -> None:
    run = await recorded(Fault("", points=curve(reward=RISING)))
    await run.group([None] * 4, status="failed", error="KeyError: 'key'")

    found = await verdict_of_run(run.store, await run.end())

    assert found.outcome == "gained"
    assert found.sentence.endswith("4 of 12 rollouts failed, most often with: KeyError: 'key'.")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("TrainingError: 4 of 4 rollouts failed with KeyError: 'q'", "failed with KeyError: 'q'."),
        (
            "TrainingError: left out: 4 failed",
            "left out: 4 failed. 4 of 4 rollouts failed, most often with: KeyError: 'q'.",
        ),
        (
            "TrainingError: ro-1: Traceback (most recent call last):\n  File a\n    b\nKeyError: 'q'",
            "The run failed: TrainingError: ro-1: KeyError: 'q'.",
        ),
    ],
    ids=["quoted", "not quoted", "traceback"],
)
async def test_an_error_is_told_once_and_without_its_traceback(error: str, said: str) -> None:
    fault = Fault("", groups=[[None] * 4], options={"status": "failed", "error": "KeyError: 'q'"})
    found = await judged_with({}, fault, {"error": error}, status="failed")
    assert found.sentence.endswith(said)


async def test_tasks_that_are_solved_after_they_were_not_are_neither_too_easy_nor_too_hard() -> None:
    fault = Fault("", groups=[[0.0] * 4, *[[1.0] * 4] * 7], points=curve(reward=[0.0, *[1.0] * 7]))
    assert (await judged(fault)).findings == ()


@pytest.mark.parametrize(("change", "findings"), [(0.8, []), (8.0, ["learning_rate_too_high"])])
async def test_one_large_step_is_forgiven_while_the_reward_rises(change: float, findings: list[str]) -> None:
    found = await judged(Fault("", points=curve(reward=RISING, kl=[0.01, change, *[0.01] * 6])))
    assert [one.name for one in found.findings] == findings


@pytest.mark.parametrize("status", ["running", "stopped", "lost"])
async def test_a_run_that_is_not_over_is_not_told_to_give_the_validation_tasks_that_it_has(status: str) -> None:
    run = await recorded(Fault("", points=curve(reward=[0.5, 0.45, 0.55, 0.5, 0.48, 0.52])))
    (found,) = await run.store.query_runs()

    verdict = await verdict_of_run(run.store, found.model_copy(update={"status": status, "config": {"n_val": 32}}))

    assert verdict.sentence.endswith("Let it run to its end, where it is validated, or train longer.")


async def test_a_run_that_was_killed_is_told_so_and_what_it_had_gained() -> None:
    run = await recorded(Fault("", points=curve(reward=RISING)))
    killed = (await run.end()).model_copy(update={"status": "lost"})

    verdict = await verdict_of_run(run.store, killed)

    assert verdict.sentence.startswith("The run failed: Its process ended without notice. Until then: Gained +")


@pytest.mark.parametrize("status", ["running", "stopped"])
async def test_a_run_that_has_sent_nothing_yet_is_not_told_to_look_at_its_data(status: Any) -> None:
    run = await Recorded().begin()
    (found,) = await run.store.query_runs()
    found = found if status == "running" else await run.end(status=status)

    verdict = await verdict_of_run(run.store, found)

    assert (verdict.outcome, verdict.findings) == ("unknown", ())
    assert "No rollout was finished. " in verdict.sentence


@pytest.mark.parametrize(("last", "findings"), [(0.8, ["few_steps"]), (0.2, ["learning_rate_too_high", "few_steps"])])
async def test_a_smoke_test_is_forgiven_a_large_step_too_if_its_reward_rises(last: float, findings: list[str]) -> None:
    found = await judged(Fault("", points=curve(reward=[0.5, last], kl=[0.01, 0.8])))
    assert [one.name for one in found.findings] == findings


async def test_an_algorithm_that_does_not_wait_is_told_so() -> None:
    run = await Recorded().begin()
    await run.group([1.0] * 4)
    await Batches(run.store).send([1] * 8, metadata={"run_id": run.run_id})

    found = await verdict_of_run(run.store, await run.end())

    assert found.findings[0].sentence == "Only 4 of 12 rollouts were finished: 8 rollouts wait in the queue."


async def test_an_algorithm_that_reports_nothing_is_told_its_reward() -> None:
    found = await judged(Fault("", groups=[[0.0, 1.0, 1.0, 1.0]]))
    assert found.sentence.startswith("The reward is 0.750 [0.301, 0.954] (n=4). No step has a reward/mean")


async def test_a_policy_that_is_never_called_is_counted_whole() -> None:
    skipped = {"samples/all": 0.0, "skipped/no_tokens": 6.0, "skipped/no_variance": 2.0}
    points = [{f"{name}/{key}": value for name in "ab" for key, value in learned().items()} for _ in range(8)]
    points = [{**one, **{f"b/{key}": value for key, value in skipped.items()}} for one in points]
    found = await judged(Fault("", points=points))
    assert found.findings[0].sentence == "Policy 'b': In 64 of 64 rollouts there was no call to train."


async def optimised(fates: list[str], status: Any) -> Verdict:
    """An optimisation of prompts whose rollouts all got nothing, and whose candidates ended so."""
    run = await Recorded().begin()
    await run.group([0.0] * 8, ids=False)
    candidates = [{"fate": fate, "reason": "it is empty"} for fate in fates]
    return await verdict_of_run(
        run.store,
        await run.end({"prompts": {}, "seed": {}, "best_version": "v0", "candidates": candidates}, status),
    )


@pytest.mark.parametrize(("fates", "findings"), [(["rejected"], []), (["rejected", "dropped"], ["all_wrong"])])
async def test_one_reward_for_every_prompt_is_told_where_more_than_the_seed_was_tried(
    fates: list[str], findings: list[str]
) -> None:
    found = await optimised(["seed", *fates], "succeeded")
    assert [one.name for one in found.findings] == findings


async def test_an_optimisation_that_was_stopped_has_not_kept_the_seed() -> None:
    found = await optimised(["seed"], "stopped")
    assert (found.outcome, found.sentence.partition(":")[0]) == (
        "unknown",
        "It ended before it could say what was gained",
    )
