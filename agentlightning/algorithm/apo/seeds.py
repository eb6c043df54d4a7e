"""The prompts that an optimisation starts from."""

from collections.abc import Mapping
from typing import Any

from agentlightning.env_var import LightningEnvVar, resolve_bool_env_var
from agentlightning.errors import ConfigurationError
from agentlightning.types import NamedResources, PromptTemplate

__all__ = ["check_candidates_are_allowed", "seed_prompts"]


def seed_prompts(resources: NamedResources | None, algorithm: str) -> dict[str, PromptTemplate]:
    """The prompts among the initial resources, which an algorithm starts from; ConfigurationError if there is none."""
    prompts = {name: one for name, one in (resources or {}).items() if isinstance(one, PromptTemplate)}
    if not prompts:
        raise ConfigurationError(
            f"{algorithm} starts from prompts, and among the initial resources {list(resources or ())} there is none; "
            "give the Trainer initial_resources with a PromptTemplate, or call set_initial_resources."
        )
    return prompts


def check_candidates_are_allowed(prompts: Mapping[str, PromptTemplate], trainer: Any) -> None:
    """ConfigurationError if the runners of a trainer would refuse candidates, which come out of the store."""
    if trainer.allow_poml or resolve_bool_env_var(LightningEnvVar.AGL_ALLOW_POML, fallback=False):
        return
    for name, prompt in prompts.items():
        if prompt.engine == "poml":
            raise ConfigurationError(
                f"Prompt '{name}' is a POML template, and runners format no POML that comes out of the store, as all "
                "candidates do; say Trainer(allow_poml=True) if the optimiser's model may write code for them."
            )
