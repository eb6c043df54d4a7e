"""The prompts that an optimisation starts from."""

from agentlightning.errors import ConfigurationError
from agentlightning.types import NamedResources, PromptTemplate

__all__ = ["seed_prompts"]


def seed_prompts(resources: NamedResources | None, algorithm: str) -> dict[str, PromptTemplate]:
    """The prompts among the initial resources, which an algorithm starts from; ConfigurationError if there is none."""
    prompts = {name: one for name, one in (resources or {}).items() if isinstance(one, PromptTemplate)}
    if not prompts:
        raise ConfigurationError(
            f"{algorithm} starts from prompts, and among the initial resources {list(resources or ())} there is none; "
            "give the Trainer initial_resources with a PromptTemplate, or call set_initial_resources."
        )
    return prompts
