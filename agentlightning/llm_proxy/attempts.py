"""What the proxy must know of an attempt before it serves a call: is it still running, and which resources it uses.

Most calls need none of it. Where it is needed, it is asked for once, kept for a second, and renewed in the background
while the attempt goes on calling.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from agentlightning.errors import StoreError, StoreUnavailable
from agentlightning.llm_proxy.records import Origin
from agentlightning.store.base import LightningStore
from agentlightning.types import LLM, AttemptedRollout, NamedResources
from agentlightning.types.scoping import pinned_id, resources_for

__all__ = ["Attempts", "Facts"]

FRESH_SECONDS: Final = 1.0
STALE_SECONDS: Final = 10.0
"""Facts older than this are not used, not even while they are renewed."""
MOST_ATTEMPTS: Final = 20_000
_RUNNING: Final = frozenset({"preparing", "running", "unresponsive"})
_MAIN: Final = "main_llm"

_Place = tuple[str, str]


@dataclass(frozen=True)
class Facts:
    """What is known of an attempt."""

    is_known: bool
    is_running: bool
    rollout: AttemptedRollout | None = None


class Attempts:
    """Facts of attempts, by need."""

    def __init__(self, store: LightningStore, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._known: dict[_Place, tuple[float, Facts]] = {}
        self._asking: dict[_Place, asyncio.Task[Facts]] = {}
        self._resources: dict[str, NamedResources] = {}

    async def facts(self, origin: Origin) -> Facts:
        """What is known of an attempt; StoreUnavailable if nothing is and the store cannot be asked."""
        place = (origin.rollout_id, origin.attempt_id)
        asked_at, facts = self._known.get(place, (float("-inf"), None))
        age = self._clock() - asked_at
        if facts is not None and age < FRESH_SECONDS:
            return facts
        asking = self._asking.get(place)
        if asking is None:
            asking = self._asking[place] = asyncio.create_task(self._ask(place))
            asking.add_done_callback(lambda _: self._asking.pop(place, None))
        if facts is not None and age < STALE_SECONDS:
            return facts
        return await asyncio.shield(asking)

    async def _ask(self, place: _Place) -> Facts:
        rollout_id, attempt_id = place
        try:
            rollout = await self._store.get_rollout_by_id(rollout_id)
            facts = Facts(is_known=False, is_running=False)
            if rollout is not None:
                for attempt in await self._store.query_attempts(rollout_id):
                    if attempt.attempt_id == attempt_id:
                        whole = AttemptedRollout.model_construct(**{**vars(rollout), "attempt": attempt})
                        facts = Facts(is_known=True, is_running=attempt.status in _RUNNING, rollout=whole)
        except StoreUnavailable:
            raise
        except StoreError:
            facts = Facts(is_known=False, is_running=False)
        if len(self._known) >= MOST_ATTEMPTS:
            del self._known[next(iter(self._known))]
        self._known[place] = (self._clock(), facts)
        return facts

    async def llm_of(self, origin: Origin) -> LLM | None:
        """The model that an attempt's resources give to the agent which calls; None if they give none."""
        facts = await self.facts(origin)
        if facts.rollout is None:
            return None
        resources_id = facts.rollout.resources_id
        if origin.agent is not None:
            resources_id = pinned_id(origin.agent, facts.rollout) or resources_id
        own = resources_for(origin.agent, await self._resources_of(resources_id))
        models: dict[str, Any] = {name: resource for name, resource in own.items() if isinstance(resource, LLM)}
        return models.get(_MAIN) or next(iter(models.values()), None)

    async def _resources_of(self, resources_id: str | None) -> NamedResources:
        if resources_id is None:
            latest = await self._store.get_latest_resources()
            return {} if latest is None else latest.resources
        if resources_id not in self._resources:
            update = await self._store.get_resources_by_id(resources_id)
            self._resources[resources_id] = {} if update is None else update.resources
        return self._resources[resources_id]
