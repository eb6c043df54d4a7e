"""Prompts under a version, and what their rollouts gave."""

from dataclasses import dataclass, field
from typing import Any

from typing_extensions import TypedDict

from agentlightning.types import PromptTemplate, RolloutStatus

__all__ = ["RolloutResultForAPO", "VersionedPromptTemplate", "remembered"]


class RolloutResultForAPO(TypedDict):
    """What a rollout shows to the critic."""

    status: RolloutStatus
    final_reward: float | None
    spans: list[dict[str, Any]]
    messages: list[Any]


def remembered(reward: float | None) -> RolloutResultForAPO:
    """The result of a rollout of which only the reward is kept; None if it was not finished in time."""
    status: RolloutStatus = "cancelled" if reward is None else "succeeded"
    return {"status": status, "final_reward": reward, "spans": [], "messages": []}


@dataclass
class VersionedPromptTemplate:
    """A candidate: a prompt, and the other prompts of its set where there are several."""

    version: str
    prompt_template: PromptTemplate
    score: float | None = None
    """Mean reward on the last batch it was tried on."""
    resource_name: str | None = None
    """Of the prompt; None stands for the only one."""
    companions: dict[str, PromptTemplate] = field(default_factory=dict)
    """The other prompts, by name."""
    parent: str | None = None
    critique: str | None = None

    def prompts(self, resource_name: str) -> dict[str, PromptTemplate]:
        """All prompts of the set by name; `resource_name` is that of the only one."""
        return {**self.companions, self.resource_name or resource_name: self.prompt_template}

    def turned_to(self, resource_name: str) -> "VersionedPromptTemplate":
        """The same set, with another of its prompts in front."""
        if self.resource_name is None or self.resource_name == resource_name:
            return self
        prompts = self.prompts(resource_name)
        front = prompts.pop(resource_name)
        return VersionedPromptTemplate(
            self.version, front, self.score, resource_name=resource_name, companions=prompts, parent=self.parent
        )
