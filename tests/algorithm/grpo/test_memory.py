"""What learning takes is known before it begins, and too little memory is an error in words."""

import asyncio
import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.optional import optional

torch = pytest.importorskip("torch", reason="the learner needs torch")
transformers = optional("transformers", reason="Hugging Face models need transformers: the extra hf")

from agentlightning.algorithm.grpo.learner import Learner  # noqa: E402
from agentlightning.algorithm.grpo.memory import check_memory, memory_need  # noqa: E402
from agentlightning.algorithm.grpo.policy import Policy  # noqa: E402
from agentlightning.algorithm.grpo.samples import Sample  # noqa: E402
from agentlightning.algorithm.grpo.settings import LearnerSettings  # noqa: E402
from agentlightning.engine.hf import HfModel  # noqa: E402
from agentlightning.engine.lora import LoraOptions  # noqa: E402
from agentlightning.errors import ConfigurationError, TrainingError  # noqa: E402
from tests.algorithm.grpo.peaks import peak_bytes  # noqa: E402
from tests.algorithm.grpo.small_model import SmallModel  # noqa: E402

QWEN_1_5B: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
QWEN_7B: dict[str, Any] = {
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}


def outline(sizes: dict[str, Any], dtype: Any) -> Any:
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(transformers.Qwen2Config(**sizes), dtype=dtype)


def test_all_weights_of_a_model_with_1_5_billion() -> None:
    network, parameters = outline(QWEN_1_5B, torch.float32), 1_543_714_304

    plain = memory_need(network, LearnerSettings(precision="bf16"), engine_sequences=64).parts
    short = memory_need(network, LearnerSettings(precision="bf16", optimiser="adamw8bit")).parts
    whole = memory_need(network, LearnerSettings(precision="bf16", gradient_checkpointing=False)).parts

    assert (plain["weights"], plain["gradients"], plain["moments"]) == tuple(parameters * n for n in (4, 4, 8))
    assert short["moments"] == pytest.approx(parameters * 2, rel=0.02)
    assert plain["engine"] == 2 * (parameters + 64 * 1024 * 28 * 2 * 256)
    layer_inputs = 4096 * 28 * 1536 * 4
    assert layer_inputs < plain["activations"] < 3 * layer_inputs
    assert 4096 * 3e6 < whole["activations"] < 4096 * 6e6  # 3 to 6 MB a token


def test_adapters_of_a_model_with_7_billion() -> None:
    need = memory_need(outline(QWEN_7B, torch.bfloat16), LearnerSettings(), lora=LoraOptions(rank=16))

    assert need.parts["gradients"] == 4 * 40_370_176
    assert need.parts["weights"] == 2 * 7_615_616_512 + 4 * 40_370_176
    assert need.total < 24e9
    assert str(need).startswith(f"{need.total / 1e9:.1f} GB of GPU memory (weights 15.4, gradients 0.2, moments 0.3, ")


SMALL: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize(
    ("lora", "checkpointing"),
    [(None, False), (None, True), (LoraOptions(rank=4), True)],
    ids=["weights", "weights checkpointed", "adapters checkpointed"],
)
def test_the_estimate_is_near_what_is_taken(lora: LoraOptions | None, checkpointing: bool) -> None:
    tokens = 256
    torch.manual_seed(0)
    dtype = torch.float32 if lora is None else torch.bfloat16
    network = transformers.AutoModelForCausalLM.from_config(transformers.Qwen2Config(**SMALL), dtype=dtype)
    settings = LearnerSettings(
        gradient_checkpointing=checkpointing, max_batch_tokens=tokens, minibatches=1, threads=1, precision="bf16"
    )
    expected = memory_need(network, settings, lora=lora).parts
    learner = Learner(HfModel(network, name="small", end_ids=frozenset([0]), lora=lora), settings)
    ids = [number % 99 for number in range(tokens + 1)]
    samples = [Sample(ids, [0] + [1] * tokens, [None] + [-5.0] * tokens, 1.0, 0, "g", f"ro-{n}") for n in range(2)]
    learner.update(samples)

    taken = peak_bytes(lambda: learner.update(samples))

    assert 0.9 < sum(expected[name] for name in ("gradients", "activations", "logits")) / taken < 1.6


# ---------------------------------------------------------------------- before it begins


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    transformers.Qwen2Config(**SMALL, architectures=["Qwen2ForCausalLM"]).save_pretrained(tmp_path)
    return tmp_path


