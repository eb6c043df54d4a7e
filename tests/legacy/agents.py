"""Agents of every release, which all do the same: full marks for a greeting that names whom it greets."""

from typing import Any

from agentlightning.litagent import LitAgent
from agentlightning.types import NamedResources, PromptTemplate, RolloutLegacy


class Greeting(LitAgent[Any]):
    def __init__(self) -> None:
        self.rollout_ids: list[str] = []

    def greet(self, task: Any, resources: NamedResources, rollout_id: str) -> float:
        self.rollout_ids.append(rollout_id)
        prompt = resources["prompt"]
        assert isinstance(prompt, PromptTemplate)
        return 1.0 if task["name"] in prompt.format(**task) else 0.0


class FirstRelease(Greeting):
    """Written for v0.1: the id of the rollout comes by name, and there is no method for validation."""

    def training_rollout(self, task: Any, rollout_id: str, resources: NamedResources) -> float:  # type: ignore[override]
        return self.greet(task, resources, rollout_id)


class FirstReleaseAsync(Greeting):
    async def training_rollout_async(  # type: ignore[override]
        self, task: Any, rollout_id: str, resources: NamedResources
    ) -> float:
        return self.greet(task, resources, rollout_id)


class Newer(Greeting):
    def rollout(self, task: Any, resources: NamedResources, rollout: RolloutLegacy) -> float:  # type: ignore[override]
        return self.greet(task, resources, rollout.rollout_id)


class NewerAsync(Greeting):
    async def rollout_async(  # type: ignore[override]
        self, task: Any, resources: NamedResources, rollout: RolloutLegacy
    ) -> float:
        return self.greet(task, resources, rollout.rollout_id)


class PlainlyNamedAsync(Greeting):
    async def rollout(  # type: ignore[override]
        self, task: Any, resources: NamedResources, rollout: RolloutLegacy
    ) -> float:
        return self.greet(task, resources, rollout.rollout_id)


EVERY_RELEASE = [FirstRelease, FirstReleaseAsync, Newer, NewerAsync, PlainlyNamedAsync]
