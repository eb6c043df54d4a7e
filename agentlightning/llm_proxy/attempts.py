"""What the proxy must know of an attempt before it serves a call: is it still running, and which resources it uses.

Most calls need none of it. Where it is needed, it is asked for once and kept for a second; an attempt that goes on
calling has it renewed before that, in the background, so that its calls do not wait. Facts that are older are used only
while the store cannot be asked: nobody can end an attempt in a store that is away.
"""

import asyncio
import logging
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

logger = logging.getLogger(__name__)

RENEWED_SECONDS: Final = 0.5
"""After these a call has the facts renewed, and does not wait for it."""
FRESH_SECONDS: Final = 1.0
STALE_SECONDS: Final = 60.0
"""Facts older than this are not used, not even while the store cannot be asked."""
MOST_ATTEMPTS: Final = 20_000
MOST_RESOURCES: Final = 256
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
        self._resources: dict[str | None, tuple[float, NamedResources]] = {}

    async def facts(self, origin: Origin) -> Facts:
        """What is known of an attempt; StoreUnavailable if nothing is and the store cannot be asked."""
        place = (origin.rollout_id, origin.attempt_id)
        asked_at, facts = self._known.get(place, (float("-inf"), None))
        age = self._clock() - asked_at
        if facts is not None and age < RENEWED_SECONDS:
            return facts
        asking = self._asking.get(place)
        if asking is None:
            asking = self._asking[place] = asyncio.create_task(self._ask(place), name="agl-proxy-attempt")
            asking.add_done_callback(lambda asked: self._end_asking(place, asked))
        if facts is not None and age < FRESH_SECONDS:
            return facts
        try:
            return await asyncio.shield(asking)
        except StoreUnavailable:
            if facts is None or age >= STALE_SECONDS:
                raise
            return facts

    def _end_asking(self, place: _Place, asked: asyncio.Task[Facts]) -> None:
        del self._asking[place]
        if not asked.cancelled() and (error := asked.exception()) is not None:
            logger.debug("Attempt '%s' of rollout '%s' could not be looked up: %s", *reversed(place), error)

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
        self._known.pop(place, None)  # to the end of the line
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
        """Those of a version, or the latest; kept for a second, since both can be replaced."""
        asked_at, known = self._resources.get(resources_id, (float("-inf"), None))
        age = self._clock() - asked_at
        if known is not None and age < FRESH_SECONDS:
            return known
        try:
            if resources_id is None:
                update = await self._store.get_latest_resources()
            else:
                update = await self._store.get_resources_by_id(resources_id)
        except StoreUnavailable:
            if known is None or age >= STALE_SECONDS:
                raise
            return known
        if len(self._resources) >= MOST_RESOURCES:
            del self._resources[next(iter(self._resources))]
        found = {} if update is None else update.resources
        self._resources[resources_id] = self._clock(), found
        return found
