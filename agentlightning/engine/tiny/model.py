"""The tiny model and its files.

It is a transformer: pre-norm blocks, rotary positions, tied embeddings, 32-bit numbers.

A step of so small a model costs the calls into torch rather than the arithmetic, so the step is written with few of
them: one product makes queries, keys and values, one complex product turns queries and keys by their position (and
leaves values as they are), one assignment writes keys and values into the cache.

On disk it is the folder of a Starcoder2, and in it `tiny.json`, by which `load` knows it. transformers, vLLM and others
have that architecture. The two compute the same: pre-norm blocks, rotary positions, a hidden layer with GELU, tied
embeddings. They differ in how weights are laid out. Here one matrix makes queries, keys and values, and neighbouring
numbers of a head turn together; there are three matrices, and a number turns with the one half a head further on. Norms
have a bias there, which is zero. So tensors are split and their rows reordered, and the way back gives the same bits. A
folder with `weights.safetensors`, with the names of `TinyModel`, is read too.

The tokenizer's files hold the same ids. A special token is written as the character that `tokenizer.text_of` has for it
rather than by a name such as "<end>", so that no text that somebody writes becomes one.
"""

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn
from torch.nn import functional

from agentlightning.engine.tiny.tokenizer import CALL, END, NAMED, PAD, VOCABULARY_SIZE, text_of
from agentlightning.engine.weights import copy_weights
from agentlightning.errors import EngineError
from agentlightning.utils.json_values import JsonMapping, JsonObject

ROTARY_BASE: Final = 10_000.0
NORM_EPSILON: Final = 1e-5
CACHE_STRIDE: Final = 16
"""Attention reads the cache up to a multiple of this, so that its buffers keep their sizes for some steps."""


@dataclass(frozen=True)
class TinyShape:
    """The sizes of a tiny model."""

    width: int = 64
    layers: int = 2
    heads: int = 4
    max_length: int = 1024
    vocab_size: int = VOCABULARY_SIZE

    @property
    def head_width(self) -> int:
        return self.width // self.heads


@dataclass(frozen=True)
class TinyCache:
    """Keys and values of the sequences under way."""

    layers: list[Tensor]
    """For every layer [2, slots, heads, length, head width]."""
    slots: Tensor
    """0, 1, 2 …"""
    columns: Tensor
    """0, 1, 2 … up to the length."""


class TinyBlock(nn.Module):
    """The weights of one layer; `TinyModel` computes with them."""

    def __init__(self, shape: TinyShape) -> None:
        super().__init__()
        width, hidden = shape.width, 4 * shape.width
        self.attention_norm = nn.Parameter(torch.ones(width))
        self.attention_in = nn.Parameter(torch.empty(3 * width, width))
        self.attention_out = nn.Parameter(torch.empty(width, width))
        self.hidden_norm = nn.Parameter(torch.ones(width))
        self.hidden_in = nn.Parameter(torch.empty(hidden, width))
        self.hidden_out = nn.Parameter(torch.empty(width, hidden))


