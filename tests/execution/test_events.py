"""Flags between threads, between processes, and with Ctrl-C."""

import multiprocessing
import threading
from typing import Any

import pytest

from agentlightning.execution import MultiprocessingEvent, ThreadingEvent
from agentlightning.execution.events import StopToken


@pytest.fixture(params=[ThreadingEvent, MultiprocessingEvent, lambda: StopToken(ThreadingEvent())])
def event(request: pytest.FixtureRequest) -> Any:
    return request.param()


def test_a_flag_is_set_and_cleared(event: Any) -> None:
    assert (event.is_set(), event.wait(0.0)) == (False, False)
    event.set()
    assert (event.is_set(), event.wait(0.0), event.wait()) == (True, True, True)
    event.clear()
    assert not event.is_set()
    threading.Timer(0.05, event.set).start()
    assert event.wait(20)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_flag_travels_to_a_child(method: str) -> None:
    context = multiprocessing.get_context(method)
    event = MultiprocessingEvent(ctx=context)
    child = context.Process(target=MultiprocessingEvent.set, args=(event,))  # type: ignore[attr-defined] # every context has it

    child.start()
    child.join(30)

    assert event.is_set()


def test_ctrl_c_sets_a_stop_token_for_this_process_alone() -> None:
    shared = ThreadingEvent()
    own = StopToken(shared)

    own.interrupt(2, None)

    assert own.is_set()
    assert own.wait(0)
    assert not shared.is_set()


def test_the_first_ctrl_c_is_answered(capfd: pytest.CaptureFixture[str]) -> None:
    StopToken(ThreadingEvent(), "Soon.").interrupt(2, None)
    StopToken(ThreadingEvent()).interrupt(2, None)

    assert capfd.readouterr().err == "\nSoon.\n"


def test_a_second_ctrl_c_ends_the_process() -> None:
    own = StopToken(ThreadingEvent())
    own.interrupt(2, None)

    with pytest.raises(KeyboardInterrupt):
        own.interrupt(2, None)
