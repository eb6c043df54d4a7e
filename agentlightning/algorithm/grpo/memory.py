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

from agentlightning.algorithm.grpo.optimiser import SMALLEST_QUANTISED
from agentlightning.algorithm.grpo.settings import LearnerSettings
from agentlightning.algorithm.grpo.token_logprobs import CHUNK_BYTES
from agentlightning.engine.lora import LoraOptions
from agentlightning.errors import ConfigurationError
from agentlightning.utils.announcements import announce

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


def memory_need(
    network: Any, settings: LearnerSettings, *, lora: LoraOptions | None = None, engine_sequences: int | None = None
) -> MemoryNeed:
    """What a learner of this model takes at `max_batch_tokens`, on a GPU.

    Args:
        network: Of transformers, without adapters; it may be on the device "meta".
        settings: How it learns.
        lora: The adapters that are trained instead of its weights.
        engine_sequences: Sequences of an embedded engine on the same card; None if there is none.
    """
    config = network.config.get_text_config()
    sizes = [weight.numel() for weight in network.parameters()]
    trained = sizes if lora is None else _adapter_sizes(network, lora)
    stream = next(network.parameters()).element_size()
    computed = 2 if settings.precision == "bf16" else stream
    activations = _activation_bytes(network, settings, computed, stream, has_adapters=lora is not None)
    # Of the head: a copy in the dtype of products, and its gradient in that dtype and in 32 bits.
    head_copies = 0 if computed == stream else computed * (1 if lora else 2)
    head = config.vocab_size * config.hidden_size * (head_copies + (0 if lora else 4))
    engine = 0 if engine_sequences is None else sum(sizes) + _cache_numbers(config) * engine_sequences * ENGINE_TOKENS
    in_8_bits = settings.optimiser == "adamw8bit"
    moments = [2 * n * (1 + 4 / 256) if in_8_bits and n >= SMALLEST_QUANTISED else 8 * n for n in trained]
    shares = settings.processes
    # Each process has the embeddings and the head whole while it computes, and their gradients.
    gathered = 0 if shares == 1 else 2 * config.vocab_size * config.hidden_size * (stream + (0 if lora else 4))
    return MemoryNeed(
        {
            "weights": (sum(sizes) * stream + (4 * sum(trained) if lora else 0)) / shares,
            "gathered": gathered,
            "gradients": 4 * sum(trained) / shares,
            "moments": sum(moments) / shares,
            "reference": 4 * sum(trained) / shares if settings.kl_coefficient > 0 else 0,
            "activations": activations,
            "logits": min(CHUNK_BYTES, 6 * settings.max_batch_tokens * config.vocab_size) + head,
            "engine": 2 * engine,
            "CUDA": CONTEXT_BYTES,
        }
    )


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
        source: As `engine.checkpoint.load` takes it; only folders of Hugging Face models are estimated.
        settings: How it learns.
        device: As `engine.checkpoint.load` takes it.
        lora: As there.
        engine_sequences: Sequences of an engine that will be started on the same card; None if there will be none.
    """
    folder = Path(source).expanduser()
    is_on_gpu = torch.cuda.is_available() and device.startswith(("auto", "cuda"))
    if not is_on_gpu or not (folder / "config.json").is_file() or importlib.util.find_spec("transformers") is None:
        return
    transformers: Any = importlib.import_module("transformers")
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        with torch.device("meta"):
            dtype = torch.float32 if lora is None else torch.bfloat16
            network = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
        need = memory_need(network, settings, lora=lora, engine_sequences=engine_sequences)
    except (AttributeError, ImportError, KeyError, OSError, TypeError, ValueError) as error:
        # Loading the model says so if it cannot be loaded; if it has layers of another kind, it can be trained.
        logger.info("How much memory learning needs is not known for '%s': %s", source, error)
        return
    free, _ = torch.cuda.mem_get_info(None if device == "auto" else device)
    summary = f"Learning needs about {need} at {settings.max_batch_tokens:,} tokens; {free / GIGABYTE:.1f} GB are free"
    if need.total > TOLERANCE * free:
        is_checkpointed = settings.gradient_checkpointing is not False
        ways = remedies(settings, has_adapters=lora is not None, is_checkpointed=is_checkpointed)
        raise ConfigurationError(f"{summary}. Give {ways}, or a larger GPU.")
    announce(logger, f"{summary}.")


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


def _activation_bytes(
    network: Any, settings: LearnerSettings, computed: int, stream: int, *, has_adapters: bool
) -> float:
    """What the backward pass needs of all tokens.

    Args:
        network: Of transformers.
        settings: How it learns.
        computed: Bytes of a number that products give.
        stream: Bytes of a number of what goes from layer to layer.
        has_adapters: Whether they alone are trained; each has a copy of its input in 32 bits.
    """
    config = network.config.get_text_config()
    layers, hidden, heads = config.num_hidden_layers, config.hidden_size, config.num_attention_heads
    intermediate = getattr(config, "intermediate_size", None) or 4 * hidden
    queries, keys = heads * _head_width(config), _cache_numbers(config) // layers // 2
    norms = 2 * hidden * (4 if has_adapters else 4 + stream)
    attention = computed * (2 * queries + 2 * keys) + 4 * heads
    if has_adapters:
        inputs = 4 * (5 * hidden + queries + intermediate)
    else:
        inputs = computed * (2 * hidden + queries + intermediate)
    layer = norms + attention + inputs + 3 * computed * intermediate
    is_checkpointed = settings.gradient_checkpointing is not False and network.supports_gradient_checkpointing
    kept = layers * stream * hidden + layer if is_checkpointed else layers * layer
    tokens: float = settings.max_batch_tokens * (kept + _BACKWARD_LAYERS * layer + 3 * stream * hidden)
    if not is_checkpointed and computed != stream:
        tokens += computed * sum(weight.numel() for weight in network.parameters())  # weights in 16 bits are kept too
    return tokens


def _head_width(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _cache_numbers(config: Any) -> int:
    """Keys and values of one token in all layers."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return int(config.num_hidden_layers * 2 * heads * _head_width(config))
