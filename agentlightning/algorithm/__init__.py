"""Algorithms: what turns rewards into better resources."""

from agentlightning.algorithm.base import Algorithm
from agentlightning.algorithm.decorator import FunctionalAlgorithm, algo
from agentlightning.algorithm.fast import Baseline, FastAlgorithm

__all__ = ["Algorithm", "Baseline", "FastAlgorithm", "FunctionalAlgorithm", "algo"]
