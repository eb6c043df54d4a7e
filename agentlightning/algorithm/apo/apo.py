"""The public path of APO, its steps and its prompt files."""

import random

from agentlightning.algorithm.prompts import poml
from agentlightning.algorithm.prompts.apo import APO
from agentlightning.algorithm.prompts.poml import APPLY_EDIT_PROMPT_FILES, GRADIENT_PROMPT_FILES
from agentlightning.algorithm.prompts.results import RolloutResultForAPO, VersionedPromptTemplate
from agentlightning.algorithm.utils import batch_iter_over_dataset

__all__ = [
    "APO",
    "APPLY_EDIT_PROMPT_FILES",
    "GRADIENT_PROMPT_FILES",
    "RolloutResultForAPO",
    "VersionedPromptTemplate",
    "batch_iter_over_dataset",
    "poml",
    "random",
]
