"""Every fault is named by its own name, with the figure that shows it; a healthy run has none."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import pytest

from agentlightning.algorithm.batches import Batches
from agentlightning.verdict import FINDINGS, Verdict, verdict_of_rollout, verdict_of_run
from agentlightning.verdict.evidence import NEWEST_RUNS
from agentlightning.verdict.verdict import Outcome
from tests.verdict.recorded import Recorded, learned

MIXED: list[float | None] = [0.0, 1.0, 0.0, 1.0]
NONE: list[float | None] = [None] * 4
SAME = [[7, 8]] * 4
Points = list[dict[str, float]]


@dataclass(frozen=True)
class Fault:
    """What a run with a fault leaves in the store, and what the verdict says of it."""

    name: str
    figure: str = ""
    """In the sentence."""
    groups: Sequence[list[float | None]] = (MIXED, MIXED)
    """The rewards of each group, one group a step."""
    points: Points = field(default_factory=list)
    """The metrics of each step."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the groups."""


def curve(**figures: Sequence[float]) -> Points:
    """Steps with these figures."""
    return [learned(**dict(zip(figures, values, strict=True))) for values in zip(*figures.values(), strict=True)]


FELL = curve(reward=[0.3, 0.6, 0, 0, 0, 0], entropy=[1, 1.1, 4, 4, 4, 4])
COLLAPSED = curve(reward=[0.2, 0.8, 0.1, 0.1, 0.1, 0.1], entropy=[1, 0.5, *[0.001] * 4])
FAULTS = {
    "the agent raises": Fault(
        "failed",
        "12 of 12 rollouts failed, most often with: KeyError: 'nmae'",
        [NONE] * 3,
        options={"status": "failed", "error": "KeyError: 'nmae'"},
    ),
    "attempts run out of time": Fault(
        "timeout", "8 of 8 rollouts ran out of time", [NONE] * 2, options={"status": "timeout"}
    ),
    "workers are lost": Fault(
        "lost_workers", "8 of 8 rollouts lost the worker", [NONE] * 2, options={"status": "unresponsive"}
    ),
    "the backend refuses": Fault(
        "model_calls_failed",
        "8 of 8 model calls failed, most often with: 429",
        options={"call_error": "Rate limit reached"},
    ),
    "no reward arrives": Fault("no_reward", "8 of 8 rollouts that succeeded left no reward", [NONE] * 2),
    "rewards are not finite": Fault(
        "bad_reward", "3 rewards are not finite", points=[learned(**{"skipped/bad_reward": 3.0})]
    ),
    "the model is not called": Fault(
        "no_model_calls", "In 8 of 8 rollouts no model call", points=[learned()], options={"calls": 0}
    ),
    "calls without token ids": Fault(
        "ids_missing", "8 of 8 model calls have no token ids", points=[learned()], options={"ids": False}
    ),
    "answers are cut off": Fault("cut_off", "8 of 8 answers were cut off", options={"finish": "length"}),
    "groups too small": Fault(
        "groups_too_small",
        "8 of 8 rollouts had no sibling",
        [[1.0]] * 4,
        [learned(**{"skipped/group_too_small": 8.0})],
    ),
    "sequences too long": Fault(
        "too_long", "8 sequences of 8 rollouts are longer", points=[learned(**{"skipped/too_long": 8.0})]
    ),
    "samples too old": Fault("too_stale", "weights too old", points=[learned(**{"skipped/too_stale": 8.0})]),
    "tasks too easy or too hard": Fault(
        "too_easy_or_too_hard", "always solved or never (0.50", [[0.0] * 4, [1.0] * 4] * 2
    ),
    "all right": Fault("all_right", "nothing left to learn", [[1.0] * 4] * 4),
    "all wrong": Fault("all_wrong", "no answer was ever right", [[0.0] * 4] * 4),
    "constant reward": Fault("constant_reward", "every rollout got 0.5", [[0.5] * 4] * 4),
    "collapsed at the end": Fault(
        "collapsed", "entropy 0.001", [[0.0] * 4] * 4, curve(entropy=[1.0, 0.001]), {"answers": SAME}
    ),
    "collapsed on the way": Fault("collapsed", "entropy fell from 1.00 to 0.001", points=COLLAPSED),
    "seed fixed by the agent": Fault(
        "same_answers",
        "all answers of a group are the same, token by token",
        [[0.0] * 4] * 4,
        options={"answers": SAME},
    ),
    "random reward": Fault("noisy_reward", "in 8 of 12 cases", [MIXED] * 4, options={"answers": SAME}),
    "answers grow": Fault(
        "ran_away", "Answers grew from", points=[learned(**{"answers/tokens": 10.0 * 2**step}) for step in range(8)]
    ),
    "the model falls apart": Fault("learning_rate_too_high", "entropy rose from 1.00 to 4.00", points=FELL),
    "one step goes too far": Fault("learning_rate_too_high", "changed by 2.50 nats", points=curve(kl=[0.01, 2.5])),
    "steps too small": Fault("learning_rate_too_low", "did not change", points=curve(kl=[1e-9] * 6)),
    "one task alone": Fault("one_task", "have the same task", [MIXED] * 5, [learned()] * 6, {"task": "the same"}),
    "too few steps": Fault("few_steps", "2 steps of learning", points=[learned()] * 2),
}


