"""A tiny model on disk: the folder of a Starcoder2, and in it `tiny.json`, by which `load` knows it.

transformers, vLLM and others have that architecture. The two compute the same: pre-norm blocks, rotary positions, a
hidden layer with GELU, tied embeddings. They differ in how weights are laid out. Here one matrix makes queries, keys
and values, and neighbouring numbers of a head turn together; there are three matrices, and a number turns with the one
half a head further on. Norms have a bias there, which is zero. So tensors are split and their rows reordered, and the
way back gives the same bits. A folder with `weights.safetensors`, with the names of `TinyModel`, is read too.

The tokenizer's files hold the same ids. A special token is written as the character that `tokenizer.text_of` has for
it rather than by a name such as "<end>", so that no text that somebody writes becomes one.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from agentlightning.engine.tiny.model import NORM_EPSILON, ROTARY_BASE, TinyModel, TinyShape
from agentlightning.engine.tiny.tokenizer import CALL, END, NAMED, PAD, VOCABULARY_SIZE, text_of
from agentlightning.errors import EngineError
from agentlightning.utils.json_values import JsonMapping, JsonObject

DESCRIPTION_FILE: Final = "tiny.json"
WEIGHTS_FILE: Final = "model.safetensors"
SHIPPED_FOLDER: Final = Path(__file__).parent
"""Where the weights of the package lie."""
BARE_WEIGHTS_FILE: Final = "weights.safetensors"
_FORMAT: Final = 1
_WHOLE: Final = {"embedding": "model.embed_tokens.weight", "final_norm": "model.norm.weight"}
_OF_A_LAYER: Final = {
    "attention_norm": "input_layernorm.weight",
    "attention_out": "self_attn.o_proj.weight",
    "hidden_norm": "post_attention_layernorm.weight",
    "hidden_in": "mlp.c_fc.weight",
    "hidden_out": "mlp.c_proj.weight",
}
_OUTPUT: Final = "lm_head.weight"


def load_tiny(folder: Path = SHIPPED_FOLDER, *, device: str | torch.device = "cpu") -> TinyModel:
    """The model of a folder, by default the one that travels in the package."""
    description = _described(folder)
    try:
        shape = TinyShape(**description["shape"])
        with torch.random.fork_rng(devices=[]):
            model = TinyModel(shape, name=str(description["name"]))
        if (folder / BARE_WEIGHTS_FILE).is_file() and not (folder / WEIGHTS_FILE).is_file():
            weights = load_file(folder / BARE_WEIGHTS_FILE)
        else:
            weights = _from_starcoder2(load_file(folder / WEIGHTS_FILE), shape)
    except EngineError:
        raise
    except (KeyError, TypeError, ValueError, RuntimeError, OSError, SafetensorError) as error:
        raise EngineError(f"The folder '{folder}' holds no tiny model that can be read: {error!r}.") from error
    if shape.vocab_size != VOCABULARY_SIZE:
        raise EngineError(
            f"The model in '{folder}' has {shape.vocab_size} tokens; this release reads models of {VOCABULARY_SIZE}."
        )
    model.load_state(weights)
    return model.to(device)


def save_tiny(model: TinyModel, folder: Path, *, extra: JsonMapping | None = None) -> None:
    """Write a model into a folder; `extra` is kept in its description. Not atomic: the caller renames the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    description = {
        "format": _FORMAT,
        "name": model.name,
        "shape": dataclasses.asdict(model.shape),
        **({"extra": dict(extra)} if extra else {}),
    }
    weights = _to_starcoder2(model.state(), model.shape)
    (folder / WEIGHTS_FILE).write_bytes(save(weights, metadata={"format": "pt"}))  # without which transformers refuses
    (folder / BARE_WEIGHTS_FILE).unlink(missing_ok=True)  # an older copy, if the folder had one
    for name, text in _described_files(model.shape).items():
        (folder / name).write_text(text, encoding="utf-8")
    (folder / DESCRIPTION_FILE).write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")


