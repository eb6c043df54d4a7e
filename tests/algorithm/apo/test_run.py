"""Runs of APO over a store, with agents and an optimiser of a small world."""

import asyncio
import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentlightning.adapter import TracerTraceToTriplet
from agentlightning.algorithm.apo import Lineage, OptimisationBudget, OptimisationResult
from agentlightning.algorithm.intervals import Estimate
from agentlightning.errors import ConfigurationError, TrainingError
from agentlightning.store import InMemoryLightningStore
from agentlightning.trainer import Trainer
from agentlightning.types import PromptTemplate
from tests.algorithm.apo.world import SEED, WORDS, Optimiser, agents, apo_in, optimised, share_of_words
from tests.simulated_model.optimiser import NONSENSE

pytestmark = pytest.mark.usefixtures("quick_poml")


async def test_the_best_prompt_says_all_that_helps() -> None:
    apo = await optimised(Optimiser())

    best = apo.get_best_prompt().template
    assert all(word in best for word in WORDS[:3])
    assert apo.result.gain.low > 0
    assert apo.result.best_score > apo.result.seed_score == 0.0


async def test_the_lineage_leads_from_the_seed_to_the_best_prompt_and_stands_in_the_store() -> None:
    store = InMemoryLightningStore()
    apo = await optimised(Optimiser(), store=store)

    (run,) = await store.query_runs(name="apo")
    line = apo.lineage()

    assert run.status == "succeeded"
    assert (line[0].fate, line[0].template, line[-1].fate) == ("seed", SEED.template, "promoted")
    assert [one.parent for one in line] == [None, *(one.version for one in line[:-1])]
    assert all(one.critique in WORDS and one.scores for one in line[1:])
    assert list(Lineage.of_run(run)) == list(apo.candidates)
    points = await store.query_metrics(run.run_id, names=["apo/best_score"])
    assert points[-1].values["apo/best_score"] == pytest.approx(apo._history_best_score)


async def test_the_best_prompts_are_published_and_written_to_the_file(tmp_path: Path) -> None:
    store, output = InMemoryLightningStore(), tmp_path / "new" / "best.json"
    apo = await optimised(Optimiser(), store=store, output=output)

    written = json.loads(output.read_text(encoding="utf-8"))
    latest = await store.get_latest_resources()

    assert latest is not None
    assert latest.resources == {"prompt": apo.get_best_prompt()}
    assert PromptTemplate(**written["prompts"]["prompt"]) == apo.get_best_prompt()
    assert written["gain"]["low"] > 0
    assert [path.name for path in output.parent.iterdir()] == ["best.json"]


async def test_several_prompts_are_optimised_in_one_run() -> None:
    other = PromptTemplate(template="Summarise {answer}.", engine="f-string")

    def judge(prompts: dict[str, str], task: Any) -> float:
        found = (WORDS[0] in prompts["prompt"]) + (WORDS[0] in prompts["summary"])
        return float(task % 2 < found)

    apo = await optimised(Optimiser(), judge=judge, prompts={"prompt": SEED, "summary": other})

    best = apo.get_best_prompts()
    assert list(best) == ["prompt", "summary"]
    assert all(WORDS[0] in prompt.template for prompt in best.values())
    assert {one.resource_name for one in apo.lineage()[1:]} == {"prompt", "summary"}
    assert apo.result.diff().count("(best)") == 2


async def test_other_resources_reach_the_agents_unchanged() -> None:
    store = InMemoryLightningStore()
    seen: set[str] = set()

    def judge(prompts: dict[str, str], task: Any) -> float:
        seen.update(prompts)
        return 0.0

    apo = apo_in(store, Optimiser(), beam_rounds=0)
    apo.set_initial_resources({"prompt": SEED, "fixed": PromptTemplate(template="x", engine="f-string")})
    async with agents(store, judge):
        await apo.run([1, 2], list(range(10)))

    assert seen == {"prompt", "fixed"}


async def test_candidate_that_no_longer_formats_is_rejected_with_the_reason() -> None:
    edits = iter(
        ["No braces.", "Answer {question} for {whom}.", "Answer {question", "```\nPlease answer {question}.\n```"]
    )

    apo = await optimised(Optimiser(edit=lambda prompt, word: next(edits)), beam_rounds=1)

    reasons = {one.template: one.reason for one in apo.candidates if one.fate == "rejected"}
    assert "drops the placeholders question" in reasons["No braces."]
    assert "new placeholders 'whom'" in reasons["Answer {question} for {whom}."]
    assert "does not parse" in reasons["Answer {question"]
    assert "Please answer {question}." in {one.template for one in apo.candidates if one.fate != "rejected"}
    assert apo.result.counts["candidates that were rejected"] == 3


