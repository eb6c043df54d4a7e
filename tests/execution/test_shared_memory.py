"""Algorithm and runners as threads of one process."""

import asyncio
import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from agentlightning.execution import ExecutionEvent, ExecutionStrategy, SharedMemoryExecutionStrategy, ThreadingEvent
from agentlightning.execution.events import run_until_stopped
from agentlightning.store import InMemoryLightningStore, LightningStore, LightningStoreThreaded

NAMES = ("runner-", "algorithm")


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and any(t.name.startswith(NAMES) for t in threading.enumerate()):
        time.sleep(0.01)
    assert [t.name for t in threading.enumerate() if t.name.startswith(NAMES)] == []


async def until_stopped(event: ExecutionEvent) -> None:
    while not event.is_set():
        await asyncio.sleep(0.01)


async def serving(store: LightningStore, worker_id: int, event: ExecutionEvent) -> None:
    await until_stopped(event)


async def doing_nothing(store: LightningStore, event: ExecutionEvent) -> None:
    return None


def of_algorithm(n_runners: int = 1, **options: Any) -> SharedMemoryExecutionStrategy:
    return SharedMemoryExecutionStrategy(
        n_runners, main_thread="algorithm", **{"graceful_delay": 0.5, "poll_interval": 0.01, **options}
    )


def of_runner(**options: Any) -> SharedMemoryExecutionStrategy:
    return SharedMemoryExecutionStrategy(
        main_thread="runner", **{"graceful_delay": 0.5, "poll_interval": 0.01, **options}
    )


# ---------------------------------------------------------------------- configuration


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"main_thread": "both"}, "main_thread must be 'algorithm' or 'runner'"),
        ({"n_runners": 0, "main_thread": "algorithm"}, "n_runners must be at least 1"),
        ({"n_runners": 2, "main_thread": "runner"}, "requires n_runners to be 1"),
    ],
    ids=str,
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SharedMemoryExecutionStrategy(**options)


def test_a_strategy_must_say_how_it_executes() -> None:
    with pytest.raises(NotImplementedError):
        ExecutionStrategy().execute(doing_nothing, serving, InMemoryLightningStore())


# ---------------------------------------------------------------------- placing


@pytest.mark.parametrize("n_runners", [1, 4])
def test_runners_have_threads_and_numbers_of_their_own(n_runners: int) -> None:
    seen: dict[int, str] = {}

    async def runner(store: LightningStore, worker_id: int, event: ExecutionEvent) -> None:
        seen[worker_id] = threading.current_thread().name
        await until_stopped(event)

    async def algorithm(store: LightningStore, event: ExecutionEvent) -> None:
        assert threading.current_thread() is threading.main_thread()
        while len(seen) < n_runners:
            await asyncio.sleep(0.01)

    of_algorithm(n_runners).execute(algorithm, runner, InMemoryLightningStore())

    assert seen == {number: f"runner-{number}" for number in range(n_runners)}


def test_a_runner_in_the_main_thread_leaves_the_algorithm_to_end_by_itself() -> None:
    runner_left = threading.Event()
    events: list[bool] = []

    async def runner(store: LightningStore, worker_id: int, event: ExecutionEvent) -> None:
        assert threading.current_thread() is threading.main_thread()
        assert worker_id == 0
        runner_left.set()

    async def algorithm(store: LightningStore, event: ExecutionEvent) -> None:
        assert threading.current_thread().name == "algorithm"
        while not runner_left.is_set():
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        events.append(event.is_set())

    of_runner().execute(algorithm, runner, InMemoryLightningStore())

    assert events == [False]


def test_a_runner_in_the_main_thread_ends_when_the_algorithm_is_done() -> None:
    ended: list[bool] = []

    async def runner(store: LightningStore, worker_id: int, event: ExecutionEvent) -> None:
        await serving(store, worker_id, event)
        ended.append(event.is_set())

    of_runner().execute(doing_nothing, runner, InMemoryLightningStore())

    assert ended == [True]


@pytest.mark.parametrize("is_managed", [True, False])
def test_the_store_is_made_safe_for_threads_unless_it_is_not_ours(is_managed: bool) -> None:
    store, seen = InMemoryLightningStore(), list[LightningStore]()

    async def algorithm(given: LightningStore, event: ExecutionEvent) -> None:
        seen.append(given)

    of_algorithm(managed_store=is_managed).execute(algorithm, serving, store)

    assert isinstance(seen[0], LightningStoreThreaded) is is_managed
    assert (seen[0] is store) is not is_managed


# ---------------------------------------------------------------------- failures


