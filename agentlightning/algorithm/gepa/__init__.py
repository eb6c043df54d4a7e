"""GEPA: better prompts by reflective evolution, on the package of that name.

Importing this package does not import `gepa`, which is an extra; a run does.
"""

from agentlightning.algorithm.prompts.budget import OptimisationBudget
from agentlightning.algorithm.prompts.gepa import GEPA
from agentlightning.algorithm.prompts.model import ReflectionModel
from agentlightning.algorithm.prompts.results import Candidate, Challenge, Lineage, OptimisationResult

__all__ = [
    "GEPA",
    "Candidate",
    "Challenge",
    "Lineage",
    "OptimisationBudget",
    "OptimisationResult",
    "ReflectionModel",
]