async def test_candidate_with_code_of_its_own_is_rejected_with_the_reason() -> None:
    code = "{question.__init__.__globals__}"
    edits = iter([f"Answer {{question}}: {code}", "Answer {question!r}.", "Answer {question}, please.", "{question}"])

    apo = await optimised(Optimiser(edit=lambda prompt, word: next(edits)), beam_rounds=1)

    assert [one.reason for one in apo.candidates if one.fate == "rejected"] == [
        f"it has code that the seed does not have: {code}",
        "it has code that the seed does not have: {question!r}",
    ]


POML_SEED = PromptTemplate(template="<p>Answer {{ question }}.</p>", engine="poml")


async def test_a_poml_prompt_is_refused_where_runners_would_refuse_its_candidates() -> None:
    trainer, store, client = Trainer(strategy="shm", progress="off"), InMemoryLightningStore(), Optimiser()
    apo = apo_in(store, client, prompts={"prompt": POML_SEED})
    apo.set_trainer(trainer)

    with pytest.raises(ConfigurationError, match=r"Prompt 'prompt' is a POML template.*allow_poml=True"):
        await apo.run([1, 2], [3, 4])

    assert (client.calls, len(await store.query_rollouts())) == ([], 0)


async def test_a_poml_prompt_is_optimised_where_that_is_allowed() -> None:
    trainer, store = Trainer(strategy="shm", progress="off", allow_poml=True), InMemoryLightningStore()
    edits = Optimiser(edit=lambda prompt, word: prompt.replace(".</p>", f" {word}.</p>"))
    apo = apo_in(store, edits, prompts={"prompt": POML_SEED})
    apo.set_trainer(trainer)

    async with agents(store):
        await apo.run(list(range(40)), list(range(60)))

    assert apo.get_best_prompt().engine == "poml"
    assert apo.result.is_improved


async def test_equal_prompts_with_a_noisy_reward_are_not_called_better() -> None:
    noise = random.Random(7)

    apo = await optimised(Optimiser(), judge=lambda prompts, task: float(noise.random() < 0.5), beam_rounds=3)

    assert not apo.result.is_improved
    assert apo.get_best_prompt() == SEED
    assert [one.verdict for one in apo.result.challenges] == ["not better"] * len(apo.result.challenges)


async def test_a_challenger_is_compared_on_tasks_that_did_not_choose_it() -> None:
    store = InMemoryLightningStore()
    await optimised(Optimiser(), store=store, beam_rounds=1, run_initial_validation=False)

    used: dict[str, list[Any]] = {}
    for rollout in await store.query_rollouts():
        if rollout.mode == "val":
            used.setdefault(rollout.resources_id or "", []).append(rollout.input)

    assert all(len(tasks) == len(set(tasks)) for tasks in used.values())


async def test_prompt_behind_one_that_was_refused_may_challenge_too() -> None:
    """Two prompts look equally good; the one that came first has no gain on the tasks that decide."""
    edits = iter(["Say {question} idly.", "Say {question} please."])  # and then nothing new

    def judge(prompts: dict[str, str], task: Any) -> float:
        if "idly" in prompts["prompt"]:
            return float(seen.setdefault(task, len(seen)) < 8)  # on the batch that chooses, and nowhere else
        return float("please" in prompts["prompt"])

    seen: dict[Any, int] = {}
    apo = await optimised(
        Optimiser(edit=lambda prompt, word: next(edits, prompt)),
        judge=judge,
        beam_rounds=3,
        branch_factor=1,
        concurrency=1,
    )

    assert [(one.round, one.verdict) for one in apo.result.challenges] == [(1, "not better"), (2, "better")]
    assert apo.get_best_prompt().template == "Say {question} please."


async def test_without_a_comparison_the_higher_mean_wins() -> None:
    apo = await optimised(Optimiser(), alpha=None, tasks=16)

    assert all(word in apo.get_best_prompt().template for word in WORDS)
    assert apo.result.best_score == 1.0
    assert apo.result.gain is None


