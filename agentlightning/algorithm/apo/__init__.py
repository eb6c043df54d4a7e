"""APO: a better prompt, found by a beam search whose steps are critiques in plain language.

The algorithm itself, in `algorithm.prompts`, is opened on first touch.
"""

import pkgutil
from typing import TYPE_CHECKING

from agentlightning.algorithm.prompts.budget import OptimisationBudget
from agentlightning.algorithm.prompts.results import Candidate, Challenge, Lineage, OptimisationResult

if TYPE_CHECKING:
    from agentlightning.algorithm.apo.apo import APO, RolloutResultForAPO, VersionedPromptTemplate

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

_IN_APO = ("APO", "RolloutResultForAPO", "VersionedPromptTemplate")


def __getattr__(name: str) -> object:
    if name in _IN_APO:
        return pkgutil.resolve_name(f"{__name__}.apo:{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
