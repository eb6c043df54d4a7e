"""Circuit breaker, limits and queue of one backend."""

import asyncio
import random
from collections import Counter

import pytest

from agentlightning.llm_proxy.backends.backend_state import FAILURES_TO_OPEN, AdmissionQueue, CircuitBreaker
from tests.llm_proxy.backends.fake_clock import FakeClock, until

FAR = 10_000.0

# ---------------------------------------------------------------------- circuit breaker


def opened() -> CircuitBreaker:
    breaker = CircuitBreaker()
    for _ in range(FAILURES_TO_OPEN):
        breaker.fail(0.0)
    return breaker


@pytest.mark.parametrize(("completes", "state"), [(True, "closed"), (False, "open")], ids=["whole", "broken"])
def test_only_a_whole_response_begins_the_count_anew(completes: bool, state: str) -> None:
    breaker = CircuitBreaker()
    for _ in range(5):
        breaker.respond()
        if completes:
            breaker.complete()
        breaker.fail(0.0)

    assert breaker.state == state


def test_one_probe_passes_after_the_open_time_and_may_be_repeated_if_abandoned() -> None:
    breaker = opened()

    assert breaker.allows(10.0)
    breaker.begin(10.0)
    assert (breaker.state, breaker.allows(10.0)) == ("half-open", False)
    breaker.abandon(11.0)
    assert breaker.allows(11.0)


def test_open_time_doubles_up_to_a_minute_with_every_probe_that_fails() -> None:
    breaker, now, seconds = opened(), 0.0, []
    for _ in range(5):
        seconds.append(breaker.open_until - now)
        now = breaker.open_until
        breaker.begin(now)
        breaker.fail(now)

    assert seconds == [10.0, 20.0, 40.0, 60.0, 60.0]


@pytest.mark.parametrize(("completes", "opens"), [(False, True), (True, False)], ids=["probation", "whole"])
def test_response_to_a_probe_closes_it_on_probation(completes: bool, opens: bool) -> None:
    breaker = opened()
    breaker.begin(10.0)
    breaker.respond()
    if completes:
        breaker.complete()

    assert breaker.allows(10.0)
    assert breaker.fail(10.0) is opens


# ---------------------------------------------------------------------- limits and queue


async def queued(queue: AdmissionQueue, deadline: float = FAR) -> "asyncio.Task[bool]":
    """A call that waits for a place."""
    assert queue.waiting == 0
    task = asyncio.create_task(queue.acquire("r", deadline))
    await until(lambda: queue.waiting == 1)
    return task


async def test_newcomer_does_not_pass_those_in_the_queue(fake_clock: FakeClock) -> None:
    queue = AdmissionQueue(fake_clock, rpm=1)
    queue.try_acquire(fake_clock.now())
    waiter = await queued(queue)

    fake_clock.time += 61  # time for one more, before the timer has fired
    assert not queue.try_acquire(fake_clock.now())

    fake_clock.turn(0)
    assert await waiter


async def test_cancelled_calls_leave_the_queue_and_take_no_place(fake_clock: FakeClock) -> None:
    queue = AdmissionQueue(fake_clock, max_parallel=1)
    queue.try_acquire(fake_clock.now())
    tasks = [asyncio.create_task(queue.acquire("r", FAR)) for _ in range(100)]
    await until(lambda: queue.waiting == 100)

    for task in tasks[:98]:
        task.cancel()
    await asyncio.wait(tasks[:98])
    assert queue.waiting == 2
    queue.release()
    tasks[98].cancel()  # at the moment it is admitted
    await asyncio.wait([tasks[98]])

    assert tasks[98].cancelled()
    assert await tasks[99]
    queue.release()
    assert (queue.in_flight, queue.waiting, fake_clock.alarms) == (0, 0, [])


async def test_limit_holds_in_any_mix_of_acquiring_releasing_and_cancelling(fake_clock: FakeClock) -> None:
    queue, chance = AdmissionQueue(fake_clock, max_parallel=3), random.Random(7)
    running: Counter[str] = Counter()

    async def call(rollout_id: str, steps: int) -> None:
        if not queue.try_acquire(fake_clock.now()):
            await queue.acquire(rollout_id, FAR)
        running["now"] += 1
        running["most"] = max(running["most"], running["now"])
        try:
            for _ in range(steps):
                await asyncio.sleep(0)
        finally:
            running["now"] -= 1
            queue.release()

    tasks = []
    for _ in range(1000):
        tasks.append(asyncio.create_task(call(f"r{chance.randrange(9)}", chance.randrange(6))))
        chance.choice(tasks).cancel()
        await asyncio.sleep(0)
    await asyncio.wait(tasks)

    assert running == {"now": 0, "most": 3}
    assert (queue.in_flight, queue.waiting) == (0, 0)


async def test_calls_of_a_minute_are_limited_by_a_sliding_window(fake_clock: FakeClock) -> None:
    queue = AdmissionQueue(fake_clock, rpm=2)
    queue.try_acquire(fake_clock.now())
    fake_clock.turn(20)
    queue.try_acquire(fake_clock.now())

    assert queue.wait_seconds(fake_clock.now()) == 40.0
    waiter = await queued(queue)
    fake_clock.turn(39.9)
    assert queue.waiting == 1
    fake_clock.turn(0.1)
    assert await waiter
    assert queue.wait_seconds(fake_clock.now()) == pytest.approx(20.0)


async def test_tokens_of_a_minute_are_limited(fake_clock: FakeClock) -> None:
    queue = AdmissionQueue(fake_clock, tpm=100)
    queue.use_tokens(60)
    fake_clock.turn(10)
    assert queue.wait_seconds(fake_clock.now()) == 0
    queue.use_tokens(60)

    assert queue.wait_seconds(fake_clock.now()) == 50.0
    fake_clock.turn(50)
    assert queue.wait_seconds(fake_clock.now()) == 0
