"""What is wrong with the arguments of a training, found before anything is started."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from agentlightning.algorithm.intervals import check_failed_reward
from agentlightning.engine.base import EngineChoice
from agentlightning.engine.checkpoint import check_replaceable
from agentlightning.errors import ConfigurationError

if TYPE_CHECKING:
    from agentlightning.algorithm.grpo.grpo import GRPO

__all__ = ["check_arguments", "check_output"]


def check_arguments(grpo: "GRPO", engine: EngineChoice, *, resume: bool) -> None:
    """ConfigurationError for values with which there would be nothing to learn, or no end."""
    if grpo.group_size < 2:
        raise ConfigurationError(
            f"A group is compared with itself, so group_size must be at least 2, not {grpo.group_size}."
        )
    for name, least in (("tasks_per_step", 1), ("steps", 1), ("save_every", 1)):
        if getattr(grpo, name) < least:
            raise ConfigurationError(f"{name} is {getattr(grpo, name)}; it must be at least {least}.")
    for name in ("max_staleness", "validate_every", "temperature", "validation_temperature"):
        if not getattr(grpo, name) >= 0:
            raise ConfigurationError(f"{name} is {getattr(grpo, name)}; it must not be negative.")
    if grpo.validation_tasks is not None and grpo.validation_tasks < 1:
        raise ConfigurationError(f"validation_tasks is {grpo.validation_tasks}; it must be at least 1, or None.")
    check_failed_reward("validation_failed", grpo.validation_failed)
    if resume and grpo.checkpoints is None:
        raise ConfigurationError("To resume, name the folder of the checkpoints.")
    if grpo.max_staleness and getattr(engine, "sleep", False):
        raise ConfigurationError(
            f"max_staleness is {grpo.max_staleness}, so rollouts are under way while the model learns, and an engine "
            "that sleeps meanwhile would answer none; set sleep=False or max_staleness=0."
        )
    address = getattr(engine, "address", None)
    if address is not None and grpo.lora is None and not isinstance(grpo.model, str) and len(grpo.model) > 1:
        raise ConfigurationError(
            f"The vLLM at '{address}' holds the weights of one model, and {len(grpo.model)} are to be trained; set "
            "engine='vllm', which starts one for each, or train adapters with lora=LoraOptions()."
        )


def check_output(output: Path, checkpoints: Path | None, folders: Sequence[Path]) -> None:
    """ConfigurationError for a folder that a model must not replace; at the end of a run that would be too late."""
    if checkpoints is not None and checkpoints.resolve().is_relative_to(output.resolve()):
        raise ConfigurationError(
            f"output '{output}' is replaced at the end, and the checkpoints '{checkpoints}' are in it; "
            "name another folder."
        )
    for folder in folders:
        check_replaceable(folder)