async def recorded(fault: Fault, run: Recorded | None = None) -> Recorded:
    run = run or await Recorded().begin()
    for step, rewards in enumerate(fault.groups):
        await run.group(rewards, step=step, **fault.options)
    await run.metrics(*fault.points)
    return run


async def judged(fault: Fault, summary: dict[str, Any] | None = None) -> Verdict:
    run = await recorded(fault)
    return await verdict_of_run(run.store, await run.end(summary))


def assert_named(found: Verdict, name: str, figure: str) -> None:
    assert found.outcome != "gained"
    assert (found.findings[0].name, figure in found.sentence) == (name, True), found.sentence
    assert found.findings[0].advice


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
async def test_a_fault_is_the_cause_that_the_verdict_names(fault: Fault) -> None:
    assert_named(await judged(fault), fault.name, fault.figure)


async def test_a_run_of_which_nothing_ran_says_so() -> None:
    run = await Recorded().begin()
    await Batches(run.store).send([1, 2], metadata={"run_id": run.run_id})
    found = await verdict_of_run(run.store, await run.end())
    assert_named(found, "nothing_ran", "2 rollouts wait in the queue")


async def test_one_of_several_agents_that_is_weak_is_named() -> None:
    run = await Recorded().begin()
    for agent, rewards in (("critic", [0.0, 0.25, 0.5, 0.25]), ("solver", [1.0, 0.5, 1.0, 0.5])):
        await recorded(Fault("", groups=[list(rewards)] * 2, options={"agent": agent}), run)

    found = await verdict_of_run(run.store, await run.end())

    assert_named(found, "weak_agent", "Agent 'critic' has the lowest reward: 0.25 in the")


async def test_a_gain_by_a_loophole_is_named_as_such() -> None:
    watched = [{"watched/mean": 0.9 - 0.08 * step, "watched/error": 0.01} for step in range(10)]
    points = [learned(reward=0.1 * step, **one) for step, one in enumerate(watched)]

    found = await judged(Fault("reward_hacking", points=points))

    assert (found.outcome, found.findings[0].name) == ("gained", "reward_hacking")
    assert (
        "in the trained reward only. The trained reward rose from 0.15 to 0.75 while the watched one fell"
        in found.sentence
    )


def test_every_finding_has_a_fault_that_shows_it() -> None:
    assert {"nothing_ran", "weak_agent", "reward_hacking", *(one.name for one in FAULTS.values())} == set(FINDINGS)


RISING = [0.2 + 0.1 * step for step in range(8)]
HEALTHY = Fault(
    "",
    "",
    [[0.0, 1.0, 1.0, step / 8] for step in range(8)],
    curve(reward=RISING, entropy=[1.2 - one for one in RISING]),
)
SOLVED = Fault(
    "",
    "",
    [[1.0] * 4] * 4,
    curve(reward=[0.2, 0.6, 0.9, 1, 1, 1], entropy=[1, 0.5, 0.1, 0.01, 0.01, 0.01]),
    {"answers": SAME},
)
WEIGHTED = Fault(
    "", "", [[0.0] * 4] * 8, [learned(reward=one, **{"groups/all": 2.0, "groups/same": 0.0}) for one in RISING]
)
"""The first reward is always the same; the sum that is learned from is not."""


