"""How long a client goes on asking, by a clock that moves only when somebody waits."""

import asyncio
from collections.abc import Iterable
from types import SimpleNamespace

import pytest

from agentlightning.errors import StoreUnavailable
from agentlightning.store.http import retries
from agentlightning.store.http.retries import WAITED_SECONDS, RetryPolicy
from agentlightning.store.http.websocket import ConnectionLost

PATIENCE = 60.0
POLICY = RetryPolicy(retry_delays=(1.0,), health_retry_delays=(0.5,), outage_seconds=PATIENCE)


class World:
    """A server that is lost again and again, and the time that passes meanwhile."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.attempts = 0
        self._outages: list[tuple[float, float]] = []
        self._is_back_at = 0.0

    def plan(self, outages: Iterable[tuple[float, float]]) -> None:
        """For each outage: how long an attempt waits before it is lost, and how long the server is then away."""
        self._outages = list(outages)

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds

    async def is_healthy(self) -> bool:
        return self.now >= self._is_back_at

    async def attempt(self) -> str:
        self.attempts += 1
        if not self._outages:
            return "done"
        waited, away = self._outages.pop(0)
        self.now += waited
        self._is_back_at = self.now + away
        raise ConnectionLost("gone")


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    world = World()
    monkeypatch.setattr(retries, "time", world)
    monkeypatch.setattr(retries, "asyncio", SimpleNamespace(sleep=world.sleep, TimeoutError=asyncio.TimeoutError))
    return world


async def test_outage_shorter_than_patience_is_ridden_out(world: World) -> None:
    world.plan([(0.0, PATIENCE - 1)])
    assert await POLICY.persist(world.attempt, world.is_healthy) == "done"


async def test_outage_longer_than_patience_is_told(world: World) -> None:
    world.plan([(0.0, PATIENCE + 1)])
    with pytest.raises(StoreUnavailable, match="is the server running"):
        await POLICY.persist(world.attempt, world.is_healthy)
    assert world.now - 1000.0 <= PATIENCE


async def test_wait_survives_outages_that_together_are_longer_than_patience(world: World) -> None:
    world.plan([(2 * WAITED_SECONDS, PATIENCE - 1)] * 5)
    assert await POLICY.persist(world.attempt, world.is_healthy, waits=True) == "done"
    assert world.now - 1000.0 > 4 * PATIENCE


@pytest.mark.parametrize(("waited", "waits"), [(2 * WAITED_SECONDS, False), (WAITED_SECONDS / 2, True)])
async def test_attempt_that_did_not_wait_is_a_failure_of_the_same_outage(
    world: World, waited: float, waits: bool
) -> None:
    world.plan([(waited, PATIENCE / 2)] * 5)
    with pytest.raises(StoreUnavailable):
        await POLICY.persist(world.attempt, world.is_healthy, waits=waits)
    assert world.attempts == 2


async def test_server_that_is_there_but_loses_every_call_is_given_up_in_the_end(world: World) -> None:
    world.plan([(0.0, 0.0)] * 1000)
    with pytest.raises(StoreUnavailable):
        await POLICY.persist(world.attempt, world.is_healthy)
    assert PATIENCE <= world.now - 1000.0 < PATIENCE + 2
