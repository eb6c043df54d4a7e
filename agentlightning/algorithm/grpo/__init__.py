"""GRPO: learning from groups of rollouts of one task, whose rewards are compared with each other.

Importing this package does not import torch; the modules that compute do, and are opened on first touch.
"""

from typing import TYPE_CHECKING

from agentlightning.algorithm.grpo.advantages import AdvantageKind, Advantages, advantages
from agentlightning.algorithm.grpo.samples import Batch, BatchReport, RolloutOutcome, Sample, batch_of
from agentlightning.algorithm.grpo.settings import LearnerSettings, SampleSettings
from agentlightning.utils.installation import resolve_with_extras

if TYPE_CHECKING:
    from agentlightning.algorithm.grpo.checkpoints import Checkpoint, Checkpoints
    from agentlightning.algorithm.grpo.grpo import GRPO
    from agentlightning.algorithm.grpo.learner import Learner

__all__ = [
    "GRPO",
    "AdvantageKind",
    "Advantages",
    "Batch",
    "BatchReport",
    "Checkpoint",
    "Checkpoints",
    "Learner",
    "LearnerSettings",
    "RolloutOutcome",
    "Sample",
    "SampleSettings",
    "advantages",
    "batch_of",
]

_HOME_OF = {"Checkpoint": "checkpoints", "Checkpoints": "checkpoints", "GRPO": "grpo", "Learner": "learner"}


def __getattr__(name: str) -> object:
    if name in _HOME_OF:
        return resolve_with_extras(f"{__name__}.{_HOME_OF[name]}:{name}", "train")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
