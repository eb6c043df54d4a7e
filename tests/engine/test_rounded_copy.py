"""The copy in 16 bits that a learner computes with: made once for a step, published as it is, and never in the way."""

from typing import Any

import pytest

from tests.optional import optional

torch = pytest.importorskip("torch", reason="the learner needs torch")
transformers = optional("transformers", reason="Hugging Face models need transformers: the extra hf")

from agentlightning.algorithm.grpo.learner import Learner  # noqa: E402
from agentlightning.algorithm.grpo.packing import Row  # noqa: E402
from agentlightning.algorithm.grpo.samples import Sample  # noqa: E402
from agentlightning.algorithm.grpo.settings import LearnerSettings  # noqa: E402
from agentlightning.engine import weights  # noqa: E402
from agentlightning.engine.hf import HfModel  # noqa: E402
from agentlightning.engine.lora import LoraOptions  # noqa: E402
from agentlightning.engine.model import logits_of  # noqa: E402
from agentlightning.engine.weights import PublishedWeights, RoundedCopy, rounded_parts  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
BF16 = torch.bfloat16
IDS = torch.tensor([[1, 2, 3, 4]])
SAMPLES = [
    Sample([1, 2, 3 + n, 4], [0, 0, 1, 1], [None, None, -3.0, -3.0], 1.0 - n, 0, "g", f"ro-{n}") for n in range(4)
]


def a_model(*, is_tied: bool = True, lora: LoraOptions | None = None) -> HfModel:
    config = transformers.LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        tie_word_embeddings=is_tied,
    )
    torch.manual_seed(0)
    return HfModel(transformers.LlamaForCausalLM(config), name="llama", end_ids=frozenset([0]), lora=lora)


def logits(model: HfModel) -> Any:
    with torch.autocast("cpu", BF16, cache_enabled=False):
        return logits_of(model, IDS, torch.tensor([4]), torch.ones_like(IDS, dtype=torch.bool))


def a_learner(model: HfModel, **settings: Any) -> Learner:
    return Learner(model, LearnerSettings(precision="bf16", learning_rate=1e-3, **settings))


@pytest.fixture
def roundings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The chance of each rounding of a copy."""
    found: list[str] = []

    def counted(tensors: Any, dtype: Any, chance: str) -> Any:
        found.append(chance)
        return rounded_parts(tensors, dtype, chance)

    monkeypatch.setattr(weights, "rounded_parts", counted)
    return found


@pytest.mark.parametrize("checkpointing", [True, False])
def test_weights_are_rounded_once_for_a_step(roundings: list[str], checkpointing: bool) -> None:
    model = a_model()
    learner = a_learner(model, minibatches=2, max_batch_tokens=4, gradient_checkpointing=checkpointing, seed=3)

    for version in (1, 2):
        learner.update(SAMPLES)
        dict(PublishedWeights(model, seed=3, version=version, copy=learner.rounded_copy).tensors(BF16))

    assert roundings == ["3/0", "3/0/1", "3/1", "3/1/1", "3/2"]


def test_what_is_published_after_an_update_is_what_the_next_one_computes_with() -> None:
    model = a_model()
    learner = a_learner(model)
    learner.update(SAMPLES)

    published = dict(PublishedWeights(model, seed=0, version=1, copy=learner.rounded_copy).tensors(BF16))

    exact = dict(model.weights())
    alone = dict(PublishedWeights(model, seed=0, version=1).tensors(BF16))
    assert all(torch.equal(tensor, alone[name]) for name, tensor in published.items())
    assert any(not torch.equal(tensor.float(), exact[name]) for name, tensor in published.items())
    served = a_model()
    served.load_state(published)
    with torch.no_grad(), learner._rounded():
        found = logits(model)
    with torch.no_grad():
        assert torch.equal(found, logits(served))


@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
def test_exact_weights_get_the_gradients_of_the_copy_in_32_bits(is_tied: bool) -> None:
    model, rounded = a_model(is_tied=is_tied), a_model(is_tied=is_tied)
    copy = RoundedCopy(model._plain, BF16)
    rounded.load_state(dict(copy.rounded("any").tensors))
    before = model.state()

    for _ in range(1 if is_tied else 2):  # sums of more than two numbers depend on their order
        with copy.in_use("any"):
            logits(model).square().mean().backward()
        logits(rounded).square().mean().backward()

    theirs = rounded.trainable()
    for name, weight in model.trainable().items():
        assert weight.grad is not None
        assert weight.grad.dtype == torch.float32
        assert torch.equal(weight.grad, theirs[name].grad), name
        assert torch.equal(weight, before[name])


def test_the_exact_weights_are_back_after_a_pass_that_fails() -> None:
    model = a_model()
    own = {id(weight) for weight in model._plain.parameters()}

    def fail() -> None:
        with RoundedCopy(model._plain, BF16).in_use("any"):
            assert own.isdisjoint({id(weight) for weight in model._plain.parameters()})
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        fail()

    assert {id(weight) for weight in model._plain.parameters()} == own


@pytest.mark.parametrize("change", ["in place", "other memory"])
def test_weights_that_were_changed_are_rounded_anew_with_the_same_chance(change: str) -> None:
    model = a_model()
    copy = RoundedCopy(model._plain, BF16)
    before = copy.rounded("any").tensors["model.norm.weight"].clone()
    weight = model.trainable()["model.norm.weight"]

    if change == "in place":
        with torch.no_grad():
            weight.add_(1)
    else:
        weight.data = weight.detach() + 1

    assert torch.equal(copy.rounded("any").tensors["model.norm.weight"], before + 1)


def test_the_reference_computes_with_its_own_weights_in_16_bits() -> None:
    model = a_model()
    with torch.no_grad():
        for weight in model.trainable().values():
            weight.copy_(weight.bfloat16())  # so that no chance changes the reference
    learner = a_learner(model, kl_coefficient=0.1)
    assert learner._reference is not None
    rows = [Row.of(sample, model) for sample in SAMPLES]

    def logprobs() -> Any:
        return torch.cat([found for _, found in learner.evaluated(rows)])

    began = logprobs()
    with torch.no_grad():
        for weight in model.trainable().values():
            weight.mul_(1.1)
    moved = logprobs()
    with learner._as_reference(learner._reference):
        found = logprobs()

    assert torch.equal(found, began)
    assert torch.equal(logprobs(), moved)
    assert not torch.allclose(moved, began)


def test_adapters_need_no_copy() -> None:
    pytest.importorskip("peft", reason="LoRA needs peft: the extra hf")
    model = a_model(lora=LoraOptions(rank=2))

    learner = a_learner(model)

    assert learner.rounded_copy is None
    assert learner.update(SAMPLES)["learner/grad_norm"] > 0
