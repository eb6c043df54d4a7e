"""A clock that a test turns, and calls to a pool of backends."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

from agentlightning.dialects import CHAT
from agentlightning.llm_proxy.backends import Backend, BackendCall, Clock, PreparedRequest
from agentlightning.llm_proxy.backends.backend_state import Timer
from tests.stub_model.raw import PATIENCE_SECONDS


async def until(condition: Callable[[], object]) -> None:
    """Wait for something that is about to happen."""
    ends = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < ends, "it did not happen"
        await asyncio.sleep(0.001)


class FakeClock(Clock):
    """A clock that stands still until it is turned, and then rings what is due."""

    def __init__(self) -> None:
        self.time = 1000.0
        self.alarms: list[FakeTimer] = []

    def now(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        rung = asyncio.get_running_loop().create_future()
        alarm = self.call_later(seconds, lambda: rung.done() or rung.set_result(None))
        try:
            await rung
        finally:
            alarm.cancel()

    def call_later(self, seconds: float, callback: Callable[[], object]) -> Timer:
        alarm = FakeTimer(self, self.time + seconds, callback)
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


class FakeTimer:
    """One thing to happen when the clock has been turned far enough."""

    def __init__(self, clock: FakeClock, rings_at: float, callback: Callable[[], object]) -> None:
        self.clock = clock
        self.rings_at = rings_at
        self.callback = callback

    def cancel(self) -> None:
        if self in self.clock.alarms:
            self.clock.alarms.remove(self)


def chat(backend: Backend) -> PreparedRequest:
    return PreparedRequest(backend.url_of(CHAT), b"{}")


class PlainCall(BackendCall):
    """A call whose requests a function prepares."""

    def __init__(self, model: str, who: str, prepare: Callable[[Backend], PreparedRequest]) -> None:
        super().__init__(model, who)
        self._prepared = prepare

    def prepare(self, backend: Backend) -> PreparedRequest:
        return self._prepared(backend)


def request_for(model: str = "m", who: str = "", **fields: Any) -> PlainCall:
    call = PlainCall(model, who, fields.pop("prepare", chat))
    call.resources_id, call.deadline = fields.pop("resources_id", None), fields.pop("deadline", None)
    assert not fields
    return call
