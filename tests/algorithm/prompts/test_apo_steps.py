"""The steps of APO one by one, as they are called by name."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

import agentlightning.algorithm.apo.apo as apo_module
from agentlightning.adapter import TracerTraceToTriplet, TraceToMessages
from agentlightning.algorithm.apo.apo import (
    APO,
    APPLY_EDIT_PROMPT_FILES,
    GRADIENT_PROMPT_FILES,
    RolloutResultForAPO,
    VersionedPromptTemplate,
)
from agentlightning.types import LLM, PromptTemplate

PROMPT = PromptTemplate(template="Say {word}", engine="f-string")


def versioned(version: str, score: float | None = None, template: str = "Say {word}") -> VersionedPromptTemplate:
    return VersionedPromptTemplate(version, PromptTemplate(template=template, engine="f-string"), score)


def result(reward: float | None = 1.0) -> RolloutResultForAPO:
    return {"status": "succeeded", "final_reward": reward, "spans": [], "messages": []}


def client_saying(*contents: str | None) -> Any:
    answers = [SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(content=text))]) for text in contents]
    return SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=AsyncMock(side_effect=answers))))


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What is given to poml, which answers with a fixed message."""
    given: list[dict[str, Any]] = []

    def render(template: Any, *, context: Any, format: str) -> dict[str, Any]:
        given.append({"template": template, "context": context, "format": format})
        return {"messages": [{"role": "user", "content": "rendered"}]}

    monkeypatch.setattr(apo_module.poml, "poml", render)
    monkeypatch.setattr(apo_module.random, "choice", lambda items: items[0])
    return given


# ---------------------------------------------------------------------- made and asked


def test_the_seed_is_the_first_prompt_template() -> None:
    apo = APO[str]()
    apo.set_initial_resources({"llm": LLM(endpoint="http://x", model="m"), "main": PROMPT})
    assert apo.get_seed_prompt_template() == ("main", PROMPT)


@pytest.mark.parametrize(
    "resources", [None, {"llm": LLM(endpoint="http://x", model="m")}], ids=["nothing", "no prompt"]
)
def test_without_a_seed_it_says_so(resources: Any) -> None:
    apo = APO[str]()
    if resources is not None:
        apo.set_initial_resources(resources)

    with pytest.raises(ValueError, match="PromptTemplate"):
        apo.get_seed_prompt_template()


def test_an_adapter_that_gives_no_messages_is_replaced() -> None:
    apo = APO[str]()
    without = apo.get_adapter()
    apo.set_adapter(TracerTraceToTriplet())
    replaced = apo.get_adapter()

    assert [type(without), type(replaced)] == [TraceToMessages, TraceToMessages]
    assert apo.get_adapter() is replaced


def test_there_is_no_best_prompt_before_a_run() -> None:
    for ask in (APO[str]().get_best_prompt, APO[str]().get_best_prompts, APO[str]().lineage):
        with pytest.raises(ValueError, match="run APO first"):
            ask()


# ---------------------------------------------------------------------- critique and edit


async def test_a_critique_looks_at_a_sample_of_the_results(
    shown: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apo_module.random, "sample", lambda items, count: list(items)[-count:])
    client = client_saying("be brief")
    results = [result(float(number)) for number in range(3)]

    critique = await APO[str](client, gradient_batch_size=2).compute_textual_gradient(versioned("v0"), results)

    assert critique == "be brief"
    (given,) = shown
    assert given["template"] == GRADIENT_PROMPT_FILES[0]
    assert given["context"] == {"experiments": results[1:], "prompt_template": "Say {word}"}
    assert given["format"] == "openai_chat"
    client.chat.completions.create.assert_awaited_once_with(
        model="gpt-5-mini", messages=[{"role": "user", "content": "rendered"}], temperature=1.0
    )


async def test_an_edit_follows_the_critique(shown: list[dict[str, Any]]) -> None:
    client = client_saying("be brief", "Say {word}, briefly")

    edited = await APO[str](client).textual_gradient_and_apply_edit(versioned("v0"), [result()])

    assert edited == "Say {word}, briefly"
    assert shown[1]["template"] == APPLY_EDIT_PROMPT_FILES[0]
    assert shown[1]["context"] == {"prompt_template": "Say {word}", "critique": "be brief"}
    assert client.chat.completions.create.await_args.kwargs["model"] == "gpt-4.1-mini"


