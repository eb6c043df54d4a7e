"""Runs of APO over a store, with agents and an optimiser of a small world."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from agentlightning.errors import TrainingError
from agentlightning.store import InMemoryLightningStore
from agentlightning.trainer import Trainer
from agentlightning.types import PromptTemplate
from tests.algorithm.prompts.world import SEED, Optimiser, agents, apo_in, optimised, share_of_words

pytestmark = pytest.mark.usefixtures("quick_poml")


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


POML_SEED = PromptTemplate(template="<p>Answer {{ question }}.</p>", engine="poml")


async def test_a_poml_prompt_is_optimised_where_that_is_allowed() -> None:
    trainer, store = Trainer(strategy="shm", progress="off", allow_poml=True), InMemoryLightningStore()
    edits = Optimiser(edit=lambda prompt, word: prompt.replace(".</p>", f" {word}.</p>"))
    apo = apo_in(store, edits, prompts={"prompt": POML_SEED})
    apo.set_trainer(trainer)

    async with agents(store):
        await apo.run(list(range(40)), list(range(60)))

    assert apo.get_best_prompt().engine == "poml"
    assert apo.result.is_improved


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


async def test_too_small_a_validation_set_is_told_a_size_that_can_decide(caplog: pytest.LogCaptureFixture) -> None:
    """With eight tasks that did not choose a candidate, hardly any gain is ever found."""
    with caplog.at_level(logging.WARNING, logger="agentlightning.algorithm.apo"):
        await optimised(Optimiser(), tasks=10, beam_rounds=1, branch_factor=1)

    assert "a validation set of val_batch_size + 20 tasks or more avoids that" in caplog.text


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


async def test_answer_that_is_no_chat_completion_is_a_call_that_failed() -> None:
    class Broken(Optimiser):
        async def _create(self, **asked: Any) -> Any:
            return "<html>" if len(self.calls) == 2 else await super()._create(**asked)

    client = Broken()
    client.calls += [{}, {}]
    client.chat.completions.create = client._create

    with pytest.raises(TrainingError, match="no chat completion: '<html>'"):
        await optimised(client)


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


@pytest.mark.parametrize("forged", [5.0, -5.0, 1e300])
async def test_a_reward_that_one_agent_forged_does_not_end_the_run(forged: float) -> None:
    judge = lambda prompts, task: share_of_words(prompts, task) if task else forged  # noqa: E731

    apo = await optimised(Optimiser(), judge=judge)

    assert apo.result.is_improved
    assert 0.0 <= (apo.result.seed_score or 0.0) < (apo.result.best_score or 0.0) <= 1.0


async def test_records_reach_a_handler_of_the_public_path_once(caplog: pytest.LogCaptureFixture) -> None:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign] # a handler that keeps what it is given
    public = logging.getLogger("agentlightning.algorithm.apo")
    public.addHandler(handler)
    try:
        with caplog.at_level(logging.INFO, logger="agentlightning"):
            await optimised(Optimiser(), beam_rounds=1)
    finally:
        public.removeHandler(handler)

    texts = [record.getMessage() for record in records]
    assert any(text.startswith("Candidate ") for text in texts)
    assert any(text.startswith("APO is done.") for text in texts)
    assert all(caplog.messages.count(text) == texts.count(text) for text in texts)
