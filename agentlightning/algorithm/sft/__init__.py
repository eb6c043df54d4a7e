"""SFT: a model learns to say again what it, or another, said in rollouts that went well.

Importing this package does not import torch; the modules that compute do, and are opened on first touch.
"""

import pkgutil
from typing import TYPE_CHECKING

from agentlightning.algorithm.sft.examples import Acceptance, RecordedRollouts, Rejected
from agentlightning.algorithm.sft.settings import FittingSettings

if TYPE_CHECKING:
    from agentlightning.algorithm.sft.sft import SFT

__all__ = ["Acceptance", "FittingSettings", "RecordedRollouts", "Rejected", "SFT"]


def __getattr__(name: str) -> object:
    if name == "SFT":
        return pkgutil.resolve_name(f"{__name__}.sft:{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
