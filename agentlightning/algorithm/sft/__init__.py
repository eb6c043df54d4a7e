"""SFT: a model learns to say again what it, or another, said in rollouts that went well.

Importing this package does not import torch; the modules that compute do, and are opened on first touch.
"""

from typing import TYPE_CHECKING

from agentlightning.algorithm.sft.examples import Acceptance, FittingSettings, RecordedRollouts, Rejected
from agentlightning.utils.installation import resolve_with_extras

if TYPE_CHECKING:
    from agentlightning.algorithm.sft.sft import SFT

__all__ = ["SFT", "Acceptance", "FittingSettings", "RecordedRollouts", "Rejected"]


def __getattr__(name: str) -> object:
    if name == "SFT":
        return resolve_with_extras(f"{__name__}.sft:{name}", "train")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