def with_free_memory(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    """A GPU that nothing is computed on."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, free))


def test_a_need_that_fits_is_logged(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with_free_memory(monkeypatch, 10**10)

    with caplog.at_level(logging.INFO):
        check_memory(str(folder), LearnerSettings(), device="auto", lora=None, engine_sequences=8)

    assert caplog.messages[0].startswith("Learning needs about 1.1 GB of GPU memory (weights 0.0, ")
    assert caplog.messages[0].endswith(" at 4,096 tokens; 10.0 GB are free.")


def test_a_need_beyond_the_free_memory_is_refused_before_an_engine_starts(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_free_memory(monkeypatch, 5 * 10**8)
    policy = Policy("policy", str(folder), LearnerSettings(gradient_checkpointing=False))

    with pytest.raises(ConfigurationError, match=r"0\.5 GB are free") as caught:
        asyncio.run(policy.start())

    for way in ("max_batch_tokens below 4096", "gradient_checkpointing=True", "bf16", "adamw8bit", "lora="):
        assert way in str(caught.value)
    assert policy._engine is None


@pytest.mark.parametrize(("source", "device"), [("tiny", "auto"), ("folder", "cpu"), ("/nowhere", "cuda")])
def test_nothing_is_said_where_there_is_nothing_to_work_out(
    source: str, device: str, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with_free_memory(monkeypatch, 0)

    with caplog.at_level(logging.INFO):
        source = str(folder) if source == "folder" else source
        check_memory(source, LearnerSettings(), device=device, lora=None, engine_sequences=None)

    assert caplog.messages == []


@pytest.mark.parametrize(
    "config",
    ['{"model_type": "unheard-of"}', '{"model_type": "mamba", "num_hidden_layers": 1, "hidden_size": 8}', "{"],
    ids=["unknown", "other-layers", "broken"],
)
def test_a_model_of_another_kind_is_left_to_be_loaded(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with_free_memory(monkeypatch, 0)
    (tmp_path / "config.json").write_text(config)

    with caplog.at_level(logging.INFO):
        check_memory(str(tmp_path), LearnerSettings(), device="auto", lora=None, engine_sequences=None)

    assert any("is not known for" in message for message in caplog.messages)


# ---------------------------------------------------------------------- in a step


class Large(SmallModel):
    """Has no memory left after so many passes."""

    passes = 3

    def hidden(self, ids: Any, attention_lengths: Any, selected: Any) -> Any:
        self.passes -= 1
        if self.passes < 0:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().hidden(ids, attention_lengths, selected)


def test_too_little_memory_in_a_step_says_what_was_tried_and_changes_nothing() -> None:
    model = Large()
    learner = Learner(model, LearnerSettings(minibatches=2, max_batch_tokens=5, optimiser="adamw8bit"))
    samples = [Sample([1, 2, 3], [0, 1, 1], [None, -2.0, -2.0], 1.0, 0, "g", f"ro-{n}") for n in range(8)]

    with pytest.raises(TrainingError, match=r"step 2 \(update 1\), with 4 tokens in 2 rows") as caught:
        learner.update(samples)
    weights = model.state()

    assert "the weights are as they were before this step" in str(caught.value)
    assert "adamw8bit" not in str(caught.value)
    assert (learner.steps, learner.version) == (1, 0)
    assert all(weight.grad is None for weight in model.parameters())
    model.passes = 100
    assert learner.update(samples)["learner/steps"] == 2
    assert any(not torch.equal(weights[name], weight) for name, weight in model.state().items())


def test_too_little_memory_of_the_optimiser_says_that_weights_may_have_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = Learner(SmallModel())

    def fail(_: float) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(learner._optimiser, "step", fail)

    with pytest.raises(TrainingError, match="may have changed some weights: go on from a checkpoint"):
        learner.update([Sample([1, 2], [0, 1], [None, -2.0], 1.0, 0, "g", "ro")])


@pytest.mark.models
def test_the_script_that_measures_it_runs_in_miniature(tmp_path: Path) -> None:
    script = Path(__file__).parents[3] / "bench" / "gpu" / "memory_of_learning.py"
    options = ["--device", "cpu", "--tokens", "60", "--rows", "3", "--results", str(tmp_path / "figures.jsonl")]

    run = subprocess.run(
        [sys.executable, str(script), "miniature", *options], capture_output=True, text=True, timeout=110, check=False
    )

    assert run.returncode == 0, run.stderr
    figures = json.loads((tmp_path / "figures.jsonl").read_text())
    assert json.loads(run.stdout) == figures
    assert (figures["figure"], figures["padded_tokens"], figures["packed_difference"]) == ("memory", 60, 0)
    assert figures["peak_gb"] > 0
