"""Learning with an engine of 16 bits: the published weights follow the learner's, and so does what is sampled.

A small Llama, the real learner and the real engine in this process; the reward is the share of one word in an answer.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.optional import optional

torch = pytest.importorskip("torch", reason="GRPO needs torch")
optional("transformers", reason="Hugging Face models need transformers: the extra hf")

from agentlightning.algorithm.grpo import Checkpoints, Learner, LearnerSettings  # noqa: E402
from agentlightning.algorithm.grpo.batch_report import BatchReport  # noqa: E402
from agentlightning.algorithm.grpo.policy import Policy  # noqa: E402
from agentlightning.algorithm.grpo.samples import Batch, Sample  # noqa: E402
from agentlightning.engine.checkpoint import load  # noqa: E402
from agentlightning.engine.model import LoraOptions, logits_of  # noqa: E402
from agentlightning.engine.sampling import Sampling  # noqa: E402
from agentlightning.engine.scheduler import InferenceEngine  # noqa: E402
from agentlightning.engine.weights import PublishedWeights  # noqa: E402
from tests.engine.small_llama import WORDS, save_small_llama, word_tokenizer  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

PATIENCE_SECONDS = 60.0
WANTED = "blue"
ANSWER_WORDS = 4
TASKS, GROUP = 4, 8
Publish = Callable[[Any, int], dict[str, Any]]


def by_chance(model: Any, version: int) -> dict[str, Any]:
    return dict(PublishedWeights(model, seed=0, version=version).tensors(torch.bfloat16))


def to_the_nearest(model: Any, version: int) -> dict[str, Any]:
    return {name: tensor.to(torch.bfloat16) for name, tensor in model.weights()}


@dataclass
class Trained:
    """What a training left."""

    learned: Any
    served: Any
    base: dict[str, Any]
    published: dict[str, Any]
    prompts: list[list[int]] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    clipped: list[float] = field(default_factory=list)
    """Of each step: the share of tokens whose ratio to the engine's probability is clipped."""

    def arrived(self) -> float:
        """How much of the learner's change is in what is published: 1 is all of it, in the mean."""
        true = torch.cat([(tensor.float() - self.base[name]).flatten() for name, tensor in self.learned.weights()])
        told = torch.cat([(tensor.float() - self.base[name]).flatten() for name, tensor in self.published.items()])
        return float((true @ told) / (true @ true))

    def disagreement(self) -> float:
        """Mean absolute difference of the log-probabilities of all words, learner against engine."""
        found = []
        for prompt in self.prompts:
            ids = torch.tensor([prompt])
            marked, length = torch.ones_like(ids, dtype=torch.bool), torch.tensor([len(prompt)])
            with torch.no_grad():
                both = [
                    logits_of(one, ids, length, marked).float().log_softmax(-1) for one in (self.learned, self.served)
                ]
            found.append((both[0] - both[1]).abs().mean())
        return float(torch.stack(found).mean())


def train(folder: Path, publish: Publish, *, steps: int, rate: float, lora: LoraOptions | None = None) -> Trained:
    torch.manual_seed(0)  # of the adapters
    learned, codec = load(str(folder), device="cpu", dtype="float32" if lora is None else "bfloat16", lora=lora)
    served, _ = load(str(folder), device="cpu", dtype="bfloat16")
    base = {name: tensor.float() for name, tensor in served.state().items()}
    learner = Learner(learned, LearnerSettings(learning_rate=rate, threads=1))
    found, order = Trained(learned, served, base, {}), random.Random(0)
    with InferenceEngine(served) as engine:
        for version in range(1, steps + 1):
            content = [" ".join(order.sample(WORDS, 2)) for _ in range(TASKS)]
            found.prompts = [codec.render([{"role": "user", "content": words}]) for words in content]
            samples = [sample for prompt in found.prompts for sample in group(engine, codec, prompt, version)]
            found.rewards.append(sum(share(codec, one.token_ids) for one in samples) / len(samples))
            metrics = learner.update(samples)
            found.clipped.append(metrics["learner/clipped_low"] + metrics["learner/clipped_high"])
            found.published = publish(learned, version)
            engine.load_weights(version, found.published).result(PATIENCE_SECONDS)
    return found