@pytest.mark.parametrize("run", [HEALTHY, SOLVED, WEIGHTED], ids=["healthy", "solved", "weighted"])
async def test_a_healthy_run_has_no_findings(run: Fault) -> None:
    found = await judged(run)
    assert (found.outcome, found.findings) == ("gained", ())


@pytest.mark.parametrize(
    ("summary", "outcome", "sentence"),
    [
        ({"gain": {"mean": 0.7, "low": 0.6, "high": 0.8, "n": 128}}, "gained", "Gained +0.700 [+0.600, +0.800] (128"),
        (
            {"gain": {"mean": 0.1, "low": -0.1, "high": 0.3, "n": 20}},
            "no gain",
            "No gain can be told from chance (+0.1",
        ),
        ({"gain": {"mean": -0.4, "low": -0.6, "high": -0.2, "n": 50}}, "lost", "Lost -0.400 [-0.600, -0.200]"),
        (
            {
                "validation_before": {"mean": 0.2, "low": 0.1, "high": 0.3, "n": 64},
                "validation_after": {"mean": 0.9, "low": 0.8, "high": 0.95, "n": 64},
            },
            "gained",
            "Gained +0.700 [",
        ),
    ],
    ids=["gained", "no gain", "lost", "two validations"],
)
async def test_validation_says_what_was_gained(summary: dict[str, Any], outcome: str, sentence: str) -> None:
    found = await judged(HEALTHY, summary)
    assert (found.outcome, found.sentence.startswith(sentence)) == (outcome, True), found.sentence


async def test_rollouts_of_another_run_do_not_count() -> None:
    run = await Recorded().begin()
    other = await Recorded(run.store, "another").begin()
    await recorded(FAULTS["all wrong"], other)
    await recorded(HEALTHY, run)

    found = await verdict_of_run(run.store, await run.end())

    assert found.findings == ()


async def test_a_summary_is_json_and_a_text_lists_the_findings() -> None:
    found = await judged(FAULTS["all wrong"])
    assert found.as_summary()["findings"][0]["figures"] == {"groups": 4, "same": 4, "equal_answers": 0, "reward": 0.0}
    assert str(found).splitlines()[1].startswith("- In 4 of 4 groups all rewards are the same")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rewards": [0.25]}, ["'succeeded'", "Its reward is 0.25.", "1 of its 1 model calls have token ids"]),
        ({"rewards": [None], "status": "failed", "error": "KeyError: x"}, ["'failed' with KeyError: x"]),
        ({"rewards": [None], "calls": 0}, ["left no reward", "No model call was recorded"]),
        ({"rewards": [1.0], "finish": "length"}, ["1 were cut off"]),
        ({"rewards": [1.0], "call_error": "too many"}, ["1 of its model calls failed: 429: too many"]),
        ({"rewards": [None], "status": "timeout"}, ["ran out of time"]),
    ],
)
async def test_a_rollout_says_what_became_of_it(options: dict[str, Any], said: list[str]) -> None:
    run = await Recorded().begin()
    await run.group(**options)
    rollout = (await run.store.query_rollouts())[0]

    text = "\n".join(await verdict_of_rollout(run.store, rollout))

    assert [one for one in said if one not in text] == []


async def test_a_rollout_of_a_team_says_what_to_improve() -> None:
    run = Recorded()
    started = await run.store.start_rollout("task")
    refused = {"crewai.guardrail.success": False, "crewai.guardrail.error": "too long"}
    owner = {"rollout_id": started.rollout_id, "attempt_id": started.attempt.attempt_id}
    await run.store.add_span(run._span(owner, "guardrail", refused))

    text = (await verdict_of_rollout(run.store, started))[-1]

    assert text.startswith("A guardrail refused the answers of 'guardrail' in 1 of 1 cases, most often with: too long.")


# ---------------------------------------------------------------------- what only some runs can say

TOO_LOW = curve(kl=[1e-9] * 8)
COLLAPSES = [
    learned(**{"groups/all": 16.0, "groups/one_answer": one, "groups/all_right": right})
    for one, right in [(1.0, 1.0)] * 11 + [(14.0, 8.0)] * 29
]
FAST = [learned(reward=reward) for reward in [0.05, 0.31, 0.62, 0.93, *[0.95, 0.97, 0.94] * 12]]
BEFORE = {"mean": 0.0, "low": 0.0, "high": 0.029, "n": 128}


