"""APO: a better prompt, found by a beam search whose steps are critiques in plain language."""

from agentlightning.algorithm.apo.apo import APO, RolloutResultForAPO, VersionedPromptTemplate
from agentlightning.algorithm.prompts.budget import OptimisationBudget
from agentlightning.algorithm.prompts.results import Candidate, Challenge, Lineage, OptimisationResult

__all__ = [
    "APO",
    "Candidate",
    "Challenge",
    "Lineage",
    "OptimisationBudget",
    "OptimisationResult",
    "RolloutResultForAPO",
    "VersionedPromptTemplate",
]