async def test_candidates_are_made_at_the_same_time_within_the_limit() -> None:
    client, have_met, counts = Optimiser(), asyncio.Event(), [0]
    create = client.chat.completions.create

    async def create_together(**asked: Any) -> Any:
        """The first three wait for each other, however slowly each of them is prepared."""
        counts.append(counts[-1] + 1)
        if counts[-1] == 3:
            have_met.set()
        await asyncio.wait_for(have_met.wait(), 60)
        answer = await create(**asked)
        counts.append(counts[-1] - 1)
        return answer

    client.chat.completions.create = create_together
    await optimised(client, concurrency=3, beam_rounds=1)

    assert max(counts) == 3


@pytest.mark.parametrize("rollouts", [0, 40, 100, 151, 200])
async def test_a_budget_of_rollouts_is_kept_to_the_last_one(rollouts: int) -> None:
    store = InMemoryLightningStore()

    apo = await optimised(Optimiser(), store=store, budget=OptimisationBudget(rollouts=rollouts), tasks=30)

    sent = len(await store.query_rollouts())
    assert sent == apo.result.spent["rollouts"] <= rollouts
    assert "budget" in apo.result.stopped


@pytest.mark.parametrize("calls", [0, 1, 2, 7, 11])
async def test_a_budget_of_model_calls_is_kept_to_the_last_one(calls: int) -> None:
    client = Optimiser()

    apo = await optimised(client, budget=OptimisationBudget(model_calls=calls))

    assert len(client.calls) == apo.result.spent["model_calls"] == calls // 2 * 2
    assert "budget" in apo.result.stopped


async def test_run_in_which_all_rollouts_fail_stops_with_the_first_traceback() -> None:
    store = InMemoryLightningStore()

    def judge(prompts: dict[str, str], task: Any) -> float:
        raise ValueError("the oven is cold")

    with pytest.raises(TrainingError, match="Traceback: the oven is cold"):
        await optimised(Optimiser(), judge=judge, store=store)

    (run,) = await store.query_runs(name="apo")
    assert run.status == "failed"
    assert "the oven is cold" in run.summary["error"]


async def test_candidate_with_which_all_rollouts_fail_does_not_stop_the_run() -> None:
    def judge(prompts: dict[str, str], task: Any) -> float:
        if "exactly" in prompts["prompt"]:
            raise ValueError("too exact")
        return share_of_words(prompts, task)

    apo = await optimised(Optimiser(), judge=judge)

    assert "please" in apo.get_best_prompt().template
    assert "exactly" not in apo.get_best_prompt().template


@pytest.mark.parametrize("answer", [None, ""], ids=["nothing", "empty"])
async def test_empty_answers_are_skipped_and_counted(answer: str | None) -> None:
    apo = await optimised(Optimiser(edit=lambda prompt, word: answer), beam_rounds=1)

    assert apo.result.counts["empty edits"] == 4
    assert not apo.result.is_improved


async def test_rollouts_that_are_late_are_cancelled_and_counted() -> None:
    store = InMemoryLightningStore()
    apo = apo_in(store, Optimiser(), beam_rounds=0, rollout_batch_timeout=1.0)

    async with agents(store, lambda prompts, task: 1.0 if task == 1 else None):
        await apo.run([1], [1, 2, 3])

    assert [rollout.status for rollout in await store.query_rollouts()] == ["succeeded", "cancelled", "cancelled"]
    assert apo.result.counts["rollouts that were late"] == 2


async def test_rollouts_that_nobody_runs_end_the_run() -> None:
    apo = apo_in(InMemoryLightningStore(), Optimiser(), rollout_batch_timeout=0.05)

    with pytest.raises(TrainingError, match="No rollout was finished after 0 s; are there runners"):
        await apo.run([1], [1, 2, 3])


async def test_cancelled_run_is_noted_as_stopped_and_withdraws_its_rollouts() -> None:
    store = InMemoryLightningStore()
    apo = apo_in(store, Optimiser())
    running = asyncio.create_task(apo.run([1], [1, 2, 3]))
    while not await store.query_rollouts():
        await asyncio.sleep(0)
    running.cancel()

    with pytest.raises(asyncio.CancelledError):
        await running

    (run,) = await store.query_runs(name="apo")
    assert run.status == "stopped"
    assert {rollout.status for rollout in await store.query_rollouts()} == {"cancelled"}


