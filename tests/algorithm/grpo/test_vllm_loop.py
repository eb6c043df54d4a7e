"""GRPO with vLLM as its engine, over a server that behaves as vLLM was recorded to and samples from a model of ours."""

import asyncio
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="GRPO needs torch")

from agentlightning.algorithm.grpo import SampleSettings  # noqa: E402 # after the check for torch
from agentlightning.algorithm.grpo.grpo import GRPO  # noqa: E402
from agentlightning.algorithm.grpo.settings import LearnerSettings  # noqa: E402
from agentlightning.engine.model import LoraOptions  # noqa: E402
from agentlightning.engine.vllm import VllmOptions  # noqa: E402
from agentlightning.errors import ConfigurationError, EngineError  # noqa: E402
from agentlightning.trainer.run_config import settings_of  # noqa: E402
from tests.algorithm.grpo.test_grpo_loop import calls  # noqa: E402
from tests.algorithm.grpo.training import Asking, are_same, fit, weights  # noqa: E402
from tests.algorithm.grpo.training import grpo as small_grpo  # noqa: E402
from tests.engine.fake_vllm import FakeVllm, fake_vllm  # noqa: E402
from tests.engine.small_llama import save_small_llama, word_tokenizer  # noqa: E402

CHAT = "POST /v1/chat/completions"


def grpo(**changes: Any) -> GRPO:
    """Every step has something to learn from, also where an answer did not end in time."""
    return small_grpo(sampling=SampleSettings(skip_truncated=False), **changes)


@pytest.fixture
def fake() -> Iterator[FakeVllm]:
    with fake_vllm(can_sleep=True) as server:
        yield server


def test_training_publishes_first_learns_and_knows_which_weights_answered(fake: FakeVllm) -> None:
    algorithm = grpo(steps=2, engine=fake.url)

    made = fit(algorithm)

    assert fake.requests.index("POST /collective_rpc") < fake.requests.index(CHAT)
    assert fake.loads == 3
    assert sorted(set(asyncio.run(calls(made)))) == [(0, "0"), (1, "1")]
    assert are_same(weights(algorithm), fake.app.engine.model.state())
    assert not fake.is_paused
    assert set(fake.asked_models) == {"policy"}, "the server's own name, whatever agents call the model"


def test_engine_that_ends_ends_the_training_with_its_reason(fake: FakeVllm) -> None:
    def judge(agent: Asking, task: Any, rollout: Any, said: str) -> float:
        fake.is_dead = True
        return 1.0

    with pytest.raises(EngineError, match=r"has ended|answers POST|does not answer"):
        fit(grpo(engine=fake.url), Asking(judge))


def test_engine_sleeps_while_the_model_learns_and_answers_after_it(fake: FakeVllm) -> None:
    made = fit(grpo(steps=2, engine=VllmOptions(address=fake.url, sleep=True)))

    assert [line for line in fake.requests if "sleep?" in line or "wake" in line] == [
        "POST /sleep?level=1&mode=keep",
        "POST /wake_up",
    ] * 2
    assert len(asyncio.run(calls(made))) == 8
    assert not fake.is_asleep


def test_learning_that_fails_leaves_the_engine_awake(fake: FakeVllm, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> Any:
        raise MemoryError("no room on the GPU")

    monkeypatch.setattr("agentlightning.algorithm.grpo.learner.Learner.update", fail)

    with pytest.raises(MemoryError):
        fit(grpo(steps=1, engine=VllmOptions(address=fake.url, sleep=True)))

    assert "POST /sleep?level=1&mode=keep" in fake.requests
    assert not fake.is_asleep


def test_adapters_are_served_beside_the_weights_they_belong_to(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="LoRA needs peft: the extra hf")
    importlib.import_module("transformers")
    folder = save_small_llama(tmp_path / "llama", word_tokenizer())
    with fake_vllm(str(folder), name="base", has_lora=True, takes_weights=False) as fake:
        made = fit(grpo(model=str(folder), steps=2, engine=fake.url, lora=LoraOptions(rank=4), device="cpu"))

        assert set(fake.asked_models) == {"policy-v0", "policy-v1"}
        assert sorted(set(asyncio.run(calls(made)))) == [(0, "0"), (1, "1")]
        config = fake.adapter_configs["policy-v2"]
        assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 4, 32.0)
        layer = "base_model.model.model.layers.0.self_attn.q_proj"
        assert {f"{layer}.lora_A.weight", f"{layer}.lora_B.weight"} <= set(fake.adapter_tensors["policy-v2"])
        assert fake.adapters == {}
        assert not fake.is_dead
        assert fake.loads == 0


# ---------------------------------------------------------------------- choices


@pytest.mark.parametrize(
    ("engine", "given", "used"),
    [("vllm", "auto", 2.0), ("vllm", None, None), ("vllm", 5.0, 5.0), ("embedded", "auto", None)],
)
def test_importance_cap_is_on_with_vllm_unless_the_user_says_otherwise(
    engine: str, given: Any, used: float | None
) -> None:
    learning = LearnerSettings(importance_cap=given)
    assert GRPO("tiny", engine=engine, learning=learning).learning.importance_cap == used


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"engine": "sglang"}, "engine is 'sglang'; it must be 'embedded', 'vllm'"),
        ({"engine": VllmOptions(sleep=True), "max_staleness": 1}, "set sleep=False or max_staleness=0"),
        (
            {"model": {"planner": "tiny", "solver": "tiny"}, "engine": "http://h:8000"},
            "holds the weights of one model, and 2 are to be trained",
        ),
        ({"learning": LearnerSettings(), "engine": ""}, "engine is ''"),
    ],
    ids=["unknown", "sleep", "two models", "empty"],
)
def test_engines_that_cannot_be_used_are_refused_before_anything_starts(arguments: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        GRPO(**arguments)


def test_run_records_the_engine_and_the_cap_and_no_key() -> None:
    algorithm = GRPO("tiny", engine=VllmOptions(address="http://127.0.0.1:9", api_key="confidential"))

    recorded = settings_of(algorithm)

    assert recorded["engine"]["address"] == "http://127.0.0.1:9"
    assert recorded["learning"]["importance_cap"] == 2.0
    assert "confidential" not in str(recorded)
