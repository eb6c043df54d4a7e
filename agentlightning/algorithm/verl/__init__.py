"""VERL: training with the package verl, on GPUs.

Importing this package imports neither torch nor verl; the modules that make tensors are opened by verl's process.
"""

from agentlightning.algorithm.verl.config import Configuration, VerlConfig, compose
from agentlightning.algorithm.verl.interface import VERL

__all__ = ["VERL", "Configuration", "VerlConfig", "compose"]