async def test_without_a_critique_the_prompt_stays(
    shown: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    assert await APO[str](client_saying(None)).textual_gradient_and_apply_edit(versioned("v0"), []) == "Say {word}"
    assert "no critique" in caplog.text


# ---------------------------------------------------------------------- the files


@pytest.mark.parametrize("template", GRADIENT_PROMPT_FILES, ids=lambda path: path.stem)
def test_gradient_files_show_prompt_and_experiments_in_one_user_message(template: Path) -> None:
    experiments = [{**result(0.25), "messages": [{"messages": "HEARD"}], "spans": [{"name": "HEARD"}]}, result(None)]
    context = {"experiments": experiments, "prompt_template": "Say\n  {word} <b> & more"}

    (message,) = apo_module.poml.poml(template, context=context, format="openai_chat")["messages"]

    assert message["role"] == "user"
    for told in ("Say\n  {word} <b> & more", "Final reward: 0.25", "Final reward: none", "HEARD", "Experiment 2"):
        assert told in message["content"]
    assert message["content"].startswith("You optimize a prompt template.") == (template == GRADIENT_PROMPT_FILES[0])


# ---------------------------------------------------------------------- rollouts


async def test_a_batch_is_sent_under_the_version_and_averaged() -> None:
    store = AsyncMock()
    store.update_resources.return_value = SimpleNamespace(resources_id="r-1")
    store.enqueue_many_rollouts.return_value = [SimpleNamespace(rollout_id="a"), SimpleNamespace(rollout_id="b")]
    done = [SimpleNamespace(rollout_id=name, status="succeeded") for name in "ab"]
    store.wait_for_rollouts.side_effect = [done[:1], done]
    apo = APO[str]()
    apo.set_store(store)
    apo.get_rollout_results = AsyncMock(return_value=[result(1.0), result(None)])  # type: ignore[method-assign] # a stub

    results, average = await apo.evaluate_prompt_on_batch(versioned("v3"), "main", ["x", "y"], mode="val")

    assert (len(results), average) == (2, 0.5)
    store.update_resources.assert_awaited_once_with("v3", {"main": PROMPT})
    (sent,) = store.enqueue_many_rollouts.await_args.args  # all in one call
    assert [(one.input, one.mode, one.resources_id) for one in sent] == [("x", "val", "r-1"), ("y", "val", "r-1")]


# ---------------------------------------------------------------------- the beam


@pytest.mark.parametrize("datasets", [(None, [1]), ([1], None), ([], [1])])
def test_a_missing_data_set_is_told(datasets: Any) -> None:
    apo = APO[int]()
    apo.set_initial_resources({"main": PROMPT})
    with pytest.raises(ValueError, match="train_dataset and a val_dataset"):
        apo._initialize_beam(*datasets)


async def test_candidates_come_in_the_order_of_their_parents_and_empty_ones_are_skipped() -> None:
    apo = APO[str](branch_factor=2)
    apo._create_versioned_prompt(PROMPT)
    apo.evaluate_prompt_on_batch = AsyncMock(return_value=([result()], 1.0))  # type: ignore[method-assign] # a stub
    apo.textual_gradient_and_apply_edit = AsyncMock(side_effect=["a", None, "c", "d"])  # type: ignore[method-assign]
    batches = iter([["1"], ["2"], ["3"], ["4"]])

    made = await apo._generate_candidate_prompts([(0, versioned("v0")), (1, versioned("p"))], "main", batches, 0)

    assert [(one.version, one.prompt_template.template, one.parent) for one in made] == [
        ("v1", "a", "v0"),
        ("v2", "c", "p"),
        ("v3", "d", "p"),
    ]
    assert [call.args[2] for call in apo.evaluate_prompt_on_batch.await_args_list] == [["1"], ["2"], ["3"], ["4"]]
    assert all(call.kwargs["mode"] == "train" for call in apo.evaluate_prompt_on_batch.await_args_list)


async def test_the_beam_keeps_the_best_on_one_shared_batch() -> None:
    apo = APO[str](beam_width=2)
    scores = AsyncMock(side_effect=[([], 0.2), ([], 0.9), ([], 0.2)])
    apo.evaluate_prompt_on_batch = scores  # type: ignore[method-assign] # a stub
    candidates = [versioned("v0"), versioned("v1"), versioned("v2")]

    beam = await apo._evaluate_and_select_beam(candidates, "main", iter([["t"]]), 0)

    assert [(one.version, one.score) for one in beam] == [("v1", 0.9), ("v0", 0.2)]
    assert all(call.kwargs["mode"] == "val" and call.args[2] == ["t"] for call in scores.await_args_list)


@pytest.mark.parametrize(("score", "expected"), [(0.5, None), (0.51, "v1")], ids=["equal", "higher"])
async def test_only_a_higher_mean_replaces_the_best(score: float, expected: str | None) -> None:
    apo = APO[str]()
    apo._history_best_score = 0.5
    apo.evaluate_prompt_on_batch = AsyncMock(return_value=([], score))  # type: ignore[method-assign] # a stub

    await apo._update_best_prompt([versioned("v1"), versioned("v2")], "main", ["a", "b"], 0)

    assert apo._history_best_version == expected
    assert apo._history_best_score == max(score, 0.5)