async def test_a_run_needs_no_adapter_of_the_callers() -> None:
    store = InMemoryLightningStore()
    apo = apo_in(store, Optimiser(), beam_rounds=1)
    apo.set_adapter(TracerTraceToTriplet())

    async with agents(store):
        await apo.run(list(range(8)), list(range(20)))

    assert apo.result is not None
    assert apo.result.counts.get("traces that could not be read", 0) == 0


async def test_model_that_never_answers_stops_the_run() -> None:
    class Denied(Exception):
        status_code = 401

    async def create(**asked: Any) -> Any:
        raise Denied("no such key")

    client = SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))

    with pytest.raises(TrainingError, match="no such key"):
        await optimised(client)


async def test_nonsense_of_the_model_is_rejected_and_the_run_goes_on() -> None:
    edits = iter([NONSENSE, NONSENSE, NONSENSE])

    apo = await optimised(Optimiser(edit=lambda prompt, word: next(edits, f"{prompt} Do it {word}.")))

    rejected = [one for one in apo.candidates if one.fate == "rejected"]
    assert [one.reason for one in rejected if one.template == NONSENSE] == ["it drops the placeholders question"] * 3
    assert apo.result.is_improved


async def test_answer_that_is_no_chat_completion_is_a_call_that_failed() -> None:
    class Broken(Optimiser):
        async def _create(self, **asked: Any) -> Any:
            return "<html>" if len(self.calls) == 2 else await super()._create(**asked)

    client = Broken()
    client.calls += [{}, {}]
    client.chat.completions.create = client._create

    with pytest.raises(TrainingError, match="no chat completion: '<html>'"):
        await optimised(client)


async def test_rate_limits_are_waited_for_and_the_search_is_the_same() -> None:
    class Limited(Exception):
        status_code = 429
        response = SimpleNamespace(headers={"retry-after-ms": "1"})

    class Busy(Optimiser):
        refused = 0

        async def _create(self, **asked: Any) -> Any:
            if self.refused <= len(self.calls):
                self.refused += 1
                raise Limited("slow down")
            return await super()._create(**asked)

    busy, calm = Busy(), Optimiser()

    limited, whole = await optimised(busy, search_seed=1), await optimised(calm, search_seed=1)

    assert busy.refused > 0
    assert limited.result.spent["model_calls"] == len(busy.calls) + busy.refused
    assert [one.template for one in limited.candidates] == [one.template for one in whole.candidates]


async def test_model_that_failed_is_asked_again_by_the_next_run(tmp_path: Path) -> None:
    class Denied(Exception):
        status_code = 401

    class Locked(Optimiser):
        is_open = False

        async def _create(self, **asked: Any) -> Any:
            if not self.is_open:
                raise Denied("no such key")
            return await super()._create(**asked)

    client, store = Locked(), InMemoryLightningStore()
    with pytest.raises(TrainingError, match="no such key"):
        await optimised(client, store=store, state_file=tmp_path / "state")
    client.is_open = True

    apo = await optimised(client, store=store, state_file=tmp_path / "state")

    assert apo.result.is_improved
    assert apo.result.spent["rollouts"] == len(await store.query_rollouts())


async def test_rollout_without_a_reward_counts_as_the_least_there_can_be() -> None:
    def judge(prompts: dict[str, str], task: Any) -> float:
        if task % 5 == 0:
            raise ValueError("no reward")
        return 1.0 + 4.0 * share_of_words(prompts, task)

    apo = await optimised(Optimiser(), judge=judge, reward_range=(1.0, 5.0))

    assert apo.result.is_improved
    assert apo.result.seed_score == 1.0


def test_one_of_a_thing_is_told_as_one() -> None:
    prompts = {"prompt": SEED}
    spent, counts = {"rollouts": 1, "model_calls": 2, "cost": 0.0}, {"candidates that were rejected": 1}
    result = OptimisationResult(prompts, prompts, "v0", None, None, Estimate(0.5, 0, 1, 1), spent=spent, counts=counts)

    lines = result.headlines()

    assert "Gain +0.500, interval [+0.000, +1.000], from 1 pair of rollouts." in lines
    assert "Spent: 1 rollout, 2 model calls." in lines
    assert "Candidates that were rejected: 1." in lines


async def test_the_end_shows_scores_interval_and_diff() -> None:
    apo = await optimised(Optimiser())

    told = str(apo.result)

    assert "Validation score: 0.000 -> " in told
    assert f"from {apo.result.gain.n} pairs" in told
    assert f"-{SEED.template}" in told.splitlines()
    assert f"+{apo.get_best_prompt().template}" in told.splitlines()
