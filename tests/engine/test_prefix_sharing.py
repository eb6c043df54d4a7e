"""What prompts have in common is read once: in a group of rollouts, and from turn to turn of a conversation."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.optional import optional

pytest.importorskip("torch", reason="the engine needs torch")
optional("transformers", reason="Hugging Face models need transformers: the extra hf")

from agentlightning.engine.checkpoint import load  # noqa: E402
from agentlightning.engine.sampling import Generation, Sampling  # noqa: E402
from agentlightning.engine.scheduler import InferenceEngine  # noqa: E402
from tests.engine.scripted import PATIENCE_SECONDS, trained_logprobs  # noqa: E402
from tests.engine.small_llama import save_small_llama, subword_tokenizer  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_llama(tmp_path_factory.mktemp("hf") / "small-llama", subword_tokenizer())


@pytest.fixture
def engine(folder: Path) -> Iterator[InferenceEngine]:
    model, _ = load(str(folder), device="cpu")
    with InferenceEngine(model, max_sequences=4) as engine:
        yield engine


def a_prompt(length: int, seed: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(200) for _ in range(length)]


def sampled(engine: InferenceEngine, prompts: list[list[int]], tokens: int = 8) -> list[Generation]:
    sampling = Sampling(max_new_tokens=tokens, min_new_tokens=tokens)
    futures = [engine.submit(prompt, sampling) for prompt in prompts]
    return [future.result(PATIENCE_SECONDS) for future in futures]


def tokens_read(engine: InferenceEngine) -> int:
    return int(engine.statistics()["prompt_tokens"])


def check_logprobs(model: Any, prompt: list[int], generation: Generation) -> None:
    expected = trained_logprobs(model, prompt, generation.token_ids)
    assert generation.logprobs == pytest.approx(expected, abs=1e-4)


def test_a_group_reads_its_prompt_once(engine: InferenceEngine) -> None:
    prompt = a_prompt(100, 1)

    generations = sampled(engine, [prompt] * 4)

    assert tokens_read(engine) == 100 + 3  # each but the first reads the last token, for its logits
    for generation in generations:
        check_logprobs(engine.model, prompt, generation)


def test_the_next_turn_reads_what_is_new(engine: InferenceEngine) -> None:
    prompt = a_prompt(100, 2)
    [first] = sampled(engine, [prompt])
    following = [*prompt, *first.token_ids, *a_prompt(20, 3)]

    [second] = sampled(engine, [following])

    assert tokens_read(engine) == 100 + 1 + 20  # the last token sampled was not read before
    check_logprobs(engine.model, following, second)


def test_new_weights_read_everything_again(engine: InferenceEngine) -> None:
    prompt = a_prompt(64, 4)
    running = engine.submit(prompt, Sampling(max_new_tokens=100, min_new_tokens=100))
    sampled(engine, [prompt])
    weights = {name: tensor * 1.1 for name, tensor in engine.model.state().items()}

    engine.load_weights(1, weights).result(PATIENCE_SECONDS)
    running.result(PATIENCE_SECONDS)
    before = tokens_read(engine)
    [generation] = sampled(engine, [prompt])

    assert tokens_read(engine) - before == 64
    check_logprobs(engine.model, prompt, generation)


def test_many_conversations_of_many_lengths_are_sampled_as_without_sharing(engine: InferenceEngine) -> None:
    source = random.Random(5)
    stems = [a_prompt(length, length) for length in (40, 70, 130)]
    prompts = [[*source.choice(stems), *a_prompt(source.randrange(1, 60), number)] for number in range(24)]

    for prompt, generation in zip(prompts, sampled(engine, prompts, 12), strict=True):
        check_logprobs(engine.model, prompt, generation)

    assert tokens_read(engine) < sum(map(len, prompts)) * 0.7
