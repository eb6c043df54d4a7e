"""Door to the v0.1 trainer, which lives in `agentlightning.legacy`; new code uses `Trainer`.

Importing is silent: what is deprecated says so when it is used.
"""

from agentlightning.legacy.trainer import TrainerLegacy

__all__ = ["TrainerLegacy"]
