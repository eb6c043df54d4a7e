"""VERL: training with the package verl, on GPUs.

Importing this package imports neither torch nor verl; the module that makes tensors is opened on first touch.
"""

import pkgutil
from typing import TYPE_CHECKING

from agentlightning.algorithm.verl.config import Configuration, VerlConfig, compose
from agentlightning.algorithm.verl.interface import VERL
from agentlightning.algorithm.verl.rows import Level, TracedRollout

if TYPE_CHECKING:
    from agentlightning.algorithm.verl.batch import BatchSettings, VerlBatch, batch_of

__all__ = [
    "VERL",
    "BatchSettings",
    "Configuration",
    "Level",
    "TracedRollout",
    "VerlBatch",
    "VerlConfig",
    "batch_of",
    "compose",
]

_IN_BATCH = ("BatchSettings", "VerlBatch", "batch_of")


def __getattr__(name: str) -> object:
    if name in _IN_BATCH:
        return pkgutil.resolve_name(f"{__name__}.batch:{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
