"""VERL: training with the package verl, on GPUs.

Importing this package imports neither torch nor verl; the modules that make tensors are opened by verl's process.
"""

from agentlightning.algorithm.verl.interface import VERL
from agentlightning.algorithm.verl.launch import Configuration, VerlConfig, compose

__all__ = ["VERL", "Configuration", "VerlConfig", "compose"]
