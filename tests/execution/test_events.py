"""Flags between threads, between processes, and with Ctrl-C."""

import multiprocessing
import pickle
import threading
from typing import Any

import pytest

from agentlightning.errors import InvalidTransition
from agentlightning.execution import MultiprocessingEvent, ThreadingEvent
from agentlightning.execution.events import InterruptibleEvent
from agentlightning.types.lifecycle import Lifecycle, LifecycleState


@pytest.fixture(params=[ThreadingEvent, MultiprocessingEvent, lambda: InterruptibleEvent(ThreadingEvent())])
def event(request: pytest.FixtureRequest) -> Any:
    return request.param()


def test_a_flag_is_set_and_cleared(event: Any) -> None:
    assert (event.is_set(), event.wait(0.0)) == (False, False)
    event.set()
    assert (event.is_set(), event.wait(0.0), event.wait()) == (True, True, True)
    event.clear()
    assert not event.is_set()


def test_a_waiter_is_woken(event: Any) -> None:
    threading.Timer(0.05, event.set).start()

    assert event.wait(20)


@pytest.mark.parametrize("kind", [ThreadingEvent, MultiprocessingEvent])
def test_a_flag_has_one_slot(kind: Any) -> None:
    assert kind.__slots__ == ("_evt",)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_flag_travels_to_a_child(method: str) -> None:
    context = multiprocessing.get_context(method)
    event = MultiprocessingEvent(ctx=context)
    child = context.Process(target=MultiprocessingEvent.set, args=(event,))  # type: ignore[attr-defined] # every context has it

    child.start()
    child.join(30)

    assert event.is_set()


def test_a_flag_between_processes_travels_in_no_other_way() -> None:
    with pytest.raises(RuntimeError):
        pickle.dumps(MultiprocessingEvent())


def test_ctrl_c_sets_an_interruptible_flag_for_this_process_alone() -> None:
    shared = ThreadingEvent()
    own = InterruptibleEvent(shared)

    own.interrupt(2, None)

    assert own.is_set()
    assert own.wait(0)
    assert not shared.is_set()


def test_the_first_ctrl_c_is_answered(capfd: pytest.CaptureFixture[str]) -> None:
    InterruptibleEvent(ThreadingEvent(), "Soon.").interrupt(2, None)
    InterruptibleEvent(ThreadingEvent()).interrupt(2, None)

    assert capfd.readouterr().err == "\nSoon.\n"


def test_a_second_ctrl_c_ends_the_process() -> None:
    own = InterruptibleEvent(ThreadingEvent())
    own.interrupt(2, None)

    with pytest.raises(KeyboardInterrupt):
        own.interrupt(2, None)


# ---------------------------------------------------------------------- life cycles


def lived(*steps: str) -> Lifecycle:
    life = Lifecycle("The part")
    for step in steps:
        life.step(step)
    return life


def test_a_part_goes_from_created_to_stopped() -> None:
    life = lived()
    states = [life.step(step) for step in ("become ready", "start", "pause", "resume", "stop", "end")]

    assert [state.value for state in states] == ["ready", "running", "paused", "running", "stopping", "stopped"]


def test_a_part_that_failed_keeps_its_error_until_it_is_retried() -> None:
    life = lived("become ready", "start")
    error = ValueError("no")

    life.step("fail", error=error)
    assert (life.state, life.error) == (LifecycleState.FAILED, error)
    life.step("be retried")
    assert (life.state, life.error) == (LifecycleState.RUNNING, None)


@pytest.mark.parametrize(
    ("steps", "refused"),
    [
        ((), "pause"),
        ((), "resume"),
        ((), "stop"),
        (("become ready",), "pause"),
        (("become ready", "start"), "start"),
        (("become ready", "start", "stop"), "pause"),
        (("become ready", "start", "stop"), "start"),
        (("become ready", "start"), "become ready"),
        (("become ready", "start"), "be retried"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else value,
)
def test_a_step_that_cannot_be_taken_is_refused_in_words(steps: tuple[str, ...], refused: str) -> None:
    life = lived(*steps)
    before = life.state

    with pytest.raises(InvalidTransition, match=f"The part is {before.value} and cannot {refused}"):
        life.step(refused)
    assert life.state is before
