"""Every fault is named by its own name, with the figure that shows it; a healthy run has none."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, get_args

import pytest

from agentlightning.verdict import FINDINGS, Verdict, verdict_of_rollout, verdict_of_run
from agentlightning.verdict.verdict import Outcome
from tests.verdict.recorded import Recorded, learned

MIXED: list[float | None] = [0.0, 1.0, 0.0, 1.0]
SAME = [[7, 8]] * 4
Fault = Callable[[Recorded], Awaitable[None]]


async def groups(run: Recorded, count: int, rewards: list[float | None], **options: Any) -> None:
    for step in range(count):
        await run.group(rewards, step=step, **options)


async def nothing_ran(run: Recorded) -> None:
    from agentlightning.algorithm.batches import Batches

    await Batches(run.store).send([1, 2], metadata={"run_id": run.run_id})


async def failed(run: Recorded) -> None:
    await groups(run, 3, [None] * 4, status="failed", error="KeyError: 'nmae'")


async def timeout(run: Recorded) -> None:
    await groups(run, 2, [None] * 4, status="timeout")


async def lost_workers(run: Recorded) -> None:
    await groups(run, 2, [None] * 4, status="unresponsive")


async def model_calls_failed(run: Recorded) -> None:
    await groups(run, 2, MIXED, call_error="Rate limit reached")


async def no_reward(run: Recorded) -> None:
    await groups(run, 2, [None] * 4)


async def bad_reward(run: Recorded) -> None:
    await groups(run, 2, MIXED)
    await run.metrics(learned(**{"skipped/bad_reward": 3.0}))


async def no_model_calls(run: Recorded) -> None:
    await groups(run, 2, MIXED, calls=0)
    await run.metrics(learned())


async def ids_missing(run: Recorded) -> None:
    await groups(run, 2, MIXED, ids=False)
    await run.metrics(learned())


async def cut_off(run: Recorded) -> None:
    await groups(run, 2, MIXED, finish="length")


async def groups_too_small(run: Recorded) -> None:
    await groups(run, 4, [1.0])
    await run.metrics(learned(**{"skipped/group_too_small": 8.0}))


async def too_long(run: Recorded) -> None:
    await groups(run, 2, MIXED)
    await run.metrics(learned(**{"skipped/too_long": 8.0}))


async def too_stale(run: Recorded) -> None:
    await groups(run, 2, MIXED)
    await run.metrics(learned(**{"skipped/too_stale": 8.0}))


async def too_easy_or_too_hard(run: Recorded) -> None:
    for step in range(4):
        await run.group([float(step % 2)] * 4, step=step)


async def all_right(run: Recorded) -> None:
    await groups(run, 4, [1.0] * 4)


async def all_wrong(run: Recorded) -> None:
    await groups(run, 4, [0.0] * 4)


async def constant_reward(run: Recorded) -> None:
    await groups(run, 4, [0.5] * 4)


async def collapsed(run: Recorded) -> None:
    await groups(run, 4, [0.0] * 4, answers=SAME)
    await run.metrics(learned(entropy=1.0), learned(entropy=0.001))


async def collapsed_while_learning(run: Recorded) -> None:
    await groups(run, 2, MIXED)
    await run.metrics(*(learned(reward=r, entropy=e) for r, e in [(0.2, 1), (0.8, 0.5), *[(0.1, 0.001)] * 4]))


async def same_answers(run: Recorded) -> None:
    await groups(run, 4, [0.0] * 4, answers=SAME)


async def noisy_reward(run: Recorded) -> None:
    await groups(run, 4, MIXED, answers=SAME)


async def learning_rate_too_high(run: Recorded) -> None:
    await groups(run, 2, MIXED)
    await run.metrics(*(learned(reward=r, entropy=e) for r, e in [(0.3, 1), (0.6, 1.1), *[(0.0, 4.0)] * 4]))


async def model_jumped(run: Recorded) -> None:
    await groups(run, 2, MIXED)
    await run.metrics(learned(kl=0.01), learned(kl=2.5))


async def reward_hacking(run: Recorded) -> None:
    await groups(run, 2, MIXED)
    watched = [{"watched/mean": 0.9 - 0.08 * step, "watched/error": 0.01} for step in range(10)]
    await run.metrics(*(learned(reward=0.5, **one) | {"reward/mean": 0.1 * i} for i, one in enumerate(watched)))


async def ran_away(run: Recorded) -> None:
    await groups(run, 2, MIXED)
    await run.metrics(*(learned(**{"answers/tokens": 10.0 * 2**step}) for step in range(8)))


async def learning_rate_too_low(run: Recorded) -> None:
    await groups(run, 2, MIXED)
    await run.metrics(*[learned(kl=1e-9)] * 6)


async def one_task(run: Recorded) -> None:
    await groups(run, 5, MIXED, task="the same")
    await run.metrics(*[learned()] * 6)


async def few_steps(run: Recorded) -> None:
    await groups(run, 2, MIXED)
    await run.metrics(learned(), learned())


async def weak_agent(run: Recorded) -> None:
    await groups(run, 2, [0.0, 0.25, 0.5, 0.25], agent="critic")
    await groups(run, 2, [1.0, 0.5, 1.0, 0.5], agent="solver")


FAULTS: dict[str, tuple[Fault, str, str]] = {
    "nothing ran": (nothing_ran, "nothing_ran", "2 rollouts wait in the queue"),
    "the agent raises": (failed, "failed", "12 of 12 rollouts failed, most often with: KeyError: 'nmae'"),
    "attempts run out of time": (timeout, "timeout", "8 of 8 rollouts ran out of time"),
    "workers are lost": (lost_workers, "lost_workers", "8 of 8 rollouts lost the worker"),
    "the backend refuses": (
        model_calls_failed,
        "model_calls_failed",
        "8 of 8 model calls failed, most often with: 429",
    ),
    "no reward arrives": (no_reward, "no_reward", "8 of 8 rollouts that succeeded left no reward"),
    "rewards are not finite": (bad_reward, "bad_reward", "3 rewards are not finite"),
    "the model is not called": (no_model_calls, "no_model_calls", "In 8 of 8 rollouts no model call"),
    "calls without token ids": (ids_missing, "ids_missing", "8 of 8 model calls have no token ids"),
    "answers are cut off": (cut_off, "cut_off", "8 of 8 answers were cut off"),
    "groups too small": (groups_too_small, "groups_too_small", "8 of 8 rollouts had no sibling"),
    "sequences too long": (too_long, "too_long", "8 sequences of 8 rollouts are longer"),
    "samples too old": (too_stale, "too_stale", "weights too old"),
    "tasks too easy or too hard": (too_easy_or_too_hard, "too_easy_or_too_hard", "always solved or never (0.50"),
    "all right": (all_right, "all_right", "nothing left to learn"),
    "all wrong": (all_wrong, "all_wrong", "no answer was ever right"),
    "constant reward": (constant_reward, "constant_reward", "every rollout got 0.5"),
    "collapsed at the end": (collapsed, "collapsed", "entropy 0.001"),
    "collapsed on the way": (collapsed_while_learning, "collapsed", "entropy fell from 1.00 to 0.001"),
    "seed fixed by the agent": (same_answers, "same_answers", "all answers of a group are the same, token by token"),
    "random reward": (noisy_reward, "noisy_reward", "in 8 of 12 cases"),
    "answers grow": (ran_away, "ran_away", "Answers grew from"),
    "the model falls apart": (learning_rate_too_high, "learning_rate_too_high", "entropy rose from 1.00 to 4.00"),
    "one step goes too far": (model_jumped, "learning_rate_too_high", "changed by 2.50 nats"),
    "steps too small": (learning_rate_too_low, "learning_rate_too_low", "did not change"),
    "one task alone": (one_task, "one_task", "have the same task"),
    "too few steps": (few_steps, "few_steps", "Only 2 steps"),
    "one of several agents is weak": (weak_agent, "weak_agent", "Agent 'critic' has the lowest reward: 0.25 in the"),
}


async def judged(fault: Fault, summary: dict[str, Any] | None = None) -> Verdict:
    run = await Recorded().begin()
    await fault(run)
    return await verdict_of_run(run.store, await run.end(summary))


@pytest.mark.parametrize(("fault", "name", "figure"), FAULTS.values(), ids=FAULTS.keys())
async def test_a_fault_is_the_cause_that_the_verdict_names(fault: Fault, name: str, figure: str) -> None:
    found = await judged(fault)

    assert found.outcome != "gained"
    assert (found.findings[0].name, figure in found.sentence) == (name, True), found.sentence
    assert found.findings[0].advice


async def test_a_gain_by_a_loophole_is_named_as_such() -> None:
    found = await judged(reward_hacking)

    assert (found.outcome, found.findings[0].name) == ("gained", "reward_hacking")
    assert (
        "in the trained reward only. The trained reward rose from 0.15 to 0.75 while the watched one fell"
        in found.sentence
    )


def test_every_finding_has_a_fault_that_shows_it() -> None:
    assert {"reward_hacking", *(name for _, name, _ in FAULTS.values())} == set(FINDINGS)


async def healthy(run: Recorded) -> None:
    for step in range(8):
        await run.group([0.0, 1.0, 1.0, step / 8], step=step)
    await run.metrics(*(learned(reward=0.2 + 0.1 * step, entropy=1.0 - 0.1 * step) for step in range(8)))


async def solved(run: Recorded) -> None:
    await groups(run, 4, [1.0] * 4, answers=SAME)
    rising = [(0.2, 1.0), (0.6, 0.5), (0.9, 0.1), (1.0, 0.01), (1.0, 0.01), (1.0, 0.01)]
    await run.metrics(*(learned(reward=r, entropy=e) for r, e in rising))


async def weighted(run: Recorded) -> None:
    """The first reward is always the same; the sum that is learned from is not."""
    await groups(run, 8, [0.0] * 4)
    counted = {"groups/all": 2.0, "groups/same": 0.0}
    await run.metrics(*(learned(reward=0.2 + 0.1 * step, **counted) for step in range(8)))


@pytest.mark.parametrize("run", [healthy, solved, weighted])
async def test_a_healthy_run_has_no_findings(run: Fault) -> None:
    found = await judged(run)

    assert (found.outcome, found.findings) == ("gained", ())


@pytest.mark.parametrize(
    ("summary", "outcome", "sentence"),
    [
        ({"gain": {"mean": 0.7, "low": 0.6, "high": 0.8, "n": 128}}, "gained", "Gained +0.700 [+0.600, +0.800] (128"),
        ({"gain": {"mean": 0.1, "low": -0.1, "high": 0.3, "n": 20}}, "no gain", "Nothing was gained (+0.100 [-0.100"),
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
    found = await judged(healthy, summary)

    assert (found.outcome, found.sentence.startswith(sentence)) == (outcome, True), found.sentence


async def test_rollouts_of_another_run_do_not_count() -> None:
    run = await Recorded().begin()
    await all_wrong(Recorded(run.store, "another"))
    await healthy(run)

    found = await verdict_of_run(run.store, await run.end())

    assert found.findings == ()


async def test_a_summary_is_json_and_a_text_lists_the_findings() -> None:
    found = await judged(all_wrong)

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


def test_the_page_on_agents_that_do_not_learn_names_every_outcome_and_finding() -> None:
    page = Path(__file__).parents[2] / "docs" / "how-to" / "my-agent-does-not-learn.md"
    text = page.read_text(encoding="utf-8")

    assert [name for name in (*get_args(Outcome), *FINDINGS) if f"| `{name}` |" not in text] == []
