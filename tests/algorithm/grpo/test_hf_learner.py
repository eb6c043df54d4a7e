"""What saves memory with Hugging Face models: layers computed again, rows end to end; the steps stay the same."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.optional import optional

torch = pytest.importorskip("torch", reason="the learner needs torch")
transformers = optional("transformers", reason="Hugging Face models need transformers: the extra hf")

from agentlightning.algorithm.grpo.learner import Learner  # noqa: E402
from agentlightning.algorithm.grpo.packing import Row  # noqa: E402
from agentlightning.algorithm.grpo.samples import Sample  # noqa: E402
from agentlightning.algorithm.grpo.settings import LearnerSettings  # noqa: E402
from agentlightning.engine.hf import HfModel  # noqa: E402
from agentlightning.engine.model import LoraOptions  # noqa: E402
from agentlightning.engine.weights import PublishedWeights  # noqa: E402
from agentlightning.errors import ConfigurationError  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

VOCABULARY = 40
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "max_position_embeddings": 64,
}
LORA = LoraOptions(rank=2, dropout=0.0)


def a_model(family: str = "Llama", lora: LoraOptions | None = None, **changes: Any) -> HfModel:
    config = getattr(transformers, f"{family}Config")(**SIZES, **changes)
    torch.manual_seed(0)
    network = getattr(transformers, f"{family}ForCausalLM")(config).double()
    model = HfModel(network, name=family.lower(), end_ids=frozenset([0]), lora=lora)
    with torch.no_grad():
        for name, weight in model.trainable().items():
            if "lora_B" in name:
                weight.normal_(0, 0.3)  # which peft begins at zero, where half of the gradients are too
    return model


def a_sample(number: int) -> Sample:
    source = random.Random(number)
    mask = [0] * source.randint(1, 9) + [1] * source.randint(1, 9) + [0] * source.randint(0, 3) + [1]
    ids = [source.randrange(VOCABULARY) for _ in mask]
    logprobs = [source.uniform(-4, -3) if chosen else None for chosen in mask]
    return Sample(ids, mask, logprobs, source.choice([-1.0, 1.0]), 0, "g", f"ro-{number}")


SAMPLES = [a_sample(number) for number in range(9)]


def learned(model: HfModel, **settings: Any) -> tuple[dict[str, Any], dict[str, float]]:
    """The weights after two steps, and the metrics."""
    learner = Learner(model, LearnerSettings(learning_rate=1e-2, max_batch_tokens=40, **settings))
    metrics = learner.update(SAMPLES)
    return {name: weight.detach().clone() for name, weight in model.trainable().items()}, metrics


def passes_of_a_layer(model: HfModel) -> list[bool]:
    """Filled, while the model works, with whether it was in training when its first layer was computed."""
    found: list[bool] = []
    layer = model._plain.model.layers[0].self_attn
    layer.register_forward_hook(lambda *_: found.append(model._plain.training))
    return found


# ---------------------------------------------------------------------- gradient checkpointing


@pytest.mark.parametrize("lora", [None, LORA], ids=["weights", "adapters"])
def test_layers_computed_again_give_the_same_step(lora: LoraOptions | None) -> None:
    plain, _ = learned(a_model(lora=lora), gradient_checkpointing=False)
    saved, _ = learned(a_model(lora=lora), gradient_checkpointing=True)
    for name, weight in plain.items():
        torch.testing.assert_close(saved[name], weight, rtol=0, atol=1e-12 if weight.dtype == torch.float64 else 1e-6)


@pytest.mark.parametrize("lora", [None, LORA], ids=["weights", "adapters"])
def test_layers_are_computed_again_in_training_and_not_in_evaluation(lora: LoraOptions | None) -> None:
    model = a_model(lora=lora)
    passes = passes_of_a_layer(model)

    learned(model, gradient_checkpointing=True, importance_cap=2.0, minibatches=1)

    evaluations = passes.count(False) - 2  # which measure the change of the update
    assert evaluations > 1
    assert passes.count(True) == 2 * evaluations


# ---------------------------------------------------------------------- dropout


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointed"])
def test_dropout_of_adapters_is_left_out_of_ratios(checkpointing: bool) -> None:
    settings: dict[str, Any] = {"gradient_checkpointing": checkpointing, "importance_cap": 2.0, "minibatches": 1}

    plain, _ = learned(a_model(lora=LORA), **settings)
    dropped, metrics = learned(a_model(lora=LoraOptions(rank=2, dropout=0.5)), **settings)

    assert metrics["learner/ratio_max"] == pytest.approx(1.0, abs=1e-9)
    assert all(torch.equal(dropped[name], weight) for name, weight in plain.items())


def test_fine_tuning_uses_dropout() -> None:
    plain, _ = learned(a_model(lora=LORA), objective="likelihood")
    dropped, _ = learned(a_model(lora=LoraOptions(rank=2, dropout=0.5)), objective="likelihood")
    assert not all(torch.equal(dropped[name], weight) for name, weight in plain.items())


# ---------------------------------------------------------------------- packing


@pytest.mark.parametrize(
    ("family", "lora", "checkpointing"),
    [
        ("Llama", None, True),
        ("Llama", LORA, True),
        ("Llama", LORA, False),
        ("Qwen2", None, False),
        ("Qwen3", None, False),
        ("Granite", None, False),
    ],
    ids=["llama", "adapters-checkpointed", "adapters", "qwen2", "qwen3", "no-plain-head"],
)
def test_rows_end_to_end_give_the_same_step(family: str, lora: LoraOptions | None, checkpointing: bool) -> None:
    changes = {"logits_scaling": 4.0} if family == "Granite" else {"head_dim": 4} if family == "Qwen3" else {}

    plain, padded = learned(a_model(family, lora, **changes), packing=False)
    packed, unpadded = learned(a_model(family, lora, **changes), packing=True, gradient_checkpointing=checkpointing)

    for name, weight in plain.items():
        torch.testing.assert_close(packed[name], weight, rtol=0, atol=1e-10 if weight.dtype == torch.float64 else 1e-5)
    tokens = sum(len(sample.token_ids) - 1 for sample in SAMPLES)
    assert unpadded["learner/padded_tokens"] == tokens < padded["learner/padded_tokens"]
    assert unpadded["learner/loss"] == pytest.approx(padded["learner/loss"], rel=1e-9)


def test_a_model_that_would_mix_rows_keeps_its_padding() -> None:
    class Mixing(HfModel):
        """Sees everything before, whatever the rows."""

        def hidden(self, ids: Any, attention_lengths: Any, selected: Any) -> Any:
            return self.logits(ids, attention_lengths, selected)

    model = Mixing(a_model()._plain, name="mixing", end_ids=frozenset([0]))

    assert not model.pack_rows()
    assert model._plain.config._attn_implementation == "sdpa"
    with pytest.raises(ConfigurationError, match="'mixing' cannot be trained with packing=True"):
        Learner(model, LearnerSettings(packing=True))


def test_a_model_that_packs_rows_is_exported_as_any_other(tmp_path: Path) -> None:
    model = a_model()
    assert model.pack_rows()
    model.save(tmp_path)
    assert "agentlightning" not in json.dumps(json.loads((tmp_path / "config.json").read_text()))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("lora", [None, LORA], ids=["weights", "adapters"])
def test_on_a_gpu_packed_rows_are_near_padded_ones(lora: LoraOptions | None) -> None:
    losses, norms = [], []
    for packing in (False, True):
        plain = a_model(head_dim=64).network.to("cuda", torch.float32 if lora is None else torch.bfloat16)
        learner = Learner(
            HfModel(plain, name="llama", end_ids=frozenset([0]), lora=lora),
            LearnerSettings(minibatches=1, precision="bf16", packing=packing),
        )
        metrics = learner.update(SAMPLES)
        losses.append(metrics["learner/loss"])
        norms.append(metrics["learner/grad_norm"])
        assert (learner.is_packed, learner.is_checkpointed) == (packing, False)  # there is memory enough

    assert losses[1] == pytest.approx(losses[0], abs=0.05)
    assert norms[1] == pytest.approx(norms[0], rel=0.1)


def logprobs_of(learner: Learner) -> Any:
    rows = [Row.of(sample, learner.model) for sample in SAMPLES]
    return torch.cat([logprobs for _, logprobs in learner.evaluated(rows)])


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("checkpointing", [True, False], ids=["checkpointing", "plain"])
def test_learner_in_16_bits_computes_with_the_numbers_that_the_engine_got(tied: bool, checkpointing: bool) -> None:
    settings = LearnerSettings(minibatches=1, precision="bf16", gradient_checkpointing=checkpointing, seed=5)
    networks = [a_model(tie_word_embeddings=tied)._plain.bfloat16().float() for _ in range(2)]
    exact, published = (HfModel(network, name="llama", end_ids=frozenset([0])) for network in networks)
    standing = logprobs_of(Learner(exact, settings))
    with torch.no_grad():
        for weight in exact.trainable().values():
            weight.add_(torch.randn_like(weight) * weight.abs() * 2e-3)  # less than half a step of 16 bits
    before = {name: weight.clone() for name, weight in exact.weights()}
    published.load_state(dict(PublishedWeights(exact, seed=5, version=7).tensors(torch.bfloat16)))
    moved, served = Learner(exact, settings), Learner(published, settings)
    moved.version = served.version = 7

    found = logprobs_of(moved)

    assert torch.equal(found, logprobs_of(served))
    assert not torch.allclose(found, standing, atol=1e-3), "rounded to the nearest, the weights would stand still"
    assert all(torch.equal(weight, before[name]) for name, weight in exact.weights())
    norms = [learner.update(SAMPLES)["learner/grad_norm"] for learner in (moved, served)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)


def test_16_bits_pack_rows_too() -> None:
    model = HfModel(a_model()._plain.float(), name="llama", end_ids=frozenset([0]))
    assert Learner(model, LearnerSettings(packing=True, precision="bf16")).is_packed