@pytest.mark.parametrize("make", [of_algorithm, of_runner], ids=["main algorithm", "main runner"])
def test_what_the_algorithm_raises_is_raised_and_ends_the_runners(make: Any) -> None:
    ended: list[int] = []

    async def algorithm(store: LightningStore, event: ExecutionEvent) -> None:
        raise KeyError("algorithm")

    async def runner(store: LightningStore, worker_id: int, event: ExecutionEvent) -> None:
        await until_stopped(event)
        ended.append(worker_id)

    with pytest.raises(KeyError, match="algorithm"):
        make().execute(algorithm, runner, InMemoryLightningStore())
    assert ended == [0]


@pytest.mark.parametrize("error", [KeyError("runner"), SystemExit(3)], ids=["error", "exit"])
@pytest.mark.parametrize("make", [of_algorithm, of_runner], ids=["main algorithm", "main runner"])
def test_what_a_runner_raises_is_raised_and_ends_the_algorithm(make: Any, error: BaseException) -> None:
    async def algorithm(store: LightningStore, event: ExecutionEvent) -> None:
        await asyncio.sleep(1000)

    async def runner(store: LightningStore, worker_id: int, event: ExecutionEvent) -> None:
        raise error

    with pytest.raises(type(error)):
        make().execute(algorithm, runner, InMemoryLightningStore())


def test_an_algorithm_that_looks_at_the_event_ends_by_itself_when_a_runner_fails() -> None:
    ended: list[bool] = []

    async def algorithm(store: LightningStore, event: ExecutionEvent) -> None:
        await until_stopped(event)
        ended.append(True)

    async def runner(store: LightningStore, worker_id: int, event: ExecutionEvent) -> None:
        raise KeyError("runner")

    with pytest.raises(KeyError, match="runner"):
        of_algorithm(2).execute(algorithm, runner, InMemoryLightningStore())
    assert ended == [True]


@pytest.mark.parametrize("make", [of_algorithm, of_runner], ids=["main algorithm", "main runner"])
def test_ctrl_c_in_the_main_thread_stops_all_and_is_absorbed(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    main_is_algorithm = make is of_algorithm

    async def algorithm(store: LightningStore, event: ExecutionEvent) -> None:
        if main_is_algorithm:
            raise KeyboardInterrupt
        await until_stopped(event)

    async def runner(store: LightningStore, worker_id: int, event: ExecutionEvent) -> None:
        if not main_is_algorithm:
            raise KeyboardInterrupt
        await until_stopped(event)

    make().execute(algorithm, runner, InMemoryLightningStore())

    assert "KeyboardInterrupt received on main thread" in caplog.text


def test_threads_that_do_not_end_are_left_behind_and_named(caplog: pytest.LogCaptureFixture) -> None:
    leave = threading.Event()

    async def runner(store: LightningStore, worker_id: int, event: ExecutionEvent) -> None:
        leave.wait()

    of_algorithm(join_timeout=0.2, graceful_delay=0.05).execute(doing_nothing, runner, InMemoryLightningStore())
    leave.set()

    assert "left behind: runner-0" in caplog.text


# ---------------------------------------------------------------------- the steps of ending


async def run_with(work: Any, event: ThreadingEvent, *, graceful_delay: float) -> Any:
    return await run_until_stopped(work, event.is_set, graceful_delay, abandon_seconds=graceful_delay)


async def test_what_completes_in_its_grace_gives_its_result(caplog: pytest.LogCaptureFixture) -> None:
    event = ThreadingEvent()

    async def work() -> int:
        await until_stopped(event)
        return 7

    asyncio.get_running_loop().call_later(0.05, event.set)
    with caplog.at_level(logging.DEBUG):
        assert await run_with(work(), event, graceful_delay=10.0) == 7
    assert "finished by itself during grace period" in caplog.text


async def test_what_does_not_end_is_cancelled_after_its_grace(caplog: pytest.LogCaptureFixture) -> None:
    event, ended = ThreadingEvent(), list[bool]()
    event.set()

    async def work() -> int:
        try:
            await asyncio.sleep(1000)
        finally:
            ended.append(True)
        return 7

    with caplog.at_level(logging.DEBUG):
        assert await run_with(work(), event, graceful_delay=0.05) is None
    assert ended == [True]
    assert "Graceful delay elapsed; canceling bundle task..." in caplog.text


async def test_what_ignores_being_cancelled_is_abandoned(caplog: pytest.LogCaptureFixture) -> None:
    event, leave = ThreadingEvent(), asyncio.Event()
    event.set()

    async def work() -> None:
        while not leave.is_set():
            try:
                await leave.wait()
            except asyncio.CancelledError:
                continue

    assert await run_with(work(), event, graceful_delay=0.05) is None
    leave.set()
    await asyncio.sleep(0)

    assert "did not stop after cancellation; abandoning task" in caplog.text


def test_a_side_that_is_cancelled_from_within_is_no_failure() -> None:
    async def algorithm(store: LightningStore, event: ExecutionEvent) -> None:
        raise asyncio.CancelledError

    of_runner().execute(algorithm, serving, InMemoryLightningStore())
