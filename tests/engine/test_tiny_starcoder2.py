"""The folder of a tiny model, as transformers sees it: the same logits, the same tokens."""

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the engine needs torch")
pytest.importorskip("numpy", reason="safetensors writes through NumPy")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from agentlightning.engine.checkpoint import save_model  # noqa: E402
from agentlightning.engine.codec import Message, ToolDefinition  # noqa: E402
from agentlightning.engine.model import logits_of  # noqa: E402
from agentlightning.engine.tiny.codec import TinyChatCodec  # noqa: E402
from agentlightning.engine.tiny.model import DESCRIPTION_FILE, WEIGHTS_FILE, TinyModel, TinyShape, load_tiny, save_tiny  # noqa: E402  # noqa: E402
from agentlightning.engine.tiny.tokenizer import END, VOCABULARY_SIZE  # noqa: E402
from agentlightning.errors import EngineError  # noqa: E402
from tests.engine.test_tiny_codec import CALCULATOR, LOOKUP, LOOKUP_ALL, QUESTION, next_turn, sampled_tokens  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
CODEC = TinyChatCodec()
TOOL_LISTS: dict[str, list[ToolDefinition] | None] = {
    "none": None,
    "one": [CALCULATOR],
    "raw": [LOOKUP_ALL],
    "several": [CALCULATOR, LOOKUP, LOOKUP_ALL],
    "twice": [CALCULATOR, CALCULATOR],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of the package, exported."""
    place = tmp_path_factory.mktemp("exported") / "model"
    save_model(load_tiny(), CODEC, place)
    return place


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def starcoder(folder: Path) -> Any:
    return pytest.importorskip("transformers").AutoModelForCausalLM.from_pretrained(folder).eval()


def rendered(tokenizer: Any, messages: list[Message], tools: Any = None, *, is_asking: bool = True) -> list[int]:
    found = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=is_asking, return_dict=False)
    return list(found)


# ---------------------------------------------------------------------- weights


def test_transformers_computes_the_same_logits(starcoder: Any) -> None:
    model = load_tiny()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, VOCABULARY_SIZE, (2, 256), generator=generator)

    with torch.no_grad():
        theirs = starcoder(ids).logits
        ours = logits_of(model, ids, torch.tensor([ids.shape[1]] * 2), torch.ones_like(ids, dtype=torch.bool))

    assert starcoder.dtype == torch.float32
    assert starcoder.generation_config.eos_token_id == END
    assert (theirs.flatten(0, 1) - ours).abs().max() < 2e-4  # of logits up to 26; sums run in another order


def test_folder_that_transformers_saved_over_is_still_a_tiny_model(
    starcoder: Any, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / DESCRIPTION_FILE).write_bytes((folder / DESCRIPTION_FILE).read_bytes())

    starcoder.save_pretrained(tmp_path)

    again = load_tiny(tmp_path)
    assert all(torch.equal(tensor, again.state()[name]) for name, tensor in load_tiny().state().items())


@pytest.mark.parametrize("name", ["model.norm.bias", "model.layers.0.mlp.c_fc.bias", "lm_head.weight"])
def test_weights_that_a_tiny_model_does_not_have_are_refused(name: str, tmp_path: Path) -> None:
    save_tiny(TinyModel(TinyShape(width=16, layers=1, heads=2, max_length=8)), tmp_path)
    tensors = load_file(tmp_path / WEIGHTS_FILE)

    save_file({**tensors, name: torch.ones(16)}, tmp_path / WEIGHTS_FILE)

    with pytest.raises(EngineError, match=f"'{name}' have no place in a tiny model; remove tiny.json"):
        load_tiny(tmp_path)


# ---------------------------------------------------------------------- tokens


@given(text=st.text(st.characters(codec="utf-8", exclude_categories=["Co"]), max_size=40))
def test_any_text_has_the_same_tokens(tokenizer: Any, text: str) -> None:
    assert tokenizer.encode(text, add_special_tokens=False) == CODEC.encode(text)


@given(
    role=st.sampled_from(["system", "developer", "user", "tool", "function"]),
    text=st.text(st.sampled_from("ab?<end>\n \ue000\ue003\ue008\ue00a\U0001f642"), max_size=30),
)
def test_text_of_others_is_rendered_alike_and_cannot_say_special_tokens(tokenizer: Any, role: str, text: str) -> None:
    messages = [{"role": role, "content": text}]

    assert rendered(tokenizer, messages) == CODEC.render(messages)


@settings(max_examples=2 * settings.default.max_examples)
@given(tools=st.sampled_from(list(TOOL_LISTS.values())), sampled=sampled_tokens)
def test_turns_of_the_model_are_rendered_to_the_sampled_tokens(tokenizer: Any, tools: Any, sampled: list[int]) -> None:
    messages = next_turn(CODEC.parse(sampled, tools))

    assert rendered(tokenizer, messages, tools) == CODEC.render(messages, tools)


@pytest.mark.parametrize(
    ("arguments", "tools"),
    [
        ('{"expression": "37+58"}', "one"),
        ('{"expression":"37+58"}', "one"),
        ('{"expression": "a\\"b\\\\c\\nd"}', "several"),
        ('{"expression": 5}', "one"),
        ('{"expression": "1", "more": "2"}', "one"),
        ('{"key": "a", "limit": 2}', "raw"),
        ("not JSON", "one"),
        ("", "one"),
        ("{}", "none"),
    ],
)
@pytest.mark.parametrize("as_object", [False, True], ids=["text", "object"])
def test_arguments_of_calls_are_rendered_alike(tokenizer: Any, arguments: str, tools: str, as_object: bool) -> None:
    """vLLM gives templates the arguments as objects, OpenAI's dialect has them as text."""
    name = "look_all" if tools == "raw" else "calculator"
    given: Any = json.loads(arguments) if as_object and arguments.startswith("{") else arguments

    def asking(written: Any) -> list[Message]:
        call = {"id": "c", "type": "function", "function": {"name": name, "arguments": written}}
        answer = {"role": "assistant", "content": None, "tool_calls": [call]}
        return [QUESTION, answer, {"role": "tool", "tool_call_id": "c", "content": "95"}]

    assert rendered(tokenizer, asking(given), TOOL_LISTS[tools]) == CODEC.render(asking(arguments), TOOL_LISTS[tools])
