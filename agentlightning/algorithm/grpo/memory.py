"""How much memory learning takes on a GPU, worked out before anything is loaded.

The weights, their gradients and the optimiser's moments follow from the number of parameters; activations from the
shape of a layer, what its backward pass keeps of each token, and the tokens that go through the model together. They
are those of layers as Llama, Qwen and Mistral have them; others differ by some tenths. A model is looked at without
its weights, on torch's device "meta".
"""

import importlib
import importlib.util
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from agentlightning.algorithm.grpo.choices import CHUNK_BYTES
from agentlightning.algorithm.grpo.optimiser import SMALLEST_QUANTISED
from agentlightning.algorithm.grpo.settings import LearnerSettings
from agentlightning.engine.lora import LoraOptions
from agentlightning.errors import ConfigurationError

__all__ = ["LayerShape", "MemoryNeed", "check_memory", "engine_bytes", "memory_need", "remedies"]

logger = logging.getLogger(__name__)

GIGABYTE: Final = 1_000_000_000
CONTEXT_BYTES: Final = GIGABYTE
"""What CUDA, its libraries and gaps between tensors take."""
ENGINE_TOKENS: Final = 1024
"""Tokens of a sequence for which the engine's cache is counted."""
TOLERANCE: Final = 1.1
"""A need beyond the free memory times this is an error; up to it, the estimate may be wrong."""
_BACKWARD_LAYERS: Final = 0.5
"""What gradients of a layer's activations take while they are computed, of what the layer keeps."""


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes of GPU memory, by what they are for."""

    parts: Mapping[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {count / GIGABYTE:.1f}" for name, count in self.parts.items() if count)
        return f"{self.total / GIGABYTE:.1f} GB of GPU memory ({parts})"


@dataclass(frozen=True)
class LayerShape:
    """The sizes of a decoder's layers."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    queries: int
    """Width of all queries of a token."""
    keys: int
    """Width of all its keys, and of all its values."""

    @classmethod
    def of(cls, config: Any) -> "LayerShape":
        config = config.get_text_config()
        hidden, heads = config.hidden_size, config.num_attention_heads
        head_width = getattr(config, "head_dim", None) or hidden // heads
        return cls(
            layers=config.num_hidden_layers,
            hidden=hidden,
            intermediate=getattr(config, "intermediate_size", None) or 4 * hidden,
            heads=heads,
            queries=heads * head_width,
            keys=(getattr(config, "num_key_value_heads", None) or heads) * head_width,
        )

    def kept_bytes(self, *, computed: int, stream: int, has_adapters: bool) -> int:
        """What a layer keeps of one token for its backward pass.

        Args:
            computed: Bytes of a number that products give.
            stream: Bytes of a number of what goes from layer to layer.
            has_adapters: Whether they alone are trained; each has a copy of its input in 32 bits.
        """
        norms = 2 * 4 * self.hidden + (0 if has_adapters else 2 * stream * self.hidden)
        attention = computed * (2 * self.queries + 2 * self.keys) + 4 * self.heads
        inner = 3 * computed * self.intermediate
        if has_adapters:
            inputs = 4 * (5 * self.hidden + self.queries + self.intermediate)
        else:
            inputs = computed * (2 * self.hidden + self.queries + self.intermediate)
        return norms + attention + inner + inputs


def memory_need(
    network: Any, settings: LearnerSettings, *, lora: LoraOptions | None = None, engine: float = 0
) -> MemoryNeed:
    """What a learner of this model takes at `max_batch_tokens`, on a GPU.

    Args:
        network: Of transformers, without adapters; it may be on the device "meta".
        settings: How it learns.
        lora: The adapters that are trained instead of its weights.
        engine: Bytes that its engine takes on the same card.
    """
    sizes = [(weight.numel(), weight.element_size()) for weight in network.parameters()]
    trained = [count for count, _ in sizes] if lora is None else _adapter_sizes(network, lora)
    weights = sum(count * size for count, size in sizes) + (0 if lora is None else 4 * sum(trained))
    stream = sizes[0][1]
    computed = 2 if settings.precision == "bf16" else stream
    return MemoryNeed(
        {
            "weights": weights,
            "gradients": 4 * sum(trained),
            "moments": sum(_moment_bytes(count, settings) for count in trained),
            "reference": 4 * sum(trained) if settings.kl_coefficient > 0 else 0,
            "activations": _activation_bytes(network, settings, computed, stream, has_adapters=lora is not None),
            "logits": min(CHUNK_BYTES, 6 * settings.max_batch_tokens * network.config.get_text_config().vocab_size)
            + _head_bytes(network, computed, stream, is_trained=lora is None),
            "engine": engine,
            "CUDA": CONTEXT_BYTES,
        }
    )