async def judged_with(
    settings: dict[str, Any], fault: Fault, summary: dict[str, Any] | None = None, *, status: str = "succeeded"
) -> Verdict:
    """The verdict on a run of GRPO with these settings."""
    run = Recorded()
    algorithm = "agentlightning.algorithm.grpo.grpo.GRPO"
    config = {"algorithm": algorithm, "settings": {"algorithm": {"steps": 40, **settings}}}
    await run.store.start_run("GRPO", run_id=run.run_id, config=config)
    await recorded(fault, run)
    return await verdict_of_run(run.store, await run.end(summary, status))


@pytest.mark.parametrize(
    ("fault", "settings", "advice"),
    [
        ("answers are cut off", {"sampling": {"skip_truncated": False}}, None),
        ("answers are cut off", {"sampling": {"skip_truncated": True}}, "skip_truncated=False"),
        ("seed fixed by the agent", {"temperature": 0.0}, "Set temperature above 0 (0 now)."),
        (
            "seed fixed by the agent",
            {"temperature": 1.0},
            "Give tasks that the model is less sure of, and do not cache answers in the agent or its client.",
        ),
        ("collapsed on the way", {"learning": {"entropy_coefficient": 0.01}}, "raise entropy_coefficient (0.01 now)"),
        ("collapsed on the way", {"checkpoints": None}, "keep checkpoints (checkpoints='folder') to go back to"),
        ("collapsed on the way", {"checkpoints": "here"}, "go back to an earlier checkpoint"),
        ("one step goes too far", {"learning": {"kl_coefficient": 0.1}}, "raise kl_coefficient (0.1 now)"),
        ("one step goes too far", {}, "or set kl_coefficient."),
        ("attempts run out of time", {"rollout_timeout": 0.5}, "raise rollout_timeout (0.5 now)"),
        ("groups too small", {"sampling": {"min_group_size": 6}, "group_size": 4}, "SampleSettings is 6."),
        ("sequences too long", {"sampling": {"max_tokens": 64}}, "raise max_tokens (64 now)"),
        ("samples too old", {"max_staleness": 4, "sampling": {"max_staleness": 1}}, "max_staleness (1 now)"),
        ("answers grow", {"sentinel": {"stop": True}}, "to go back to."),
        ("too few steps", {"steps": 2}, "raise steps (2 now)"),
    ],
)
async def test_advice_knows_the_settings_of_the_run(fault: str, settings: dict[str, Any], advice: str | None) -> None:
    found = await judged_with(settings, FAULTS[fault])
    named = [one.advice for one in found.findings if one.name == FAULTS[fault].name]
    assert (named == []) if advice is None else advice in named[0], found


@pytest.mark.parametrize(("rate", "advice"), [(0.0, "Set a learning_rate above 0"), (1e-5, "(1e-05 now)")])
async def test_a_rate_that_is_zero_is_not_to_be_multiplied(rate: float, advice: str) -> None:
    points = [{**one, "learner/learning_rate": rate} for one in TOO_LOW]
    found = await judged(Fault("", points=points))
    assert (found.findings[0].name, advice in found.findings[0].advice) == ("learning_rate_too_low", True)


@pytest.mark.parametrize("kl_to_old", [0.0, 2.5])
async def test_a_distance_to_what_sampled_is_not_the_change_of_a_step(kl_to_old: float) -> None:
    """It is 0 before the only optimiser step, and that of several updates where rollouts are ahead."""
    points = [{**one, "learner/kl_to_old": kl_to_old, "learner/kl": kl_to_old} for one in curve(reward=RISING)]
    found = await judged(Fault("", points=points))
    assert (found.outcome, found.findings) == ("gained", ())


@pytest.mark.parametrize("kind", ["grpo", "apo"])
async def test_the_error_of_a_run_comes_first(kind: str) -> None:
    run = Recorded()
    await run.store.start_run(kind, run_id=run.run_id, config={"algorithm": kind})
    error = "EngineError: vLLM has ended. Its last lines:\nout of memory\n\nTraceback ..."

    found = await verdict_of_run(run.store, await run.end({"error": error}, "failed"))

    assert found.sentence == "The run failed: EngineError: vLLM has ended. Its last lines: out of memory."
    assert found.findings == ()


