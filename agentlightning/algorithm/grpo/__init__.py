"""GRPO: learning from groups of rollouts of one task, whose rewards are compared with each other.

Importing this package does not import torch; the modules that compute do, and are opened on first touch.
"""

from typing import TYPE_CHECKING

from agentlightning.algorithm.grpo.advantages import (
    AdvantageFunction,
    AdvantageKind,
    Advantages,
    ComparedReward,
    advantages,
)
from agentlightning.algorithm.grpo.batch_report import BatchReport
from agentlightning.algorithm.grpo.samples import Batch, Sample, batch_of
from agentlightning.algorithm.grpo.settings import LearnerSettings, LossFunction, SampleSettings
from agentlightning.algorithm.grpo.tasks import DifficultySampler, ShuffledTasks, TaskSampler
from agentlightning.utils.installation import resolve_with_extras

if TYPE_CHECKING:
    from agentlightning.algorithm.grpo.checkpoints import Checkpoint, Checkpoints
    from agentlightning.algorithm.grpo.grpo import GRPO
    from agentlightning.algorithm.grpo.learner import Learner
    from agentlightning.algorithm.grpo.objective import ChosenTokens, cispo_loss, clipped_loss
    from agentlightning.algorithm.grpo.packing import Row

__all__ = [
    "GRPO",
    "AdvantageFunction",
    "AdvantageKind",
    "Advantages",
    "Batch",
    "BatchReport",
    "Checkpoint",
    "Checkpoints",
    "ChosenTokens",
    "ComparedReward",
    "DifficultySampler",
    "Learner",
    "LearnerSettings",
    "LossFunction",
    "Row",
    "Sample",
    "SampleSettings",
    "ShuffledTasks",
    "TaskSampler",
    "advantages",
    "batch_of",
    "cispo_loss",
    "clipped_loss",
]

_HOME_OF = {
    "Checkpoint": "checkpoints",
    "Checkpoints": "checkpoints",
    "ChosenTokens": "objective",
    "GRPO": "grpo",
    "Learner": "learner",
    "Row": "packing",
    "cispo_loss": "objective",
    "clipped_loss": "objective",
}


def __getattr__(name: str) -> object:
    if name in _HOME_OF:
        return resolve_with_extras(f"{__name__}.{_HOME_OF[name]}:{name}", "train")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
