"""Who may enter a backend, and who is next."""

import asyncio
import random
from collections import Counter

import pytest

from agentlightning.llm_proxy.backends.admission import Admission, Gate
from tests.llm_proxy.backends.turned_clock import TurnedClock, until

FAR = 10_000.0


async def settle() -> None:
    """Let every task that can run do so."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_call_enters_at_once_up_to_the_cap(turned_clock: TurnedClock) -> None:
    gate = Gate(turned_clock, cap=2)

    assert [gate.enter_at_once(turned_clock.now()) for _ in range(3)] == [True, True, False]
    gate.leave()
    assert gate.enter_at_once(turned_clock.now())


async def test_rollout_with_many_calls_does_not_starve_another(turned_clock: TurnedClock) -> None:
    gate = Gate(turned_clock, cap=1)
    gate.enter_at_once(turned_clock.now())
    order: list[str] = []

    async def call(who: str) -> None:
        await gate.enter(who, FAR)
        order.append(who)

    tasks = [asyncio.create_task(call(who)) for who in ["busy"] * 50 + ["quiet"] * 3]
    await until(lambda: gate.waiting == 53)
    for _ in range(53):
        gate.leave()
        await settle()
    await asyncio.gather(*tasks)

    assert order[:6] == ["busy", "quiet"] * 3
    assert Counter(order) == {"busy": 50, "quiet": 3}
    assert (gate.waiting, gate.in_flight) == (0, 1)


async def test_calls_of_one_rollout_keep_their_order(turned_clock: TurnedClock) -> None:
    gate = Gate(turned_clock, cap=1)
    gate.enter_at_once(turned_clock.now())
    order: list[int] = []

    async def call(number: int) -> None:
        await gate.enter("r", FAR)
        order.append(number)
        gate.leave()

    tasks = [asyncio.create_task(call(number)) for number in range(10)]
    await until(lambda: gate.waiting == 10)
    gate.leave()
    await asyncio.gather(*tasks)

    assert order == list(range(10))


async def test_newcomer_does_not_pass_those_in_line(turned_clock: TurnedClock) -> None:
    gate = Gate(turned_clock, rpm=1)
    gate.enter_at_once(turned_clock.now())
    waiter = asyncio.create_task(gate.enter("a", FAR))
    await until(lambda: gate.waiting == 1)

    turned_clock.time += 61  # time for one more, before the alarm has rung
    assert not gate.enter_at_once(turned_clock.now())

    turned_clock.turn(0)
    assert await waiter is Admission.ENTERED


async def test_cancelled_waiter_leaves_the_line_and_takes_no_place(turned_clock: TurnedClock) -> None:
    gate = Gate(turned_clock, cap=1)
    gate.enter_at_once(turned_clock.now())
    tasks = [asyncio.create_task(gate.enter(f"r{number % 7}", FAR)) for number in range(1000)]
    await until(lambda: gate.waiting == 1000)

    for task in tasks[:999]:
        task.cancel()
    await asyncio.wait(tasks[:999])

    assert gate.waiting == 1
    gate.leave()
    assert await tasks[999] is Admission.ENTERED
    gate.leave()
    assert (gate.in_flight, gate.waiting, turned_clock.alarms) == (0, 0, [])


async def test_waiter_cancelled_while_being_let_in_gives_its_place_back(turned_clock: TurnedClock) -> None:
    gate = Gate(turned_clock, cap=1)
    gate.enter_at_once(turned_clock.now())
    first, second = (asyncio.create_task(gate.enter("r", FAR)) for _ in range(2))
    await until(lambda: gate.waiting == 2)

    gate.leave()
    first.cancel()
    await asyncio.wait([first])

    assert first.cancelled()
    assert await second is Admission.ENTERED
    assert gate.in_flight == 1


async def test_cap_holds_in_any_mix_of_entering_leaving_and_cancelling(turned_clock: TurnedClock) -> None:
    gate, chance = Gate(turned_clock, cap=3), random.Random(7)
    inside = most = 0

    async def call(who: str, steps: int) -> None:
        nonlocal inside, most
        if not gate.enter_at_once(turned_clock.now()):
            await gate.enter(who, FAR)
        inside += 1
        most = max(most, inside)
        try:
            for _ in range(steps):
                await asyncio.sleep(0)
        finally:
            inside -= 1
            gate.leave()

    tasks = []
    for _ in range(1000):
        tasks.append(asyncio.create_task(call(f"r{chance.randrange(9)}", chance.randrange(6))))
        chance.choice(tasks).cancel()
        await asyncio.sleep(0)
    await asyncio.wait(tasks)

    assert most == 3
    assert (inside, gate.in_flight, gate.waiting) == (0, 0, 0)


async def test_deadline_ends_the_wait(turned_clock: TurnedClock) -> None:
    gate = Gate(turned_clock, cap=1)
    gate.enter_at_once(turned_clock.now())
    waiter = asyncio.create_task(gate.enter("r", turned_clock.now() + 5))
    await until(lambda: gate.waiting == 1)

    turned_clock.turn(5)

    assert await waiter is Admission.EXPIRED
    assert gate.waiting == 0


async def test_calls_of_a_minute_are_limited_by_a_sliding_window(turned_clock: TurnedClock) -> None:
    gate = Gate(turned_clock, rpm=2)
    gate.enter_at_once(turned_clock.now())
    turned_clock.turn(20)
    gate.enter_at_once(turned_clock.now())

    assert gate.closed_for(turned_clock.now()) == 40.0
    waiter = asyncio.create_task(gate.enter("r", FAR))
    await until(lambda: gate.waiting == 1)
    turned_clock.turn(39.9)
    assert gate.waiting == 1
    turned_clock.turn(0.1)
    assert await waiter is Admission.ENTERED
    assert gate.closed_for(turned_clock.now()) == pytest.approx(20.0)


async def test_tokens_of_a_minute_are_limited(turned_clock: TurnedClock) -> None:
    gate = Gate(turned_clock, tpm=100)
    gate.use_tokens(60)
    turned_clock.turn(10)
    assert gate.closed_for(turned_clock.now()) == 0
    gate.use_tokens(60)

    assert gate.closed_for(turned_clock.now()) == 50.0
    turned_clock.turn(50)
    assert gate.closed_for(turned_clock.now()) == 0


async def test_hold_sends_those_in_line_away_and_lets_nobody_enter(turned_clock: TurnedClock) -> None:
    gate = Gate(turned_clock, cap=1)
    gate.enter_at_once(turned_clock.now())
    waiter = asyncio.create_task(gate.enter("r", FAR))
    await until(lambda: gate.waiting == 1)

    gate.hold(turned_clock.now() + 3)

    assert await waiter is Admission.SENT_AWAY
    gate.leave()
    assert not gate.enter_at_once(turned_clock.now())
    turned_clock.turn(3)
    assert gate.enter_at_once(turned_clock.now())
