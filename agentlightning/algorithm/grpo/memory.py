"""What the free memory of a GPU decides: how many tokens go through the model together, and whether layers keep theirs.

Fewer and larger packs start fewer kernels, and layers that keep their activations are computed once, not twice. So
both are used up to half of what is free when learning begins: the rest is for the engine's cache, which grows while it
samples, and for what the estimate of activations does not know.
"""

import logging
from dataclasses import replace
from typing import Final

import torch

from agentlightning.algorithm.grpo.settings import LearnerSettings
from agentlightning.algorithm.grpo.token_logprobs import CHUNK_BYTES
from agentlightning.engine.hf import HfModel
from agentlightning.engine.model import CausalModel
from agentlightning.utils.announcements import announce

logger = logging.getLogger(__name__)

SMALL_BATCH: Final = 4096
"""Tokens that go together on a CPU; where so many fit, layers are not computed again."""
LARGE_BATCH: Final = 32_768
"""Tokens beyond which packs are no faster; the fastest that was measured."""


def planned(settings: LearnerSettings, model: CausalModel, device: torch.device) -> LearnerSettings:
    """Decide what the settings leave open by the memory that is free on the device, and say what learning needs.

    Args:
        model: On another device, its weights will be on this one too.
    """
    tokens, is_checkpointed = settings.max_batch_tokens, settings.gradient_checkpointing
    if device.type != "cuda" or not isinstance(model, HfModel):
        return replace(settings, max_batch_tokens=tokens or SMALL_BATCH, gradient_checkpointing=bool(is_checkpointed))
    trained = sum(weight.numel() for weight in model.trainable().values()) / settings.processes
    needs = {"gradients": 4 * trained, "moments": (2 if settings.optimiser == "adamw8bit" else 8) * trained}
    if model.device.type != device.type:
        needs["weights"] = sum(weight.nbytes for weight in model.network.parameters()) / settings.processes
    free = torch.cuda.mem_get_info(device)[0]
    room = max(0.0, free - sum(needs.values()) - CHUNK_BYTES) / 2
    fitting = {kept: int(room / (4 * model.numbers_kept(is_checkpointed=not kept))) for kept in (True, False)}
    if is_checkpointed is None:
        is_checkpointed = fitting[True] < (tokens or SMALL_BATCH) and model.network.supports_gradient_checkpointing
    if tokens is None:
        tokens = max(SMALL_BATCH, 1 << min(LARGE_BATCH, max(1, fitting[not is_checkpointed])).bit_length() - 1)
    decided = replace(settings, max_batch_tokens=tokens, gradient_checkpointing=is_checkpointed)
    needs["activations"] = 4 * tokens * model.numbers_kept(is_checkpointed=is_checkpointed) + CHUNK_BYTES
    parts = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in needs.items())
    summary = (
        f"Learning needs about {sum(needs.values()) / 1e9:.1f} GB of GPU memory beside what is loaded ({parts}) at "
        f"{tokens:,} tokens together {'with' if is_checkpointed else 'without'} gradient checkpointing"
    )
    if sum(needs.values()) <= free:
        announce(logger, f"{summary}; {free / 1e9:.1f} GB are free.")
    else:
        ways = remedies(decided, has_adapters=model.has_adapters)
        logger.warning("%s; only %.1f GB are free. If that does not suffice, give %s.", summary, free / 1e9, ways)
    return decided


def remedies(settings: LearnerSettings, *, has_adapters: bool) -> str:
    """The settings to change where memory is short, in words."""
    ways = {
        f"a max_batch_tokens below {settings.max_batch_tokens}": True,
        "gradient_checkpointing=True": not settings.gradient_checkpointing,
        'precision="bf16"': settings.precision == "full",
        'optimiser="adamw8bit"': not has_adapters and settings.optimiser != "adamw8bit" and settings.processes == 1,
        "adapters instead of all weights (lora=LoraOptions())": not has_adapters,
    }
    return " or ".join(way for way, is_open in ways.items() if is_open)
