"""The trainer: it builds the parts, has them placed, and runs the loop."""

from agentlightning.trainer.init_utils import build_component
from agentlightning.trainer.trainer import Trainer

__all__ = ["Trainer", "build_component"]