def engine_bytes(network: Any, max_sequences: int) -> float:
    """What the embedded engine takes of a card: weights in 16 bits, and the cache of sequences of usual length."""
    shape = LayerShape.of(network.config)
    cache = max_sequences * ENGINE_TOKENS * shape.layers * 2 * shape.keys
    return 2.0 * (_parameters(network) + cache)


def remedies(settings: LearnerSettings, *, has_adapters: bool, is_checkpointed: bool) -> str:
    """What of these settings to change where memory is short, in words."""
    found = [f"a max_batch_tokens below {settings.max_batch_tokens}"]
    if not is_checkpointed:
        found.append("gradient_checkpointing=True")
    if settings.precision == "full":
        found.append('precision="bf16"')
    if not has_adapters:
        if settings.optimiser != "adamw8bit":
            found.append('optimiser="adamw8bit"')
        found.append("adapters instead of all weights (lora=LoraOptions())")
    return f"{', '.join(found[:-1])} or {found[-1]}" if len(found) > 1 else found[0]


def check_memory(
    source: str,
    settings: LearnerSettings,
    *,
    device: str,
    lora: LoraOptions | None,
    engine_sequences: int | None,
) -> None:
    """Log what learning will take on a GPU; ConfigurationError if that is clearly more than is free.

    Args:
        source: As `engine.loading.load` takes it; nothing is worked out for other than folders of Hugging Face models.
        settings: How it learns.
        device: As `engine.loading.load` takes it.
        lora: As there.
        engine_sequences: Sequences of an engine that will be started on the same card; None if there will be none.
    """
    folder = Path(source).expanduser()
    is_on_gpu = torch.cuda.is_available() and device.startswith(("auto", "cuda"))
    if not is_on_gpu or not (folder / "config.json").is_file() or importlib.util.find_spec("transformers") is None:
        return
    network = _outline(folder, torch.float32 if lora is None else torch.bfloat16)
    engine = 0 if engine_sequences is None else engine_bytes(network, engine_sequences)
    free, _ = torch.cuda.mem_get_info(None if device == "auto" else device)
    compare(memory_need(network, settings, lora=lora, engine=engine), free, settings, has_adapters=lora is not None)


def compare(need: MemoryNeed, free: int, settings: LearnerSettings, *, has_adapters: bool) -> None:
    """Log the need beside the free bytes; ConfigurationError if it is clearly more."""
    told = f"Learning needs about {need} at {settings.max_batch_tokens:,} tokens; {free / GIGABYTE:.1f} GB are free"
    if need.total > TOLERANCE * free:
        is_checkpointed = settings.gradient_checkpointing is not False
        ways = remedies(settings, has_adapters=has_adapters, is_checkpointed=is_checkpointed)
        raise ConfigurationError(f"{told}. Give {ways}, or a larger GPU.")
    logger.info("%s.", told)


def _outline(folder: Path, dtype: torch.dtype) -> Any:
    """The model of a folder without its weights."""
    transformers: Any = importlib.import_module("transformers")
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)


def _parameters(network: Any) -> int:
    return sum(weight.numel() for weight in network.parameters())


def _adapter_sizes(network: Any, lora: LoraOptions) -> list[int]:
    """Numbers of each adapter; those of "all-linear" leave out the head, as peft does."""
    head = network.get_output_embeddings()
    names = None if lora.targets == "all-linear" else (lora.targets,) if isinstance(lora.targets, str) else lora.targets
    return [
        lora.rank * width
        for name, module in network.named_modules()
        if isinstance(module, nn.Linear) and (module is not head if names is None else name.endswith(names))
        for width in (module.in_features, module.out_features)
    ]


def _moment_bytes(count: int, settings: LearnerSettings) -> float:
    if settings.optimiser == "adamw8bit" and count >= SMALLEST_QUANTISED:
        return 2 * count * (1 + 4 / 256)
    return 8 * count


def _activation_bytes(
    network: Any, settings: LearnerSettings, computed: int, stream: int, *, has_adapters: bool
) -> float:
    shape = LayerShape.of(network.config)
    layer = shape.kept_bytes(computed=computed, stream=stream, has_adapters=has_adapters)
    is_checkpointed = settings.gradient_checkpointing is not False and network.supports_gradient_checkpointing
    inputs = stream * shape.hidden
    kept = shape.layers * (inputs if is_checkpointed else layer) + (layer if is_checkpointed else 0)
    tokens = settings.max_batch_tokens * (kept + _BACKWARD_LAYERS * layer + 3 * inputs)
    if is_checkpointed or computed == stream:
        return tokens
    return tokens + computed * _parameters(network)  # weights in 16 bits are kept too


def _head_bytes(network: Any, computed: int, stream: int, *, is_trained: bool) -> int:
    """Its copy in the dtype of products, and its gradient before that is added to the others."""
    head = network.get_output_embeddings()
    count = 0 if head is None else head.weight.numel()
    copies = (computed if computed != stream else 0) * (2 if is_trained else 1)
    return count * (copies + (4 if is_trained else 0))
