"""How the tests of runners work off a queue: a store with resources, a runner, and rollouts that are looked at."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from agentlightning.litagent import LitAgent
from agentlightning.runner import LitAgentRunner
from agentlightning.store import InMemoryLightningStore, LightningStore
from agentlightning.tracer import OtelTracer, Tracer
from agentlightning.types import (
    Attempt,
    Hook,
    NamedResources,
    PromptTemplate,
    Rollout,
    RolloutConfig,
    RolloutMode,
    RolloutRawResult,
)

PATIENCE_SECONDS = 30.0
"""How long a test waits for what must come, on a machine that does other things too."""
RESOURCES: NamedResources = {"prompt": PromptTemplate(template="Do {task}.", engine="f-string")}


class Answering(LitAgent[Any]):
    """A plain agent that does what it is given as a function of its task."""

    def __init__(self, answer: Callable[[Any], Any]) -> None:
        super().__init__()
        self._answer = answer

    def rollout(self, task: Any, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        result: RolloutRawResult = self._answer(task)
        return result


class Awaiting(LitAgent[Any]):
    """As `Answering`, as a coroutine."""

    def __init__(self, answer: Callable[[Any], Awaitable[Any]]) -> None:
        super().__init__()
        self._answer = answer

    async def rollout_async(self, task: Any, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        result: RolloutRawResult = await self._answer(task)
        return result


@dataclass
class Worked:
    """What a runner left in the store."""

    store: LightningStore
    rollout_ids: list[str]

    async def rollout(self, number: int = 0) -> Rollout:
        rollout = await self.store.get_rollout_by_id(self.rollout_ids[number])
        assert rollout is not None
        return rollout

    async def attempt(self, number: int = 0) -> Attempt:
        """The latest attempt of a rollout."""
        attempt = await self.store.get_latest_attempt(self.rollout_ids[number])
        assert attempt is not None
        return attempt

    async def error(self, number: int = 0) -> dict[str, Any]:
        """What the latest attempt says of its failure."""
        attempt = await self.attempt(number)
        error: dict[str, Any] = (attempt.metadata or {})["error"]
        return error

    async def statuses(self) -> list[str]:
        return [(await self.rollout(number)).status for number in range(len(self.rollout_ids))]

    async def rewards(self, number: int = 0) -> list[float]:
        """Every reward that is stored for a rollout."""
        spans = await self.store.query_spans(self.rollout_ids[number])
        return [float(str(span.attributes["reward"])) for span in spans if "reward" in span.attributes]

    async def span_names(self, number: int = 0) -> list[str]:
        return [span.name for span in await self.store.query_spans(self.rollout_ids[number])]


async def stocked_store() -> InMemoryLightningStore:
    """A store with resources."""
    store = InMemoryLightningStore()
    await store.add_resources(RESOURCES)
    return store


async def work_off(
    agent: LitAgent[Any],
    *tasks: Any,
    store: LightningStore | None = None,
    tracer: Tracer | None = None,
    hooks: Sequence[Hook] = (),
    config: RolloutConfig | None = None,
    mode: RolloutMode | None = None,
    **options: Any,
) -> Worked:
    """Put tasks into a queue and have one runner work them off."""
    store = store or await stocked_store()
    config = config or RolloutConfig()
    queued = [await store.enqueue_rollout(task, mode=mode, config=config) for task in tasks or ("task",)]
    runner: LitAgentRunner[Any] = LitAgentRunner(
        tracer or OtelTracer(),
        **{"max_rollouts": len(queued), "poll_interval": 0.05, "heartbeat_interval": 0, **options},
    )
    with runner.run_context(agent=agent, store=store, hooks=hooks):
        await asyncio.wait_for(runner.iter(), PATIENCE_SECONDS)
    return Worked(store, [rollout.rollout_id for rollout in queued])


async def until(condition: Callable[[], Any], seconds: float = PATIENCE_SECONDS) -> None:
    """Wait for a condition, plain or awaitable, that must come true."""
    deadline = time.monotonic() + seconds
    while True:
        answer = condition()
        if await answer if asyncio.iscoroutine(answer) else answer:
            return
        assert time.monotonic() < deadline, f"{condition} has not come true in {seconds} s"
        await asyncio.sleep(0.01)