class TinyModel(nn.Module):
    """A decoder-only transformer; a `CausalModel`."""

    shares_prefixes = False

    def __init__(self, shape: TinyShape | None = None, *, name: str = "tiny") -> None:
        super().__init__()
        self.shape = shape or TinyShape()
        self.name = name
        self.vocab_size = self.shape.vocab_size
        self.max_length = self.shape.max_length
        self.end_ids = frozenset([END])
        self.embedding = nn.Parameter(torch.empty(self.shape.vocab_size, self.shape.width))
        self.blocks = nn.ModuleList(TinyBlock(self.shape) for _ in range(self.shape.layers))
        self.final_norm = nn.Parameter(torch.ones(self.shape.width))
        self.register_buffer("turns", _turns(self.shape), persistent=False)
        self._initialise()

    def _initialise(self) -> None:
        """Random weights, from torch's default generator."""
        residual_scale = 1 / math.sqrt(2 * self.shape.layers)
        nn.init.normal_(self.embedding, 0, 0.02)
        for block in self._layers():
            for weight in (block.attention_in, block.attention_out, block.hidden_in, block.hidden_out):
                nn.init.normal_(weight, 0, 1 / math.sqrt(weight.shape[1]))
            block.attention_out.data *= residual_scale
            block.hidden_out.data *= residual_scale

    def _layers(self) -> list[TinyBlock]:
        return [cast("TinyBlock", block) for block in self.blocks]

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    def new_cache(self, slots: int, length: int) -> TinyCache:
        size = (2, slots, self.shape.heads, length, self.shape.head_width)
        layers = [torch.zeros(size, device=self.device, dtype=self.dtype) for _ in range(self.shape.layers)]
        return TinyCache(
            layers, torch.arange(slots, device=self.device), torch.arange(length, device=self.device)[None]
        )

    def prefill(
        self, ids: Tensor, lengths: Tensor, cache: TinyCache, slots: Tensor, starts: Tensor | None = None
    ) -> Tensor:
        ids, lengths, slots = (given.to(self.device) for given in (ids, lengths, slots))
        rows, length = ids.shape
        hidden = functional.embedding(ids, self.embedding)
        for block, stored in zip(self._layers(), cache.layers, strict=True):
            queries, keys, values = self._project(block, hidden, self._turns_until(length))
            stored[0, slots, :, :length] = keys
            stored[1, slots, :, :length] = values
            hidden = self._finish(block, hidden, _attend(queries, keys, values))
        last = hidden[torch.arange(rows, device=ids.device), lengths - 1]
        return self._predict(last)

    def decode(self, tokens: Tensor, positions: Tensor, cache: TinyCache, n: int) -> Tensor:
        tokens, positions = tokens.to(self.device), positions.to(self.device)
        heads, head_width = self.shape.heads, self.shape.head_width
        capacity = cache.columns.shape[1]
        read = min(capacity, (int(positions.max()) // CACHE_STRIDE + 1) * CACHE_STRIDE)
        unseen = torch.zeros((n, 1, read), device=self.device, dtype=self.dtype)
        unseen.masked_fill_(cache.columns[:, :read] > positions[:, None, None], -math.inf)
        unseen = unseen.repeat_interleave(heads, dim=0)
        slots = cache.slots[:n]
        turns = self._turns()[positions]
        hidden = functional.embedding(tokens, self.embedding)
        for block, stored in zip(self._layers(), cache.layers, strict=True):
            projected = functional.linear(self._norm(hidden, block.attention_norm), block.attention_in)
            pairs = torch.view_as_complex(projected.view(n, 3, heads, head_width // 2, 2))
            turned = torch.view_as_real(pairs * turns).view(n, 3, heads, head_width)
            stored[:, slots, :, positions] = turned[:, 1:]
            keys, values = stored[:, :n].flatten(1, 2)[:, :, :read].unbind()
            queries = turned[:, 0].reshape(n * heads, 1, head_width)
            weights = torch.baddbmm(unseen, queries, keys.transpose(1, 2), alpha=head_width**-0.5).softmax(-1)
            hidden = self._finish(block, hidden, torch.bmm(weights, values).view(n, -1))
        return self._predict(hidden)

    def move(self, cache: TinyCache, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        for stored in cache.layers:
            stored[:, targets, :, :length] = stored[:, sources, :, :length]

    def hidden(self, ids: Tensor, attention_lengths: Tensor, selected: Tensor) -> Tensor:
        """The states at the selected positions; padding on the right is hidden by causality alone."""
        hidden = functional.embedding(ids, self.embedding)
        turns = self._turns_until(ids.shape[1])
        for block in self._layers():
            hidden = self._finish(block, hidden, _attend(*self._project(block, hidden, turns)))
        return self._norm(hidden[selected], self.final_norm)

    def head(self) -> Tensor:
        return self.embedding

    def trainable(self) -> dict[str, nn.Parameter]:
        return dict(self.named_parameters())

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, parameter.detach()) for name, parameter in self.named_parameters())

    def adapters(self) -> None:
        """It has none."""

    def state(self) -> dict[str, Tensor]:
        return {name: tensor.to("cpu", copy=True) for name, tensor in self.weights()}

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(parameter.shape) for name, parameter in self.named_parameters()}

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        copy_weights(tensors, dict(self.named_parameters()))

    def train_mode(self, enabled: bool, *, dropout: bool = True) -> None:
        self.train(enabled)

    def _turns(self) -> Tensor:
        return cast("Tensor", self.turns)

    def _turns_until(self, length: int) -> Tensor:
        """For whole rows: [3, 1, length, head width / 2]."""
        return self._turns()[:length].permute(1, 2, 0, 3)

    def _project(self, block: TinyBlock, hidden: Tensor, turns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of whole rows, each [rows, heads, length, head width]."""
        rows, length, _ = hidden.shape
        heads, head_width = self.shape.heads, self.shape.head_width
        projected = functional.linear(self._norm(hidden, block.attention_norm), block.attention_in)
        pairs = torch.view_as_complex(projected.view(rows, length, 3, heads, head_width // 2, 2))
        turned = torch.view_as_real(pairs.permute(0, 2, 3, 1, 4) * turns).flatten(-2)
        queries, keys, values = turned.unbind(1)
        return queries, keys, values

    def _finish(self, block: TinyBlock, hidden: Tensor, attended: Tensor) -> Tensor:
        """The rest of a layer after attention."""
        hidden = hidden + functional.linear(attended, block.attention_out)
        inner = functional.linear(self._norm(hidden, block.hidden_norm), block.hidden_in)
        return hidden + functional.linear(functional.gelu(inner), block.hidden_out)

    def _predict(self, hidden: Tensor) -> Tensor:
        return functional.linear(self._norm(hidden, self.final_norm), self.embedding)

    def _norm(self, hidden: Tensor, gain: Tensor) -> Tensor:
        return functional.layer_norm(hidden, (self.shape.width,), gain, None, NORM_EPSILON)


def _attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Causal attention of whole rows: [rows, length, width]."""
    attended = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
    return attended.transpose(1, 2).flatten(2)


def _turns(shape: TinyShape) -> Tensor:
    """Rotations by position [length, 3, 1, head width / 2]: for queries, for keys, and none for values."""
    steps = torch.arange(0, shape.head_width, 2, dtype=torch.float32) / shape.head_width
    angles = torch.outer(torch.arange(shape.max_length, dtype=torch.float32), ROTARY_BASE**-steps)
    rotation = torch.polar(torch.ones_like(angles), angles)
    return torch.stack([rotation, rotation, torch.ones_like(rotation)], dim=1)[:, :, None]


# ---------------------------------------------------------------------- files


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