def _described(folder: Path) -> JsonObject:
    try:
        description = json.loads((folder / DESCRIPTION_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EngineError(f"The folder '{folder}' holds no readable {DESCRIPTION_FILE}: {error}.") from error
    if not isinstance(description, dict) or description.get("format") != _FORMAT:
        raise EngineError(f"'{folder / DESCRIPTION_FILE}' is not of format {_FORMAT}, which this release reads.")
    return description


# ---------------------------------------------------------------------- Starcoder2


def _to_starcoder2(state: Mapping[str, Tensor], shape: TinyShape) -> dict[str, Tensor]:
    """The weights of a tiny model under the names and in the layout of Starcoder2."""
    tensors = {theirs: state[ours] for ours, theirs in _names(shape).items()}
    for layer in range(shape.layers):
        queries, keys, values = state[f"blocks.{layer}.attention_in"].chunk(3)
        projections = (_halved(queries, shape), _halved(keys, shape), values)
        tensors |= dict(zip(_projections(layer), projections, strict=True))
    for name in _biases(shape):
        tensors[name] = torch.zeros(shape.width)
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def _from_starcoder2(tensors: Mapping[str, Tensor], shape: TinyShape) -> dict[str, Tensor]:
    """The weights of a tiny model; KeyError without one of them, EngineError for what a tiny model does not have."""
    state = {ours: tensors[theirs] for ours, theirs in _names(shape).items()}
    for layer in range(shape.layers):
        queries, keys, values = (tensors[name] for name in _projections(layer))
        rows = (_paired(queries, shape), _paired(keys, shape), values)
        state[f"blocks.{layer}.attention_in"] = torch.cat(rows)
    known = {*_names(shape).values(), *(name for layer in range(shape.layers) for name in _projections(layer))}
    others = {name: tensor for name, tensor in tensors.items() if name not in known}
    if _OUTPUT in others and torch.equal(others[_OUTPUT], state["embedding"]):
        del others[_OUTPUT]
    foreign = [name for name, tensor in others.items() if name not in _biases(shape) or tensor.any()]
    if foreign:
        raise EngineError(
            f"The weights '{foreign[0]}' have no place in a tiny model; remove tiny.json from the folder to load it as "
            "a Hugging Face model."
        )
    return state


def _described_files(shape: TinyShape) -> dict[str, str]:
    """What a Hugging Face folder has beside the weights, by the names of the files."""
    options = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    # Those of tool calls stay visible where special tokens are skipped, so that a call can be told from text.
    special = [
        {"id": token, "content": text_of([token]), **options, "special": token not in (CALL, NAMED)}
        for token in range(END + 1)
    ]
    tokenizer: JsonObject = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "?",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {text_of([token]): token for token in range(VOCABULARY_SIZE)},
            "merges": [],
        },
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": shape.max_length,
        "eos_token": text_of([END]),
        "pad_token": text_of([PAD]),
        "clean_up_tokenization_spaces": False,
        "chat_template": (Path(__file__).parent / "chat_template.jinja").read_text(encoding="utf-8"),
    }
    files = {"config.json": _config(shape), "tokenizer.json": tokenizer, "tokenizer_config.json": settings}
    return {name: json.dumps(content, indent=2) + "\n" for name, content in files.items()}


def _config(shape: TinyShape) -> JsonObject:
    return {
        "architectures": ["Starcoder2ForCausalLM"],
        "model_type": "starcoder2",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.width,
        "intermediate_size": 4 * shape.width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "max_position_embeddings": shape.max_length,
        "hidden_act": "gelu",
        "norm_epsilon": NORM_EPSILON,
        "rope_theta": ROTARY_BASE,
        "use_bias": False,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "attention_dropout": 0.0,
        "residual_dropout": 0.0,
        "embedding_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": END,
        "pad_token_id": PAD,
        "dtype": "float32",
    }


def _names(shape: TinyShape) -> dict[str, str]:
    """The names of weights whose numbers are the same in both."""
    layers = range(shape.layers)
    return _WHOLE | {
        f"blocks.{layer}.{ours}": f"model.layers.{layer}.{theirs}"
        for layer in layers
        for ours, theirs in _OF_A_LAYER.items()
    }


def _projections(layer: int) -> list[str]:
    return [f"model.layers.{layer}.self_attn.{kind}_proj.weight" for kind in "qkv"]


def _biases(shape: TinyShape) -> list[str]:
    return [f"{name.removesuffix('weight')}bias" for name in _names(shape).values() if "norm" in name]


def _halved(rows: Tensor, shape: TinyShape) -> Tensor:
    """Rows of pairs, as rows of first numbers and then of second ones, head by head."""
    pairs = rows.view(shape.heads, shape.head_width // 2, 2, shape.width)
    return pairs.transpose(1, 2).reshape(rows.shape)


def _paired(rows: Tensor, shape: TinyShape) -> Tensor:
    """The way back."""
    halves = rows.view(shape.heads, 2, shape.head_width // 2, shape.width)
    return halves.transpose(1, 2).reshape(rows.shape)
