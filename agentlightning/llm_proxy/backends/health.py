"""Looking after backends that could not be reached, so that they come back without a call that finds out.

Runs only while there is one to look after. A backend that was reached and failed is not cured by a health check: it
has to answer a call again.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Final

import aiohttp

from agentlightning.llm_proxy.backends.clock import Clock
from agentlightning.llm_proxy.backends.lane import Lane
from agentlightning.llm_proxy.backends.sending import Sender

__all__ = ["HealthWatch"]

logger = logging.getLogger(__name__)

CHECK_EVERY_SECONDS: Final = 1.0
CHECK_TIMEOUT_SECONDS: Final = 5.0
_SERVER_ERRORS: Final = 500


class HealthWatch:
    """The health checks of one fleet."""

    def __init__(self, sender: Sender, clock: Clock, lanes: Callable[[], Sequence[Lane]]) -> None:
        self._sender = sender
        self._clock = clock
        self._lanes = lanes
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to look after backends, unless that is being done."""
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._watch(), name="llm-proxy-health-watch")

    async def close(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def _watch(self) -> None:
        while self._patients():
            await self._clock.sleep(CHECK_EVERY_SECONDS)
            await asyncio.gather(*(self._check(lane) for lane in self._patients()))

    def _patients(self) -> list[Lane]:
        return [
            lane
            for lane in self._lanes()
            if lane.breaker.state == "open" and lane.breaker.is_curable and lane.backend.health_url is not None
        ]

    async def _check(self, lane: Lane) -> None:
        url = lane.backend.health_url
        if url is not None and await self._answers(url, lane) and lane.breaker.cured():
            logger.info("Backend %s is in use again", lane)

    async def _answers(self, url: str, lane: Lane) -> bool:
        """Whether the server is there; one that wants other words than ours is there too."""
        timeout = aiohttp.ClientTimeout(total=CHECK_TIMEOUT_SECONDS)
        try:
            async with self._sender.session.get(
                url, headers=lane.headers, timeout=timeout, allow_redirects=False
            ) as response:
                return response.status < _SERVER_ERRORS
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError):
            return False
