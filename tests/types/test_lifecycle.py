"""The life cycle of components: its steps, and what becomes of it in copies and subclasses."""

import concurrent.futures
import copy
import pickle
import threading
from dataclasses import dataclass
from typing import Any

import pytest

from agentlightning.errors import InvalidTransition
from agentlightning.types.lifecycle import Component, Lifecycle, LifecycleState, lifecycle_of


def lived(*steps: str) -> Lifecycle:
    life = Lifecycle("The part")
    for step in steps:
        life.step(step)
    return life


def test_a_component_goes_from_created_to_stopped() -> None:
    life = lived()
    states = [life.step(step).value for step in ("init", "start", "pause", "resume", "stop")]
    life.end()

    assert states == ["ready", "running", "paused", "running", "stopping"]
    assert life.state is LifecycleState.STOPPED
    assert str(lived("init").step("stop")) == "stopped"  # one that is ready has nothing to end


def test_a_component_that_failed_keeps_its_error_until_it_is_retried() -> None:
    life = lived("init")
    error = ValueError("no")

    life.step("error", error=error)
    assert (life.state, life.failure) == (LifecycleState.FAILED, error)
    life.step("retry")
    assert (life.state, life.failure) == (LifecycleState.READY, None)


@pytest.mark.parametrize(
    ("steps", "refused"),
    [
        ((), "pause"),
        ((), "resume"),
        ((), "stop"),
        ((), "retry"),
        (("init",), "pause"),
        (("init", "start"), "start"),
        (("init", "start"), "init"),
        (("init", "start"), "retry"),
        (("init", "start", "stop"), "pause"),
        (("init", "start", "stop"), "start"),
        (("init", "stop"), "error"),
        (("error",), "stop"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else value,
)
def test_a_step_that_cannot_be_taken_is_refused_with_those_that_can(steps: tuple[str, ...], refused: str) -> None:
    life = lived(*steps)
    before = life.state

    with pytest.raises(InvalidTransition, match=f"The part is {before.value} and cannot {refused}; from here it can "):
        life.step(refused)
    assert life.state is before


@pytest.mark.parametrize("step", ["init", "retry"])
def test_a_component_whose_work_still_ends_cannot_begin_anew(step: str) -> None:
    life = lived("start")
    life.step("error", error=ValueError("no"))

    with pytest.raises(InvalidTransition, match=f"call wait\\(\\) before {step}"):
        life.step(step)
    life.end()

    assert life.step(step) is LifecycleState.READY


def test_of_many_threads_that_start_a_component_one_does() -> None:
    life, outcomes = lived("init"), []

    def start() -> None:
        try:
            outcomes.append(life.step("start").value)
        except InvalidTransition:
            outcomes.append("refused")

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(outcomes) == ["refused"] * 7 + ["running"]


# ---------------------------------------------------------------------- components


class Careless(Component):
    """Never calls `super().__init__()`."""

    def __init__(self) -> None:
        self.name = "careless"


class Old(Component):
    """Has had methods and attributes of these names before."""

    def __init__(self) -> None:
        self.state = {"step": 3}  # type: ignore[assignment] # as such a class does
        self.failure = "none"  # type: ignore[assignment]

    def start(self) -> str:  # type: ignore[override]
        return "its own"


@dataclass(frozen=True)
class Frozen(Component):
    size: int = 1


@pytest.mark.parametrize("make", [Component, Careless, Old, Frozen])
@pytest.mark.parametrize(
    "duplicate",
    [copy.copy, copy.deepcopy, lambda part: pickle.loads(pickle.dumps(part))],
    ids=["copy", "deepcopy", "pickle"],
)
def test_a_copy_of_a_component_that_runs_is_created(make: Any, duplicate: Any) -> None:
    part = make()
    lifecycle_of(part).step("start")

    other = duplicate(part)

    assert lifecycle_of(other).state is LifecycleState.CREATED
    assert lifecycle_of(part).state is LifecycleState.RUNNING


def test_a_subclass_keeps_what_it_calls_by_these_names() -> None:
    part: Any = Old()
    assert (part.state, part.failure, part.start()) == ({"step": 3}, "none", "its own")


def test_what_runs_in_the_background_is_waited_for_and_its_error_raised(caplog: pytest.LogCaptureFixture) -> None:
    part = Component()
    part.start()

    def fail() -> None:
        raise ValueError("no")

    lifecycle_of(part).work_in_background(fail)

    with pytest.raises(ValueError, match="no"):
        part.wait()
    assert (part.state, str(part.failure)) == (LifecycleState.FAILED, "no")
    assert "The component failed: ValueError: no" in caplog.text


def test_an_interrupt_while_waiting_stops_the_work_first(monkeypatch: pytest.MonkeyPatch) -> None:
    part, release = Component(), threading.Event()
    part.start()
    lifecycle_of(part).work_in_background(lambda: release.wait() and None)
    really_wait, waits = concurrent.futures.wait, iter(["interrupted"])

    def wait(*arguments: Any) -> Any:
        if next(waits, None) is not None:
            raise KeyboardInterrupt
        assert part.state is LifecycleState.STOPPING
        release.set()
        return really_wait(*arguments)

    monkeypatch.setattr(concurrent.futures, "wait", wait)
    with pytest.raises(KeyboardInterrupt):
        part.wait()

    assert part.state is LifecycleState.STOPPED
