"""Public path of the legacy trainer, which lives in `agentlightning.legacy`; new code uses `Trainer`.

Importing is silent: what is deprecated says so when it is used.
"""

from agentlightning.legacy.trainer import TrainerLegacy

__all__ = ["TrainerLegacy"]
