"""A runner with a store and a tracer, to run an agent once and look at what it left."""

from dataclasses import dataclass, field
from typing import Any

import psutil

from agentlightning.litagent import LitAgent
from agentlightning.runner import LitAgentRunner
from agentlightning.runner.attempt import AttemptRun
from agentlightning.store import InMemoryLightningStore, LightningStore
from agentlightning.tracer import OtelTracer
from agentlightning.types import Attempt, NamedResources, PromptTemplate, RolloutConfig, RolloutMode, Span

RESOURCES: NamedResources = {"prompt": PromptTemplate(template="Be brief.", engine="f-string")}


@dataclass
class Outcome:
    """What one rollout came to."""

    attempt: Attempt
    spans: list[Span]
    error: BaseException | None

    def span(self, name: str) -> Span:
        (found,) = [span for span in self.spans if span.name == name]
        return found

    def text(self, stream: str) -> str:
        return str(self.span(f"command.{stream}").attributes["agentlightning.command.text"])

    @property
    def reward(self) -> Any:
        rewards = [span.attributes["reward"] for span in self.spans if span.name == "agentlightning.reward"]
        return rewards[-1] if rewards else None

    @property
    def message(self) -> str:
        return str(self.error)


@dataclass
class Workbench:
    store: LightningStore = field(default_factory=InMemoryLightningStore)

    async def run(
        self,
        agent: LitAgent[Any],
        task: Any = "task",
        *,
        resources: NamedResources | None = None,
        mode: RolloutMode | None = None,
        config: RolloutConfig | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> Outcome:
        """Run an agent on one task; what it raises is in the outcome."""
        runner = LitAgentRunner[Any](OtelTracer(instrument=False), heartbeat_interval=0)
        update = await self.store.add_resources(resources or RESOURCES)
        rollout = await self.store.start_rollout(
            task, mode=mode, resources_id=update.resources_id, config=config, metadata=metadata
        )
        error: BaseException | None = None
        with runner.run_context(agent=agent, store=self.store):
            try:
                attempt_run = AttemptRun(runner, rollout)
                await attempt_run.run()
                error = attempt_run.error
            except Exception as caught:
                error = caught
        attempt = await self.store.get_latest_attempt(rollout.rollout_id)
        assert attempt is not None
        return Outcome(attempt, list(await self.store.query_spans(rollout.rollout_id)), error)


def is_alive(process_id: int) -> bool:
    try:
        return bool(psutil.Process(process_id).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
