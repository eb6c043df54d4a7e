"""How long a client goes on, by a clock that moves only when somebody waits."""

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace

import pytest

from agentlightning.utils import retries
from agentlightning.utils.retries import RetryPolicy, retry, retry_after_seconds

PATIENCE = 60.0
WAITED = 0.1


class Lost(ConnectionError):
    """An outage."""


def is_lost(error: Exception) -> bool:
    return isinstance(error, Lost)


def has_waited(error: Exception, seconds: float) -> bool:
    return seconds > WAITED


POLICY = RetryPolicy(
    delays=(1.0,),
    is_passing=lambda error: isinstance(error, (Lost, TimeoutError)),
    is_outage=is_lost,
    outage_seconds=PATIENCE,
)
WAITING = replace(POLICY, has_begun=has_waited)


class World:
    """A server that is lost again and again, and the time that passes meanwhile."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.calls = 0
        self.pauses: list[float] = []
        self._outages: list[tuple[float, float]] = []
        self._is_back_at = 0.0

    def plan(self, outages: Iterable[tuple[float, float]]) -> None:
        """For each outage: how long a call waits before it is lost, and how long the server is then away."""
        self._outages = list(outages)

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds

    async def recovers(self, seconds: float) -> bool:
        self.now = max(self.now, min(self._is_back_at, self.now + seconds))
        return self.now >= self._is_back_at

    async def call(self) -> str:
        self.calls += 1
        if not self._outages:
            return "done"
        waited, away = self._outages.pop(0)
        self.now += waited
        self._is_back_at = self.now + away
        raise Lost("gone")

    async def persist(self, policy: RetryPolicy = POLICY) -> str:
        return await retry(self.call, policy, recovers=self.recovers, sleep=self.sleep)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    world = World()
    monkeypatch.setattr(retries, "time", SimpleNamespace(monotonic=world.monotonic))
    return world


async def test_outage_shorter_than_patience_is_ridden_out(world: World) -> None:
    world.plan([(0.0, PATIENCE - 1)])
    assert await world.persist() == "done"


async def test_outage_longer_than_patience_is_raised(world: World) -> None:
    world.plan([(0.0, PATIENCE + 1)])
    with pytest.raises(Lost):
        await world.persist()
    assert world.now - 1000.0 <= PATIENCE


async def test_wait_survives_outages_that_together_are_longer_than_patience(world: World) -> None:
    world.plan([(2 * WAITED, PATIENCE - 1)] * 5)
    assert await world.persist(WAITING) == "done"
    assert world.now - 1000.0 > 4 * PATIENCE


@pytest.mark.parametrize(("waited", "policy"), [(2 * WAITED, POLICY), (WAITED / 2, WAITING)], ids=["call", "wait"])
async def test_call_that_did_not_wait_is_a_failure_of_the_same_outage(
    world: World, waited: float, policy: RetryPolicy
) -> None:
    world.plan([(waited, PATIENCE / 2)] * 5)
    with pytest.raises(Lost):
        await world.persist(policy)
    assert world.calls == 2


async def test_server_that_is_there_but_loses_every_call_is_given_up_in_the_end(world: World) -> None:
    world.plan([(0.0, 0.0)] * 1000)
    with pytest.raises(Lost):
        await world.persist()
    assert PATIENCE - 2 < world.now - 1000.0 <= PATIENCE


async def failing(*errors: Exception, policy: RetryPolicy) -> tuple[str, list[float]]:
    """The outcome of calls that fail so, and the pauses between them."""
    remaining, pauses = list(errors), list[float]()

    async def call() -> str:
        if remaining:
            raise remaining.pop(0)
        return "done"

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    try:
        return await retry(call, policy, sleep=sleep), pauses
    except (ValueError, TimeoutError) as error:
        return type(error).__name__, pauses


async def test_delays_and_tries_bound_what_is_no_outage() -> None:
    policy = replace(POLICY, delays=(1.0, 2.0))
    assert await failing(*[TimeoutError()] * 2, policy=policy) == ("done", [1.0, 2.0])
    assert await failing(*[TimeoutError()] * 3, policy=policy) == ("TimeoutError", [1.0, 2.0])
    assert await failing(*[TimeoutError()] * 4, policy=replace(policy, tries=5)) == ("done", [1.0, 2.0, 2.0, 2.0])
    assert await failing(ValueError(), policy=policy) == ("ValueError", [])
    assert await failing(TimeoutError(), policy=replace(policy, delays=())) == ("TimeoutError", [])


async def test_the_other_side_may_say_when() -> None:
    policy = replace(POLICY, requested_seconds=lambda error: 7.0 if str(error) == "busy" else None)
    assert await failing(TimeoutError("busy"), policy=policy) == ("done", [7.0])


async def test_jitter_keeps_clients_apart() -> None:
    policy = replace(POLICY, delays=(1.0,) * 100, jitter=0.25)
    _, pauses = await failing(*[TimeoutError()] * 100, policy=policy)
    assert 0.75 <= min(pauses) < max(pauses) <= 1.25


async def test_cancelled_call_is_not_made_again(world: World) -> None:
    async def cancelled() -> None:
        world.calls += 1
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await retry(cancelled, POLICY)
    assert world.calls == 1


def test_retry_after_is_seconds_milliseconds_or_a_date() -> None:
    assert retry_after_seconds({"retry-after": "3"}) == 3.0
    assert retry_after_seconds({"retry-after-ms": "1500", "retry-after": "9"}) == 1.5
    assert retry_after_seconds({"retry-after": "Thu, 01 Jan 1970 00:00:00 GMT"}) == 0.0
    assert retry_after_seconds({"retry-after": "soon"}) is None
    assert retry_after_seconds({}) is None