async def test_a_run_that_failed_late_says_what_it_had_gained() -> None:
    found = await judged_with({}, Fault("", points=FAST), {"error": "EngineError: gone"}, status="failed")
    assert (found.outcome, found.sentence[:55]) == ("gained", "The run failed: EngineError: gone. Until then: Gained +")


@pytest.mark.parametrize(
    ("settings", "summary", "said"),
    [
        ({}, {}, "(40 training steps, the last 13 against the first 4)."),
        (
            {"validation_temperature": 0.0},
            {"validation_before": BEFORE},
            "baseline 0.000 on 128 tasks, validated greedily; not",
        ),
    ],
    ids=["without validation", "stopped"],
)
async def test_a_fast_learner_that_was_stopped_has_gained(settings: Any, summary: Any, said: str) -> None:
    found = await judged_with(settings, Fault("", points=FAST), summary, status="stopped")
    assert (found.outcome, said in found.sentence) == ("gained", True), found.sentence


@pytest.mark.parametrize("rewards", [[0.5, 0.45, 0.55, 0.5, 0.48] * 4, [0.9, 0.95, 0.9, 0.2, 0.1, 0.1, 0.1, 0.1]])
async def test_a_curve_that_does_not_rise_has_not_gained(rewards: list[float]) -> None:
    assert (await judged(Fault("", points=curve(reward=rewards)))).outcome in ("no gain", "lost")


async def test_a_late_collapse_is_found_although_the_run_gained() -> None:
    found = await judged_with(
        {}, Fault("", points=COLLAPSES), {"gain": {"mean": 0.1, "low": 0.01, "high": 0.2, "n": 9}}
    )
    assert (found.outcome, [one.name for one in found.findings]) == ("gained", ["collapsed"])
    assert "in 140 of 160 groups of the last 10 steps" in found.sentence


@pytest.mark.parametrize(("first", "right"), [(1.0, 15.0), (14.0, 8.0)], ids=["solved", "from the beginning"])
async def test_one_answer_is_no_collapse_where_it_is_right_or_was_there_before(first: float, right: float) -> None:
    figures = [(first, 1.0)] * 10 + [(15.0, right)] * 30
    points = [
        learned(**{"groups/all": 16.0, "groups/one_answer": one, "groups/all_right": solved}) for one, solved in figures
    ]
    assert "collapsed" not in [one.name for one in (await judged(Fault("", points=points))).findings]


async def test_a_sample_of_the_rollouts_is_called_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentlightning.verdict.evidence.NEWEST_ROLLOUTS", 8)
    assert "of 2 groups (a sample, the newest) all" in (await judged(FAULTS["all wrong"])).sentence


async def test_counts_of_all_groups_are_said_where_they_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentlightning.verdict.evidence.NEWEST_ROLLOUTS", 8)
    points = [learned(**{"groups/all": 16.0, "groups/same": 15.0})] * 4
    found = await judged(Fault("", groups=[[0.0] * 4] * 4, points=points))
    assert "In 60 of 64 groups all rewards are the same" in found.sentence


async def test_two_steps_are_too_short_to_say() -> None:
    found = await judged(FAULTS["too few steps"])
    assert (found.outcome, found.sentence[:37]) == ("unknown", "Too short to say what was gained: 2 s")


async def test_two_rollouts_that_failed_are_named_with_their_error() -> None:
    found = await judged(Fault("", groups=[[None] * 2], options={"status": "failed", "error": "KeyError: 'q'"}))
    assert found.sentence == "2 of 2 rollouts failed, most often with: KeyError: 'q'."


async def test_of_two_policies_the_one_with_the_fault_is_named() -> None:
    points = [
        {
            f"{name}/{key}": value
            for name, kl in (("planner", 1e-9), ("solver", 0.01))
            for key, value in learned(kl=kl).items()
        }
        for _ in range(8)
    ]
    found = await judged(Fault("", points=points))
    assert [one.sentence[:55] for one in found.findings] == ["Policy 'planner': In 8 steps the model did not change ("]


CHALLENGE = {"candidate": "v2", "gain": {"mean": 0.05, "low": -0.1, "high": 0.2, "n": 20}, "tasks_needed": 180}
SEED = {"prompts": {"p": "a"}, "seed": {"p": "a"}, "best_version": "v0", "candidates": []}
REJECTED = [{"fate": "seed", "reason": None}, {"fate": "rejected", "reason": "it lacks {question}"}]


