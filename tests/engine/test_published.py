"""Published weights: rounded by chance where the engine's numbers are coarser, and exact everywhere else."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the engine needs torch")

from agentlightning.engine.checkpoint import load  # noqa: E402
from agentlightning.engine.model import LoraOptions  # noqa: E402
from agentlightning.engine.tiny.model import TinyModel, TinyShape  # noqa: E402
from agentlightning.engine.weights import PublishedWeights, round_by_chance  # noqa: E402
from agentlightning.errors import EngineError  # noqa: E402
from tests.engine.small_llama import save_small_llama, word_tokenizer  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
HALVES = [torch.bfloat16, torch.float16]
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU])]
SMALL_CHANGE = 1e-5
"""Of a weight, far below half a step of 16-bit numbers of its size."""


def a_tiny_model() -> TinyModel:
    torch.manual_seed(0)
    return TinyModel(TinyShape(width=16, layers=1, max_length=64))


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(tensor, right[name]) for name, tensor in left.items())


# ---------------------------------------------------------------------- rounding


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_every_number_that_the_target_holds_stays_what_it_is(dtype: Any, device: str) -> None:
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    numbers = patterns.view(dtype).to(device)

    rounded = round_by_chance(numbers.float(), dtype, seed="any")

    is_number = ~numbers.isnan()
    assert torch.equal(rounded.view(torch.int16)[is_number], numbers.view(torch.int16)[is_number])
    assert bool(rounded[~is_number].isnan().all())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("value", [0.3, -0.0123, 1.0001, 3e-6, -2e-7, 1000.3])
def test_a_number_becomes_one_of_its_neighbours_and_is_kept_in_the_mean(value: float, dtype: Any, device: str) -> None:
    draws = 100_000
    exact = torch.full((draws,), value, device=device)

    rounded = round_by_chance(exact, dtype, seed="any").double()

    near, far = sorted(rounded.unique().tolist(), key=lambda one: abs(one - value))
    step, true = abs(near - far), exact[0].double().item()
    assert min(near, far) < true < max(near, far)
    assert step <= max(abs(value) * torch.finfo(dtype).eps, torch.finfo(dtype).smallest_normal)
    assert rounded.mean().item() == pytest.approx(true, abs=5 * step / 2 / math.sqrt(draws))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_what_is_beyond_the_largest_number_by_less_than_a_step_does_not_become_infinite(dtype: Any) -> None:
    largest = torch.finfo(dtype).max
    beyond = torch.tensor([1.0, -1.0]).repeat(100) * largest * (1 + 0.9 * torch.finfo(dtype).eps / 2)

    assert round_by_chance(beyond, dtype, seed="any").abs().unique().tolist() == [largest]
    odd = round_by_chance(torch.tensor([math.inf, -math.inf, math.nan]), dtype, seed="any")
    assert torch.equal(odd.isnan(), torch.tensor([False, False, True]))
    assert odd[:2].tolist() == [math.inf, -math.inf]


# ---------------------------------------------------------------------- a model's weights


def test_the_same_version_is_always_rounded_alike_and_another_is_not() -> None:
    model = a_tiny_model()

    def read(**options: int) -> dict[str, Any]:
        return dict(PublishedWeights(model, **options).tensors(torch.bfloat16))

    assert same(read(seed=1, version=2), read(seed=1, version=2))
    assert not same(read(seed=1, version=2), read(seed=1, version=3))
    assert not same(read(seed=1, version=2), read(seed=2, version=2))


def test_tied_weights_are_published_under_one_name(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="Hugging Face models need transformers: the extra hf")
    folder = str(save_small_llama(tmp_path / "llama", word_tokenizer(), is_tied=True))
    learned, _ = load(folder, device="cpu")
    served, _ = load(folder, device="cpu", dtype="bfloat16")

    served.load_state(dict(PublishedWeights(learned, seed=0).tensors(torch.bfloat16)))

    network: Any = served.network  # type: ignore[attr-defined]
    assert network.get_output_embeddings().weight is network.get_input_embeddings().weight


# ---------------------------------------------------------------------- adapters


@pytest.fixture
def adapted(tmp_path: Path) -> Any:
    """Adapters over 16-bit weights, of which each changes little."""
    pytest.importorskip("peft", reason="LoRA needs peft: the extra hf")
    folder = save_small_llama(tmp_path / "llama", word_tokenizer(), dtype="bfloat16")
    model, _ = load(str(folder), device="cpu", dtype="bfloat16", lora=LoraOptions(rank=2, alpha=4))
    with torch.no_grad():
        for name, weight in model.trainable().items():
            if "lora_B" in name:
                weight.normal_(0, SMALL_CHANGE)
    return model


def test_adapters_are_merged_in_32_bits(adapted: Any, tmp_path: Path) -> None:
    base = load(str(tmp_path / "llama"), device="cpu", dtype="bfloat16")[0].state()
    layer = adapted.network.get_submodule("base_model.model.model.layers.0.self_attn.q_proj")
    name = "model.layers.0.self_attn.q_proj.weight"

    merged = dict(adapted.weights())

    assert torch.equal(merged[name], base[name].float() + layer.get_delta_weight("default"))
    assert (merged[name] != base[name].float()).float().mean() > 0.9
    assert torch.equal(adapted.state()[name], merged[name])
    assert adapted.state_shapes().keys() == merged.keys()


def test_a_model_with_merged_adapters_is_saved_in_32_bits(adapted: Any, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")

    adapted.save(tmp_path / "saved")

    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", local_files_only=True, dtype="auto")
    assert saved.dtype == torch.float32
    assert same(dict(saved.state_dict()), {name: tensor.float() for name, tensor in adapted.state().items()})


def test_adapters_alone_are_those_that_peft_loads(adapted: Any, tmp_path: Path) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    save_file = pytest.importorskip("safetensors.torch").save_file
    (tmp_path / "adapters").mkdir()

    adapters = PublishedWeights(adapted, seed=0).adapters()

    assert adapters is not None
    save_file(adapters.tensors, tmp_path / "adapters" / "adapter_model.safetensors")
    (tmp_path / "adapters" / "adapter_config.json").write_text(json.dumps(adapters.config))
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "llama", dtype=torch.bfloat16)
    again = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapters"))
    found = {name: tensor for name, tensor in again.named_parameters() if "lora_" in name}
    assert same(found, {name: weight.detach() for name, weight in adapted.trainable().items()})
    assert PublishedWeights(a_tiny_model(), seed=0).adapters() is None


def test_an_adapter_that_cannot_be_merged_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="LoRA needs peft: the extra hf")
    folder = save_small_llama(tmp_path / "llama", word_tokenizer(), is_tied=True)

    with pytest.warns(UserWarning, match="tie_word_embeddings"), pytest.raises(EngineError, match="'lm_head' shares"):
        load(str(folder), device="cpu", lora=LoraOptions(targets=("lm_head", "q_proj")))


# ---------------------------------------------------------------------- folders of a training


def test_a_trained_folder_is_rounded_by_chance_where_it_is_served_with_16_bits(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="Hugging Face models need transformers: the extra hf")
    from agentlightning.engine.checkpoint import save_model

    base = str(save_small_llama(tmp_path / "llama", word_tokenizer(), dtype="bfloat16"))
    trained, codec = load(base, device="cpu")
    with torch.no_grad():
        for weight in trained.trainable().values():
            weight.add_(SMALL_CHANGE)
    save_model(trained, codec, tmp_path / "trained")

    exact = load(str(tmp_path / "trained"), device="cpu")[0]
    served = load(str(tmp_path / "trained"), device="cpu", dtype="bfloat16")[0]

    assert same(exact.state(), trained.state())
    before = load(base, device="cpu")[0].state()
    change = torch.cat([(tensor.float() - before[name]).flatten() for name, tensor in served.weights()])
    assert served.dtype == torch.bfloat16
    assert change.mean().item() == pytest.approx(SMALL_CHANGE, rel=0.5)
