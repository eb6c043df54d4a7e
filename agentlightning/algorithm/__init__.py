"""Algorithms: what learns from rollouts. Those that need torch or other packages are opened on first touch."""

from typing import TYPE_CHECKING

from agentlightning.algorithm.base import Algorithm
from agentlightning.algorithm.decorator import FunctionalAlgorithm, algo
from agentlightning.algorithm.fast import Baseline, FastAlgorithm
from agentlightning.utils.installation import resolve_with_extras

if TYPE_CHECKING:
    from agentlightning.algorithm.apo import APO
    from agentlightning.algorithm.gepa import GEPA
    from agentlightning.algorithm.grpo import GRPO
    from agentlightning.algorithm.grpo.distil import Distil
    from agentlightning.algorithm.prompts.budget import OptimisationBudget
    from agentlightning.algorithm.sft import SFT
    from agentlightning.algorithm.verl import VERL

__all__ = [
    "APO",
    "GEPA",
    "GRPO",
    "Distil",
    "SFT",
    "VERL",
    "Algorithm",
    "Baseline",
    "FastAlgorithm",
    "FunctionalAlgorithm",
    "OptimisationBudget",
    "algo",
]

_HOME_AND_EXTRA_OF = {
    "APO": ("prompts.apo", "apo"),
    "GEPA": ("prompts.gepa", "gepa"),
    "Distil": ("grpo.distil", "train"),
    "GRPO": ("grpo.grpo", "train"),
    "OptimisationBudget": ("prompts.budget", "apo"),
    "SFT": ("sft.sft", "train"),
    "VERL": ("verl.interface", "verl"),
}


def __getattr__(name: str) -> object:
    if name in _HOME_AND_EXTRA_OF:
        home, extra = _HOME_AND_EXTRA_OF[name]
        return resolve_with_extras(f"{__name__}.{home}:{name}", extra)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