@pytest.mark.parametrize(
    ("summary", "outcome", "said"),
    [
        (
            {"prompts": {"p": "b"}, "best_version": "v3", "gain": {"mean": 0.4, "low": 0.1, "high": 0.6, "n": 30}},
            "gained",
            "Gained +0.400 [+0.100, +0.600] (30 validation tasks): the best prompt is v3.",
        ),
        ({"prompts": {"p": "b"}, "best_version": "v3"}, "unknown", "By its mean alone the best prompt is v3"),
        (
            {"challenges": [CHALLENGE]},
            "no gain",
            "v2, the best candidate, has +0.050 [-0.100, +0.200] (20 validation tasks). About 180 validation tasks",
        ),
        ({"candidates": REJECTED}, "no gain", "1 were rejected, the first because it lacks {question}."),
        ({"stopped": "the budget allows no more"}, "no gain", "Ended early: the budget allows no more."),
    ],
    ids=["gained", "by the mean", "kept the seed", "rejected", "budget"],
)
async def test_an_optimisation_of_prompts_says_how_the_best_candidate_did(
    summary: Any, outcome: str, said: str
) -> None:
    run = await Recorded().begin()
    await run.group([0.0, 1.0, 0.0, 1.0], ids=False)  # whose tokens nobody wants
    own = await run.store.start_run("apo", metadata={"trainer_run_id": run.run_id})
    own = await run.store.finish_run(own.run_id, "succeeded", summary={**SEED, **summary})
    for _ in range(NEWEST_RUNS):
        await run.store.start_run("fit")  # later trainings in the same store

    both = [await verdict_of_run(run.store, one) for one in (own, await run.end())]

    assert both[0].sentence == both[1].sentence
    assert (both[0].outcome, said in both[0].sentence, both[0].findings) == (outcome, True, ()), both[0].sentence


@pytest.mark.parametrize(
    ("losses", "outcome", "said"),
    [
        (
            [2.3, 1.5, 1.2],
            "unknown",
            "The loss on held-out rollouts fell from 2.300 to 1.200 nats a token; rewards were not validated.",
        ),
        ([2.3, 2.4, 2.6], "no gain", "Nothing was gained: the loss on held-out rollouts did not fall below 2.300"),
        ([2.3, 2.30001, 2.30002], "no gain", "In 2 epochs the loss did not change (2.3000 nats a token)"),
        ([1.3, 4.5, 7.0], "no gain", "The loss on held-out rollouts rose from 1.30 to 7.00"),
    ],
)
async def test_fine_tuning_says_what_its_losses_say(losses: list[float], outcome: str, said: str) -> None:
    run = Recorded()
    await run.store.start_run("SFT", run_id=run.run_id, config={"algorithm": "agentlightning.algorithm.sft.sft.SFT"})
    before = {"sft/held_out_loss": losses[0]}  # the first epoch
    await run.metrics(before, *({"sft/held_out_loss": loss, "sft/loss": loss} for loss in losses[1:]))

    found = await verdict_of_run(run.store, await run.end())

    assert (found.outcome, said in found.sentence) == (outcome, True), found.sentence


async def test_a_trial_says_the_reward_and_no_more() -> None:
    run = Recorded()
    config = {"algorithm": "agentlightning.cli.evaluate.EvaluationRun"}
    await run.store.start_run("eval", run_id=run.run_id, config=config)
    await run.group([1.0, 0.0, 1.0, 1.0] * 5, mode="val", ids=False, finish="length")

    found = await verdict_of_run(run.store, await run.end())

    assert (found.sentence, found.findings) == ("The reward is 0.750 [0.531, 0.888] (n=20).", ())


async def test_a_run_that_goes_on_says_so() -> None:
    run = await recorded(HEALTHY)
    (found,) = await run.store.query_runs()
    assert (await verdict_of_run(run.store, found)).sentence.startswith("Still running. Gained")


def test_the_page_on_agents_that_do_not_learn_names_every_outcome_and_finding() -> None:
    page = Path(__file__).parents[2] / "docs" / "how-to" / "my-agent-does-not-learn.md"
    text = page.read_text(encoding="utf-8")
    assert [name for name in (*get_args(Outcome), *FINDINGS) if f"| `{name}` |" not in text] == []
