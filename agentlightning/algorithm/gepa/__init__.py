"""GEPA: better prompts by reflective evolution, on the package of that name.

Importing this package does not import `gepa`, which is an extra; a run does.
"""

from agentlightning.algorithm.apo.budget import OptimisationBudget
from agentlightning.algorithm.apo.gain import Challenge
from agentlightning.algorithm.apo.lineage import Candidate, Lineage
from agentlightning.algorithm.apo.report import OptimisationResult
from agentlightning.algorithm.gepa.gepa import GEPA
from agentlightning.algorithm.gepa.reflection import ReflectionModel

__all__ = [
    "GEPA",
    "Candidate",
    "Challenge",
    "Lineage",
    "OptimisationBudget",
    "OptimisationResult",
    "ReflectionModel",
]
