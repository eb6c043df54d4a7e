"""A clock that a test turns, and calls to a fleet of backends."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

from agentlightning.llm_proxy.backends import Ask, Backend, Clock, Outgoing
from agentlightning.llm_proxy.backends.clock import Alarm
from tests.stub_model.raw import PATIENCE_SECONDS


async def until(condition: Callable[[], object]) -> None:
    """Wait for something that is about to happen."""
    ends = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < ends, "it did not happen"
        await asyncio.sleep(0.001)


class TurnedClock(Clock):
    """A clock that stands still until it is turned, and then rings what is due."""

    def __init__(self) -> None:
        self.time = 1000.0
        self.alarms: list[TurnedAlarm] = []

    def now(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        rung = asyncio.get_running_loop().create_future()
        alarm = self.call_later(seconds, lambda: rung.done() or rung.set_result(None))
        try:
            await rung
        finally:
            alarm.cancel()

    def call_later(self, seconds: float, callback: Callable[[], object]) -> Alarm:
        alarm = TurnedAlarm(self, self.time + seconds, callback)
        self.alarms.append(alarm)
        return alarm

    def turn(self, seconds: float) -> None:
        ends = self.time + seconds
        while due := [alarm for alarm in self.alarms if alarm.rings_at <= ends]:
            first = min(due, key=lambda alarm: alarm.rings_at)
            self.alarms.remove(first)
            self.time = max(self.time, first.rings_at)
            first.callback()
        self.time = ends


class TurnedAlarm:
    """One thing to happen when the clock has been turned far enough."""

    def __init__(self, clock: TurnedClock, rings_at: float, callback: Callable[[], object]) -> None:
        self.clock = clock
        self.rings_at = rings_at
        self.callback = callback

    def cancel(self) -> None:
        if self in self.clock.alarms:
            self.clock.alarms.remove(self)


def chat(backend: Backend) -> Outgoing:
    return Outgoing("chat", b"{}", stream=False)


def ask_for(model: str = "m", who: str = "", **fields: Any) -> Ask:
    return Ask(model, who, fields.pop("prepare", chat), **fields)