def group(engine: InferenceEngine, codec: Any, prompt: list[int], version: int) -> list[Sample]:
    """Answers to one prompt, with their advantages."""
    seeds = [version * GROUP + number for number in range(GROUP)]
    futures = [engine.submit(prompt, Sampling(max_new_tokens=ANSWER_WORDS, seed=seed)) for seed in seeds]
    answers = [future.result(PATIENCE_SECONDS) for future in futures]
    rewards = torch.tensor([share(codec, answer.token_ids) for answer in answers])
    advantages = ((rewards - rewards.mean()) / (rewards.std() + 1e-6)).tolist()
    return [
        Sample(
            token_ids=prompt + answer.token_ids,
            loss_mask=[0] * len(prompt) + [1] * len(answer.token_ids),
            logprobs=[None] * len(prompt) + answer.logprobs,
            advantage=advantage,
            version=version - 1,
            group=str(prompt),
            rollout_id="ro",
        )
        for answer, advantage in zip(answers, advantages, strict=True)
    ]


def share(codec: Any, token_ids: list[int]) -> float:
    [wanted] = codec.encode(WANTED)
    return token_ids[-ANSWER_WORDS:].count(wanted) / ANSWER_WORDS


@pytest.mark.models
@pytest.mark.timeout(300)
def test_16_bit_weights_learn_where_rounding_to_the_nearest_stalls(tmp_path: Path) -> None:
    folder = save_small_llama(tmp_path / "llama", word_tokenizer(), initializer_range=0.1, width=256, dtype="bfloat16")

    stalled, learning = (train(folder, publish, steps=25, rate=2e-5) for publish in (to_the_nearest, by_chance))

    for name, one in (("nearest", stalled), ("chance", learning)):
        print(name, [round(reward, 2) for reward in one.rewards], one.arrived(), one.disagreement(), one.clipped[-5:])
    assert sum(learning.rewards[-5:]) / 5 > 0.25
    assert sum(learning.rewards[-5:]) > 2 * sum(stalled.rewards[-5:])
    assert sum(learning.clipped[-5:]) < sum(stalled.clipped[-5:]) / 3
    assert learning.arrived() == pytest.approx(1.0, abs=0.05)
    assert learning.disagreement() < 0.05 < stalled.disagreement()


@pytest.mark.models
@pytest.mark.timeout(300)
@pytest.mark.parametrize("rate", [1e-5, 1e-4])
def test_adapters_arrive_whole_and_engine_and_learner_agree_after_fifty_updates(tmp_path: Path, rate: float) -> None:
    pytest.importorskip("peft", reason="LoRA needs peft: the extra hf")
    folder = save_small_llama(tmp_path / "llama", word_tokenizer(), dtype="bfloat16")

    found = train(folder, by_chance, steps=50, rate=rate, lora=LoraOptions(rank=16))

    print(rate, found.arrived(), found.disagreement())
    assert found.arrived() == pytest.approx(1.0, abs=0.15)
    assert found.disagreement() < 0.05


class Recorder:
    """Stands for an engine of 16 bits; keeps what it is given."""

    def __init__(self) -> None:
        self.published: dict[str, Any] = {}

    def publish(self, version: int, weights: PublishedWeights) -> None:
        self.published = dict(weights.tensors(torch.bfloat16))


@pytest.mark.parametrize("lora", [None, LoraOptions(rank=2)], ids=["weights", "adapters"])
async def test_a_run_that_is_resumed_publishes_the_same_numbers(tmp_path: Path, lora: LoraOptions | None) -> None:
    if lora is not None:
        pytest.importorskip("peft", reason="LoRA needs peft: the extra hf")
    folder = save_small_llama(tmp_path / "llama", word_tokenizer(), dtype="bfloat16")
    lessons = [
        Sample([3, 4, 5 + n], [0, 0, 1], [None] * 3, advantage=1.0 - n, version=0, group="g", rollout_id="ro")
        for n in range(3)
    ]

    def started() -> Policy:
        policy = Policy("policy", str(folder), LearnerSettings(learning_rate=1e-5, threads=1), device="cpu", lora=lora)
        policy.load()
        policy._engine = Recorder()  # type: ignore[assignment]
        return policy

    whole, resumed = started(), started()
    await whole.update(Batch(lessons, BatchReport()))
    Checkpoints(tmp_path).save(
        1, model_state=whole.model.state(), learner_state=whole.learner_state(), progress={"version": 1}
    )
    saved = Checkpoints(tmp_path).latest()
    assert saved is not None
    resumed.restore(saved.model_state(), saved.learner_state(), saved.progress["version"])
    for policy in (whole, resumed):
        await policy.update(Batch(lessons, BatchReport()))
        await policy.publish()

    published: Any = [policy.engine.published for policy in (whole, resumed)]
    assert all(torch.equal(tensor, published[1][name]) for name, tensor in published[0].items())
    assert any((tensor != published[0][name]).any() for name, tensor in whole.model.weights())
