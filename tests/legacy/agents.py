"""Agents of every release, which all do the same: full marks for a greeting that names whom it greets."""

from typing import Any

from agentlightning.litagent import LitAgent
from agentlightning.types import NamedResources, PromptTemplate, RolloutLegacy


def greeting(task: Any, resources: NamedResources) -> float:
    prompt = resources["prompt"]
    assert isinstance(prompt, PromptTemplate)
    return 1.0 if task["name"] in prompt.format(**task) else 0.0


class FirstRelease(LitAgent[Any]):
    """Written for v0.1: the id of the rollout comes by name, and there is no method for validation."""

    def __init__(self) -> None:
        self.rollout_ids: list[str] = []

    def training_rollout(self, task: Any, rollout_id: str, resources: NamedResources) -> float:  # type: ignore[override]
        self.rollout_ids.append(rollout_id)
        return greeting(task, resources)


class FirstReleaseAsync(LitAgent[Any]):
    def __init__(self) -> None:
        self.rollout_ids: list[str] = []

    async def training_rollout_async(  # type: ignore[override]
        self, task: Any, rollout_id: str, resources: NamedResources
    ) -> float:
        self.rollout_ids.append(rollout_id)
        return greeting(task, resources)


class Newer(LitAgent[Any]):
    def __init__(self) -> None:
        self.rollout_ids: list[str] = []

    def rollout(self, task: Any, resources: NamedResources, rollout: RolloutLegacy) -> float:  # type: ignore[override]
        self.rollout_ids.append(rollout.rollout_id)
        return greeting(task, resources)


class NewerAsync(LitAgent[Any]):
    def __init__(self) -> None:
        self.rollout_ids: list[str] = []

    async def rollout_async(  # type: ignore[override]
        self, task: Any, resources: NamedResources, rollout: RolloutLegacy
    ) -> float:
        self.rollout_ids.append(rollout.rollout_id)
        return greeting(task, resources)


class PlainlyNamedAsync(LitAgent[Any]):
    def __init__(self) -> None:
        self.rollout_ids: list[str] = []

    async def rollout(  # type: ignore[override]
        self, task: Any, resources: NamedResources, rollout: RolloutLegacy
    ) -> float:
        self.rollout_ids.append(rollout.rollout_id)
        return greeting(task, resources)


EVERY_RELEASE = [FirstRelease, FirstReleaseAsync, Newer, NewerAsync, PlainlyNamedAsync]
