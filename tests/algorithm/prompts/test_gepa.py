"""Runs of GEPA over a store, with agents and a reflecting model of a small world."""

import asyncio
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentlightning.algorithm.gepa import GEPA, OptimisationBudget
from agentlightning.errors import ConfigurationError
from agentlightning.store import InMemoryLightningStore
from tests.algorithm.prompts.world import WORDS, Writer, evolved, share_of_words

# ---------------------------------------------------------------------- the reflecting model


async def test_an_async_function_can_reflect() -> None:
    write = Writer()

    async def reflect(question: str) -> str:
        await asyncio.sleep(0)
        return write(question)

    gepa = await evolved(reflect)

    assert all(word in gepa.get_best_prompts()["prompt"].template for word in WORDS)


async def test_a_client_is_asked_for_the_named_model_with_the_traces_and_the_placeholders() -> None:
    write, asked = Writer(), []

    async def create(**request: Any) -> Any:
        asked.append(request)
        said = SimpleNamespace(content=write(request["messages"][0]["content"]))
        return SimpleNamespace(choices=[SimpleNamespace(message=said)], usage=None)

    client = SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))
    gepa = await evolved(client, reflection_model="thinker", temperature=0.5, minibatch_size=3)

    assert gepa.result is not None
    assert gepa.result.spent["model_calls"] == len(asked)
    assert {(one["model"], one["temperature"]) for one in asked} == {("thinker", 0.5)}
    question = asked[0]["messages"][0]["content"]
    assert question.count("# Example") == 3
    assert "Reward: 0 (from 0 to 1)" in question
    assert "add no others: {question}" in question


async def test_prompt_that_is_rejected_is_asked_for_again() -> None:
    broken = iter([""])
    write = Writer(lambda prompt, word: next(broken, f"{prompt} Do it {word}."))

    gepa = await evolved(write, iterations=1)

    assert [one.reason for one in gepa.candidates if one.fate == "rejected"] == ["it is empty"]
    assert len(write.asked) == 2


async def test_its_messages_name_the_algorithm(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "state").write_text('{"format": 1, "algorithm": "APO", "key": "k", "identity": {}}\n')

    with pytest.raises(ConfigurationError, match="not the state of a run of GEPA"):
        await evolved(Writer(), state_file=tmp_path / "state")
    with caplog.at_level("INFO"):
        await evolved(Writer(), iterations=1)

    assert "GEPA is done." in caplog.text
    assert "APO" not in caplog.text


async def test_a_model_that_dies_later_leaves_what_was_found() -> None:
    write = Writer()

    def reflect(question: str) -> str:
        if len(write.asked) == 3:
            raise OSError("the line is dead")
        return write(question)

    gepa = await evolved(reflect)

    assert gepa.result is not None
    assert "the line is dead" in str(gepa.result.stopped)
    assert gepa.result.counts["calls that failed"] == 3
    assert gepa.result.is_improved


# ---------------------------------------------------------------------- budgets


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": OptimisationBudget(rollouts=83)}, "comparison, take 84"),
        ({"n_val": 8}, "4 validation tasks are left .* at least 6 to decide"),
        ({"n_val": 1}, "Of 1 validation tasks"),
        ({"front_size": 60}, "Of 60 validation tasks"),
        ({"n_train": 0}, "train_dataset"),
        ({"prompts": {}}, "PromptTemplate"),
    ],
    ids=["budget", "judges", "one task", "front", "no tasks", "no prompt"],
)
async def test_what_cannot_work_is_told_before_anything_is_spent(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    store = InMemoryLightningStore()

    with pytest.raises(ConfigurationError, match=message):
        await evolved(Writer(), store=store, state_file=tmp_path / "state", **options)

    assert len(await store.query_rollouts()) == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "wrong",
    [{"iterations": 0}, {"patience": 0}, {"minibatch_size": 0}, {"proposals": 0}, {"front_size": 0}, {"alpha": 2.0}],
    ids=str,
)
def test_arguments_that_cannot_be_used_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        GEPA(**wrong)


def test_a_model_is_a_client_or_a_function() -> None:
    model: Any = "gpt-5"
    with pytest.raises(ConfigurationError, match="a client or a function; this is of type str"):
        GEPA(model)


# ---------------------------------------------------------------------- rollouts that go wrong


async def test_failed_rollouts_are_shown_to_the_model_with_their_error() -> None:
    def judge(prompts: dict[str, str], task: Any) -> float:
        if task % 2:
            raise ValueError("odd one out")
        return share_of_words(prompts, task)

    write = Writer()
    await evolved(write, judge=judge, minibatch_size=8, iterations=3)

    assert "The rollout failed; rollout 'ro-" in write.asked[0]
    assert "Traceback: odd one out" in write.asked[0]


async def test_rewards_outside_their_range_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"30 of 30 rewards lie outside .* set reward_range"):
        await evolved(Writer(), judge=lambda prompts, task: 5.0)


@pytest.mark.parametrize("forged", [5.0, -5.0, 1e300])
async def test_a_reward_that_one_agent_forged_does_not_end_the_run(forged: float) -> None:
    gepa = await evolved(
        Writer(), judge=lambda prompts, task: share_of_words(prompts, task) if task else forged, iterations=2
    )

    assert gepa.result is not None
    assert 0.0 <= (gepa.result.best_score or 0.0) <= 1.0


# ---------------------------------------------------------------------- the package


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gepa", None)
    with pytest.raises(ConfigurationError, match=r"pip install .*\[gepa\]"):
        GEPA()
