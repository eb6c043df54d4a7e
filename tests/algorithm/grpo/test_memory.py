"""About what learning takes is told before it begins, and too little memory is an error in words."""

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
from agentlightning.algorithm.grpo.packing import planned  # noqa: E402
from agentlightning.algorithm.grpo.samples import Sample  # noqa: E402
from agentlightning.algorithm.grpo.settings import LearnerSettings  # noqa: E402
from agentlightning.engine.hf import HfModel  # noqa: E402
from agentlightning.engine.model import LoraOptions  # noqa: E402
from agentlightning.errors import TrainingError  # noqa: E402
from agentlightning.utils.log_failures import ANNOUNCE  # noqa: E402
from tests.algorithm.grpo.peaks import peak_bytes  # noqa: E402
from tests.algorithm.grpo.small_model import SmallModel  # noqa: E402

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
    settings = LearnerSettings(
        gradient_checkpointing=checkpointing, max_batch_tokens=tokens, minibatches=1, threads=1, precision="bf16"
    )
    model = a_model(torch.float32 if lora is None else torch.bfloat16, lora)
    learner = Learner(model, settings)
    learner.version = 5  # the next one is not measured, so that its weights are rounded after it
    ids = [number % 99 for number in range(tokens + 1)]
    samples = [Sample(ids, [0] + [1] * tokens, [None] + [-5.0] * tokens, 1.0, 0, "g", f"ro-{n}") for n in range(2)]
    learner.update(samples)

    taken = peak_bytes(lambda: learner.update(samples))

    gradients = 4 * sum(weight.numel() for weight in model.trainable().values())
    expected = gradients + tokens * model.bytes_kept(is_checkpointed=checkpointing)
    assert 0.75 < expected / taken < 1.4


# ---------------------------------------------------------------------- before it begins


def a_model(dtype: Any = None, lora: LoraOptions | None = None) -> HfModel:
    network = transformers.AutoModelForCausalLM.from_config(transformers.Qwen2Config(**SMALL), dtype=dtype)
    return HfModel(network, name="small", end_ids=frozenset([0]), lora=lora)


GPU = torch.device("cuda")


def with_free_memory(monkeypatch: pytest.MonkeyPatch, free: float) -> None:
    """A GPU that nothing is computed on."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (int(free), int(free)))


def test_a_need_that_fits_is_one_line(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with_free_memory(monkeypatch, 1e10)

    with caplog.at_level(logging.INFO):
        planned(LearnerSettings(max_batch_tokens=4096), a_model(), GPU)

    (line,) = caplog.messages
    parts = "gradients 0.0, moments 0.0, weights 0.0, activations 0.4"
    assert line.startswith(f"Learning needs about 0.4 GB of GPU memory beside what is loaded ({parts}) at 4,096 tokens")
    assert line.endswith(" together without gradient checkpointing; 10.0 GB are free.")


def test_a_need_is_shown_where_no_log_is_configured(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with_free_memory(monkeypatch, 1e10)
    lines: list[str] = []
    shown = ANNOUNCE.set(lines.append)  # as the view of a training does

    with caplog.at_level(logging.WARNING):
        planned(LearnerSettings(max_batch_tokens=4096), a_model(), GPU)
    ANNOUNCE.reset(shown)

    assert [line[:27] for line in lines] == ["Learning needs about 0.4 GB"]


@pytest.mark.parametrize("processes", [1, 2])
def test_a_need_beyond_the_free_memory_is_a_warning_that_names_what_helps(
    processes: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with_free_memory(monkeypatch, 1e8)

    planned(LearnerSettings(gradient_checkpointing=False, processes=processes), a_model(), GPU)

    (record,) = caplog.records
    assert (record.levelname, "only 0.1 GB are free" in record.message) == ("WARNING", True)
    for way in ("max_batch_tokens below 4096", "gradient_checkpointing=True", "bf16", "lora="):
        assert way in record.message
    assert ("adamw8bit" in record.message) == (processes == 1)


@pytest.mark.parametrize(
    ("gigabytes", "tokens", "is_checkpointed"),
    [(80, 32_768, False), (1.0, 8192, False), (0.5, 8192, True), (0.1, 4096, True)],
)
def test_free_memory_decides_what_the_settings_leave_open(
    gigabytes: float, tokens: int, is_checkpointed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_free_memory(monkeypatch, gigabytes * 1e9)

    chosen = planned(LearnerSettings(), a_model(), GPU)

    assert (chosen.max_batch_tokens, chosen.gradient_checkpointing) == (tokens, is_checkpointed)


@pytest.mark.parametrize("gigabytes", [80, 0.1])
@pytest.mark.parametrize("is_checkpointed", [True, False])
def test_what_is_set_stays_whatever_the_memory(
    gigabytes: float, is_checkpointed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_free_memory(monkeypatch, gigabytes * 1e9)
    settings = LearnerSettings(max_batch_tokens=100, gradient_checkpointing=is_checkpointed)

    assert planned(settings, a_model(), GPU) == settings


@pytest.mark.parametrize(("is_hf", "device"), [(False, "cuda"), (True, "cpu")], ids=["tiny", "on the CPU"])
def test_nothing_is_said_and_packs_are_small_where_no_gpu_is_short(
    is_hf: bool, device: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with_free_memory(monkeypatch, 0)

    with caplog.at_level(logging.INFO):
        chosen = planned(LearnerSettings(), a_model() if is_hf else SmallModel(), torch.device(device))

    assert caplog.messages == []
    assert (chosen.max_batch_tokens, chosen.gradient_checkpointing) == (4096, False)


def test_the_metrics_of_an_update_have_what_was_chosen() -> None:
    metrics = Learner(a_model(), LearnerSettings(gradient_checkpointing=True)).update(
        [Sample([1, 2, 3], [0, 1, 1], [None, -2.0, -2.0], 1.0, 0, "g", "ro")]
    )

    assert (metrics["learner/max_batch_tokens"], metrics["learner/checkpointed"]) == (4096, 1)


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
    learner = Learner(model, LearnerSettings(minibatches=2, max_batch_tokens=5))
    samples = [Sample([1, 2, 3], [0, 1, 1], [None, -2.0, -2.0], 1.0, 0, "g", f"ro-{n}") for n in range(8)]

    with pytest.raises(TrainingError, match=r"step 2 \(update 1\), with 4 tokens in 2 rows") as caught:
        learner.update(samples)
    weights = model.state()

    assert "the weights are as they were before this step" in str(caught.value)
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
