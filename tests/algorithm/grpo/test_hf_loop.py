"""A Hugging Face model learns: a small Llama with random weights, an engine process, and an agent that knows openai."""

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.optional import optional

torch = pytest.importorskip("torch", reason="GRPO needs torch")
transformers = optional("transformers", reason="Hugging Face models need transformers: the extra hf")

import agentlightning as agl  # noqa: E402 # after the checks
from agentlightning.algorithm.grpo import GRPO, Checkpoints, Learner, LearnerSettings, SampleSettings  # noqa: E402
from agentlightning.cli import main  # noqa: E402
from agentlightning.engine.checkpoint import load  # noqa: E402
from agentlightning.engine.model import LoraOptions  # noqa: E402
from agentlightning.litagent import FunctionalLitAgent  # noqa: E402
from tests.algorithm.grpo.training import settings  # noqa: E402
from tests.engine.small_llama import WORDS, save_small_llama, word_tokenizer  # noqa: E402

pytestmark = pytest.mark.usefixtures("nothing_is_left")

WANTED = "blue"
ANSWER_WORDS = 4
STEPS = 12
LORA = LoraOptions(rank=4, targets=("o_proj", "down_proj", "lm_head"))
TASKS = [f"{first} {second}" for first in WORDS for second in WORDS]
NOWHERE = "http://127.0.0.1:9/v1"
"""Where the agent's own model would be; its calls never arrive there."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_llama(tmp_path_factory.mktemp("base") / "llama", word_tokenizer(), initializer_range=0.1)


@pytest.fixture
def client() -> Iterator[openai.OpenAI]:
    with openai.OpenAI(api_key="none", base_url=NOWHERE, max_retries=0) as client:
        yield client


def trained(base: Path, folder: Path, client: openai.OpenAI, **changes: Any) -> tuple[GRPO, agl.Trainer]:
    """After a few steps, in which the share of the wanted word in an answer was the reward.

    An answer is drawn by how often its task came before, so that a training that is repeated is the same.
    """
    seeds = {task: itertools.count() for task in TASKS}

    def agent(task: str) -> float:
        messages: Any = [{"role": "user", "content": task}]
        reply = client.chat.completions.create(
            model="any", messages=messages, max_tokens=ANSWER_WORDS, seed=next(seeds[task])
        )
        return (reply.choices[0].message.content or "").split().count(WANTED) / ANSWER_WORDS

    options: dict[str, Any] = {"group_size": 8, "tasks_per_step": 4, "steps": STEPS, "validation_tasks": 8}
    algorithm = GRPO(
        str(base),
        sampling=SampleSettings(skip_truncated=False),  # every answer is cut after as many words
        checkpoints=folder / "checkpoints",
        output=folder / "out",
        device="cpu",
        **{**options, **changes},
    )
    made = agl.Trainer(
        algorithm=algorithm,
        strategy=agl.SharedMemoryExecutionStrategy(n_runners=1, main_thread="algorithm"),
        runner={"max_concurrency": 16, "poll_interval": 0.05},
        progress="off",
    )
    made.fit(FunctionalLitAgent(agent), TASKS[8:], TASKS[:8])
    return algorithm, made


def greedy_reward(folder: Path) -> float:
    """Of a folder, with nothing but transformers: the mean on the validation tasks, taking the likeliest word."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    rewards = []
    for task in TASKS[:8]:
        asked = tokenizer.apply_chat_template(
            [{"role": "user", "content": task}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        said = model.generate(**asked, max_new_tokens=ANSWER_WORDS, do_sample=False, pad_token_id=0)[0]
        words = tokenizer.decode(said[asked["input_ids"].shape[1] :], skip_special_tokens=True).split()
        rewards.append(words.count(WANTED) / ANSWER_WORDS)
    return sum(rewards) / len(rewards)


def weights(folder: Path) -> dict[str, Any]:
    model, _ = load(str(folder), device="cpu")
    return model.state()


def check_learning(algorithm: GRPO, made: agl.Trainer) -> None:
    """The reward rose, and it was the model in training that the agent talked with."""
    assert algorithm.baseline is not None
    assert algorithm.result is not None
    curve = algorithm.progress.rewards
    print("rewards", [round(reward, 2) for reward in curve], algorithm.baseline, algorithm.result)
    assert algorithm.progress.step == STEPS
    assert sum(curve[:2]) / 2 < 0.25
    assert sum(curve[-2:]) / 2 > 0.6
    assert algorithm.baseline.mean <= 0.25
    assert algorithm.result.mean >= 0.9
    rollouts = asyncio.run(made.store.query_rollouts())
    assert {rollout.status for rollout in rollouts} == {"succeeded"}


@pytest.mark.parametrize(
    ("source", "lora", "rate"), [("tiny", None, 5e-4), ("llama", None, 1e-6), ("llama", LORA, 1e-5)]
)
def test_the_default_learning_rate_is_that_of_the_kind_of_model(
    base: Path, source: str, lora: LoraOptions | None, rate: float
) -> None:
    if lora is not None:
        pytest.importorskip("peft", reason="LoRA needs peft: the extra hf")
    model, _ = load("tiny" if source == "tiny" else str(base), device="cpu", lora=lora)

    assert Learner(model).learning_rate == rate
    assert Learner(model, LearnerSettings(learning_rate=0.25)).learning_rate == 0.25


@pytest.mark.models
@pytest.mark.usefixtures("seeds_are_heeded")
def test_llama_learns_the_word_that_is_rewarded(base: Path, tmp_path: Path, client: openai.OpenAI) -> None:
    algorithm, made = trained(base, tmp_path, client, learning=settings(learning_rate=1e-2))

    check_learning(algorithm, made)
    before, after = weights(base), weights(tmp_path / "out")
    assert not any(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert algorithm.result is not None
    assert greedy_reward(base) <= 0.25
    assert greedy_reward(tmp_path / "out") == pytest.approx(algorithm.result.mean)


@pytest.mark.models
@pytest.mark.usefixtures("seeds_are_heeded")
def test_adapters_alone_learn_and_are_merged_into_what_is_exported(
    base: Path, tmp_path: Path, client: openai.OpenAI, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("peft", reason="LoRA needs peft: the extra hf")
    before = weights(base)

    algorithm, made = trained(base, tmp_path, client, learning=settings(learning_rate=2e-2), lora=LORA)

    check_learning(algorithm, made)
    model: Any = algorithm.policies[0].model
    assert all("lora_" in name for name in model.trainable())
    assert any(weight.detach().any() for name, weight in model.trainable().items() if "lora_B" in name)
    beneath = {name: weight.detach() for name, weight in model._published().items()}
    assert beneath.keys() == before.keys()
    assert all(torch.equal(weight, before[name]) for name, weight in beneath.items())
    kept = Checkpoints(tmp_path / "checkpoints" / "policy").latest()
    assert kept is not None
    assert kept.learner_state()["adapters"].keys() == model.trainable().keys()

    assert main(["export-model", str(tmp_path / "checkpoints"), str(tmp_path / "exported")]) == 0

    assert f"step {STEPS}" in capsys.readouterr().out
    merged = weights(tmp_path / "exported")
    assert all(torch.equal(tensor, merged[name]) for name, tensor in model.state().items())
    assert not list((tmp_path / "exported").glob("adapter*"))
    assert algorithm.result is not None
    assert greedy_reward(tmp_path / "exported") == pytest.approx(algorithm.result.mean)
