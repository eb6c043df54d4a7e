"""Algorithm and runners as processes around a store server."""

import asyncio
import logging
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from agentlightning.errors import ConfigurationError
from agentlightning.execution import ClientServerExecutionStrategy, ExecutionEvent, MultiprocessingEvent, ThreadingEvent
from agentlightning.execution import client_server as module
from agentlightning.store import (
    InMemoryLightningStore,
    LightningStore,
    LightningStoreClient,
    LightningStoreServer,
    SqliteLightningStore,
)
from agentlightning.types import RolloutConfig
from tests.e2e.server_process import free_port, left_behind
from tests.runner.working import PATIENCE_SECONDS

FORK = multiprocessing.get_context("fork")
TWICE = RolloutConfig(max_attempts=3, retry_condition=["unresponsive"])


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    assert left_behind() == []


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AGL_CURRENT_ROLE", "AGL_SERVER_HOST", "AGL_SERVER_PORT", "AGL_MANAGED_STORE", "AGL_STORE_TOKEN"):
        monkeypatch.delenv(name, raising=False)


def a_strategy(**options: Any) -> ClientServerExecutionStrategy:
    return ClientServerExecutionStrategy(
        **{"server_port": free_port(), "graceful_timeout": 3.0, "terminate_timeout": 2.0, **options}
    )


async def until_stopped(event: ExecutionEvent) -> None:
    while not event.is_set():
        await asyncio.sleep(0.01)


async def serving(store: LightningStore, worker_id: int, event: ExecutionEvent) -> None:
    await until_stopped(event)


async def working(store: LightningStore, worker_id: int, event: ExecutionEvent) -> None:
    """Claims and succeeds."""
    name = f"Worker-{worker_id}"
    while not event.is_set():
        claim = await store.dequeue_rollout(worker_id=name, wait=0.2)
        if claim is not None:
            attempt_id = claim.attempt.attempt_id
            await store.update_attempt(claim.rollout_id, attempt_id, status="succeeded", metadata={"pid": os.getpid()})


class Named:
    """Runners whose ids in the store are known; the work gets them in the place of their numbers."""

    def __init__(self, work: Callable[..., Any], start: int = 0) -> None:
        self._work, self._start = work, start

    async def __call__(self, store: LightningStore, worker_id: int, event: ExecutionEvent) -> None:
        await self._work(store, self.store_worker_id(worker_id), event)

    def at_start(self, start: int) -> "Named":
        return Named(self._work, start)

    def store_worker_id(self, number: int) -> str:
        return f"Worker-{number}-{self._start}"

    def owns_worker(self, worker_id: str) -> bool:
        return worker_id.startswith("Worker-")


async def doing_nothing(store: LightningStore, event: ExecutionEvent) -> None:
    return None


def enqueueing(count: int) -> Callable[..., Any]:
    async def algorithm(store: LightningStore, event: ExecutionEvent) -> None:
        ids = [(await store.enqueue_rollout(number, config=TWICE)).rollout_id for number in range(count)]
        done = await store.wait_for_rollouts(rollout_ids=ids, timeout=PATIENCE_SECONDS)
        assert len(done) == count

    return algorithm


# ---------------------------------------------------------------------- configuration


def test_the_environment_says_what_arguments_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGL_CURRENT_ROLE", "runner")
    monkeypatch.setenv("AGL_SERVER_HOST", "trainer")
    monkeypatch.setenv("AGL_SERVER_PORT", "1234")
    monkeypatch.setenv("AGL_MANAGED_STORE", "no")

    strategy = ClientServerExecutionStrategy()
    explicit = ClientServerExecutionStrategy(role="algorithm", server_host="here", server_port=9, managed_store=True)

    assert (strategy.role, strategy.server_host, strategy.server_port, strategy.managed_store) == (
        *("runner", "trainer", 1234),
        False,
    )
    assert (explicit.role, explicit.server_host, explicit.server_port, explicit.managed_store) == (
        *("algorithm", "here", 9),
        True,
    )


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("AGL_SERVER_PORT", "many", "AGL_SERVER_PORT must be an integer"),
        ("AGL_MANAGED_STORE", "perhaps", "AGL_MANAGED_STORE must be one of"),
        ("AGL_CURRENT_ROLE", "boss", "role must be algorithm, runner or both"),
    ],
)
def test_an_environment_that_makes_no_sense_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, words: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=words):
        ClientServerExecutionStrategy()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"role": "boss"}, "role must be"),
        ({"n_runners": 0}, "n_runners must be at least 1"),
        ({"main_process": "runner", "n_runners": 2}, "main_process='runner' requires n_runners to be 1"),
        ({"main_process": "runner", "role": "algorithm"}, "main_process='runner' requires role 'both'"),
        ({"main_process": "both"}, "main_process must be"),
    ],
    ids=str,
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ClientServerExecutionStrategy(**options)


# ---------------------------------------------------------------------- the two sides


async def test_the_algorithm_runs_against_a_server_that_is_stopped_afterwards() -> None:
    strategy = a_strategy()
    seen: list[LightningStore] = []

    async def algorithm(store: LightningStore, event: ExecutionEvent) -> None:
        seen.append(store)
        client = LightningStoreClient(f"http://localhost:{strategy.server_port}")
        await client.enqueue_rollout("task")
        await client.close()

    store = InMemoryLightningStore()
    await strategy._execute_algorithm(algorithm, store, ThreadingEvent())

    assert isinstance(seen[0], LightningStoreServer)
    assert len(await store.query_rollouts()) == 1
    with socket.socket() as trial:
        assert trial.connect_ex(("127.0.0.1", strategy.server_port)) != 0


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()], ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("is_managed", [True, False])
def test_an_algorithm_that_fails_sets_the_event_and_passes_its_error(error: BaseException, is_managed: bool) -> None:
    strategy, event = a_strategy(managed_store=is_managed), ThreadingEvent()

    async def algorithm(store: LightningStore, event: ExecutionEvent) -> None:
        raise error

    with pytest.raises(type(error)):
        asyncio.run(strategy._execute_algorithm(algorithm, InMemoryLightningStore(), event))
    assert event.is_set()


async def test_a_store_that_is_not_ours_goes_to_both_sides_as_it_is() -> None:
    strategy, store, seen = a_strategy(managed_store=False), InMemoryLightningStore(), list[LightningStore]()

    async def algorithm(given: LightningStore, event: ExecutionEvent) -> None:
        seen.append(given)

    async def runner(given: LightningStore, worker_id: int, event: ExecutionEvent) -> None:
        seen.append(given)

    await strategy._execute_algorithm(algorithm, store, ThreadingEvent())
    await strategy._execute_runner(runner, 0, store, ThreadingEvent())

    assert seen == [store, store]


class FakeServer(InMemoryLightningStore):
    """Notes how it is made and what is done to it."""

    made: ClassVar[list[Any]] = []

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__()
        self.made.append((args, options))

    async def start(self) -> None:
        self.made.append("start")

    async def stop(self) -> None:
        self.made.append("stop")


async def test_the_server_is_made_as_tests_of_the_0_2_release_expect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeServer, "made", [])
    monkeypatch.setattr(module, "LightningStoreServer", FakeServer)
    store, strategy = InMemoryLightningStore(), a_strategy(server_host="127.0.0.1", server_port=5)

    await strategy._execute_algorithm(doing_nothing, store, ThreadingEvent())

    assert FakeServer.made == [((store,), {"host": "127.0.0.1", "port": 5}), "start", "stop"]


async def test_a_runner_s_client_is_made_and_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    made: ClassVar[list[Any]] = []

    class FakeClient(InMemoryLightningStore):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__()
            made.append((args, options))

        async def close(self) -> None:
            made.append("close")

    monkeypatch.setattr(module, "LightningStoreClient", FakeClient)
    strategy, event = a_strategy(), ThreadingEvent()
    event.set()

    async def runner(store: LightningStore, worker_id: int, event: ExecutionEvent) -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await strategy._execute_runner(runner, 0, InMemoryLightningStore(), event)

    assert made == [((f"http://localhost:{strategy.server_port}",), {}), "close"]


def test_a_port_in_use_ends_the_runners_too() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        strategy = a_strategy(server_host="127.0.0.1", server_port=holder.getsockname()[1], n_runners=2)

        with pytest.raises(RuntimeError, match="Another process may already be using this port"):
            strategy.execute(doing_nothing, serving, InMemoryLightningStore())


def test_other_machines_are_let_in_with_a_token_only(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = a_strategy(server_host="0.0.0.0")

    with pytest.raises(ConfigurationError, match=r"server_host 0\.0\.0\.0 lets other machines in"):
        strategy.execute(doing_nothing, serving, InMemoryLightningStore())
    monkeypatch.setenv("AGL_STORE_TOKEN", "a-secret-token-of-some-length")
    strategy.execute(enqueueing(2), working, InMemoryLightningStore())


def test_other_machines_are_let_in_where_the_user_says_so() -> None:
    store = InMemoryLightningStore()

    a_strategy(server_host="0.0.0.0", insecure=True).execute(enqueueing(2), working, store)

    assert outcomes(store) == [["succeeded"]] * 2


# ---------------------------------------------------------------------- processes


def a_process(target: Callable[..., None], *args: Any) -> Any:
    process = FORK.Process(target=target, args=args, name=target.__name__)
    process.start()
    return process


def obedient(event: MultiprocessingEvent) -> None:
    event.wait(PATIENCE_SECONDS)


def deaf_to(*numbers: int) -> Callable[[Any], None]:
    def deaf(ready: Any) -> None:
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)
        ready.set()
        time.sleep(PATIENCE_SECONDS)

    return deaf


def interruptible(ready: Any) -> None:
    signal.signal(signal.SIGINT, lambda *_: os._exit(0))
    ready.set()
    time.sleep(PATIENCE_SECONDS)


def test_processes_that_obey_end_at_once() -> None:
    event = MultiprocessingEvent(ctx=FORK)
    processes = [a_process(obedient, event) for _ in range(3)]

    a_strategy(graceful_timeout=20)._shutdown_processes(processes, event)

    assert [process.exitcode for process in processes] == [0, 0, 0]


@pytest.mark.parametrize(
    ("target", "exit_code"),
    [
        (interruptible, 0),
        (deaf_to(signal.SIGINT), -signal.SIGTERM),
        (deaf_to(signal.SIGINT, signal.SIGTERM), -signal.SIGKILL),
    ],
    ids=["interrupted", "terminated", "killed"],
)
def test_those_that_do_not_obey_are_ended_step_by_step(target: Any, exit_code: int) -> None:
    ready = FORK.Event()
    process = a_process(target, ready)
    assert ready.wait(PATIENCE_SECONDS)

    a_strategy(graceful_timeout=0.1, terminate_timeout=0.5)._shutdown_processes([process], ThreadingEvent())

    assert process.exitcode == exit_code


@pytest.mark.parametrize(("code", "is_fine"), [(0, True), (None, True), (-15, True), (1, False), (-9, False)])
def test_exit_codes_are_checked(code: int | None, is_fine: bool) -> None:
    class Fake:
        name = "runner-0"
        exitcode = code

    def check() -> None:
        a_strategy()._check_process_exitcodes([Fake()])  # type: ignore[list-item] # no more is looked at

    if is_fine:
        check()
    else:
        with pytest.raises(RuntimeError, match=f"Subprocesses failed: .*runner-0.*{code}"):
            check()


def test_processes_have_their_names() -> None:
    strategy, event = a_strategy(n_runners=2, managed_store=False), MultiprocessingEvent(ctx=FORK)
    store = InMemoryLightningStore()

    processes = strategy._spawn_runners(serving, store, event, ctx=FORK)
    processes.append(strategy._spawn_algorithm_process(doing_nothing, store, event, ctx=FORK))
    strategy._shutdown_processes(processes, event)

    names = {process.name: process.exitcode for process in processes}
    assert names == {"runner-0": 0, "runner-1": 0, "algorithm": 0}


# ---------------------------------------------------------------------- placing both


def test_runners_work_in_processes_of_their_own() -> None:
    store = InMemoryLightningStore()

    a_strategy(n_runners=4).execute(enqueueing(20), working, store)

    attempts = [asyncio.run(store.get_latest_attempt(r.rollout_id)) for r in asyncio.run(store.query_rollouts())]
    pids = {(attempt.metadata or {})["pid"] for attempt in attempts if attempt is not None}
    assert os.getpid() not in pids


def test_a_runner_in_the_main_process_ends_when_the_algorithm_is_done(tmp_path: Path) -> None:
    seen: list[int] = []

    async def runner(store: LightningStore, worker_id: int, event: ExecutionEvent) -> None:
        seen.append(os.getpid())
        await working(store, worker_id, event)

    with SqliteStoreFile(tmp_path) as store:
        a_strategy(main_process="runner").execute(enqueueing(5), runner, store)

    assert seen == [os.getpid()]


class SqliteStoreFile:
    """A SQLite store, closed at the end."""

    def __init__(self, folder: Path) -> None:
        self._store = SqliteLightningStore(folder / "store.db")

    def __enter__(self) -> SqliteLightningStore:
        return self._store

    def __exit__(self, *_: object) -> None:
        asyncio.run(self._store.close())


def test_a_runner_in_the_main_process_leaves_the_algorithm_to_end_by_itself(tmp_path: Path) -> None:
    mark = tmp_path / "done"

    async def algorithm(store: LightningStore, event: ExecutionEvent) -> None:
        await asyncio.sleep(0.2)
        assert not event.is_set()
        mark.write_text("done")

    async def runner(store: LightningStore, worker_id: int, event: ExecutionEvent) -> None:
        return None

    a_strategy(main_process="runner").execute(algorithm, runner, InMemoryLightningStore())

    assert mark.exists()


@pytest.mark.parametrize("is_killed", [False, True], ids=["fails", "is killed"])
def test_an_algorithm_process_that_ends_badly_is_told(is_killed: bool) -> None:
    async def algorithm(store: LightningStore, event: ExecutionEvent) -> None:
        if is_killed:
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("no")

    with pytest.raises(RuntimeError, match=r"Subprocesses failed: .*algorithm"):
        a_strategy(main_process="runner").execute(algorithm, working, InMemoryLightningStore())


def test_a_keyboard_interrupt_is_absorbed_when_all_has_ended() -> None:
    async def algorithm(store: LightningStore, event: ExecutionEvent) -> None:
        raise KeyboardInterrupt

    a_strategy(n_runners=2).execute(algorithm, serving, InMemoryLightningStore())

    assert multiprocessing.active_children() == []


def test_one_runner_of_several_that_raises_ends_the_training() -> None:
    async def runner(store: LightningStore, worker_id: int, event: ExecutionEvent) -> None:
        if worker_id == 1:
            raise ValueError("cannot start")
        await until_stopped(event)

    with pytest.raises(RuntimeError, match=r"Subprocesses failed: .*runner-1"):
        a_strategy(n_runners=2).execute(enqueueing(1), runner, InMemoryLightningStore())


def test_a_training_whose_runners_all_died_raises_instead_of_waiting() -> None:
    async def runner(store: LightningStore, worker_id: int, event: ExecutionEvent) -> None:
        await store.dequeue_rollout(worker_id=f"Worker-{worker_id}", wait=PATIENCE_SECONDS)
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RuntimeError, match=r"Subprocesses failed: .*runner-0"):
        a_strategy(n_runners=2).execute(enqueueing(10), runner, InMemoryLightningStore())


def dying_once(flag: Path) -> Callable[..., Any]:
    """A runner of which the first that claims is killed in mid-rollout."""

    async def runner(store: LightningStore, worker_id: str, event: ExecutionEvent) -> None:
        while not event.is_set():
            claim = await store.dequeue_rollout(worker_id=worker_id, wait=0.2)
            if claim is None:
                continue
            try:
                flag.touch(exist_ok=False)
            except FileExistsError:
                await store.update_attempt(claim.rollout_id, claim.attempt.attempt_id, status="succeeded")
            else:
                os.kill(os.getpid(), signal.SIGKILL)

    return Named(runner)


def outcomes(store: InMemoryLightningStore) -> list[list[str]]:
    """The statuses of the attempts of each rollout."""
    ids = [rollout.rollout_id for rollout in asyncio.run(store.query_rollouts())]
    return [[attempt.status for attempt in asyncio.run(store.query_attempts(rollout_id))] for rollout_id in ids]


def test_what_a_killed_runner_was_at_is_done_by_another(tmp_path: Path) -> None:
    store = InMemoryLightningStore()

    with pytest.raises(RuntimeError, match="Subprocesses failed: "):
        a_strategy(n_runners=2).execute(enqueueing(6), dying_once(tmp_path / "died"), store)

    tries = outcomes(store)
    assert all(attempts.count("succeeded") == 1 for attempts in tries)
    assert sorted(map(len, tries)) == [1, 1, 1, 1, 1, 2]


def test_a_killed_runner_is_started_again_if_that_is_allowed(tmp_path: Path) -> None:
    store = InMemoryLightningStore()

    a_strategy(n_runners=1, max_restarts=1).execute(enqueueing(6), dying_once(tmp_path / "died"), store)

    tries = outcomes(store)
    assert all(attempts.count("succeeded") == 1 for attempts in tries)
    assert sorted(map(len, tries)) == [1, 1, 1, 1, 1, 2]


def test_this_process_forks_nothing_once_the_store_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forked, ours, fork = list[int](), os.getpid(), os.fork
    monkeypatch.setattr(os, "fork", lambda: forked.append(os.getpid()) or fork())
    counts: list[int] = []

    async def algorithm(store: LightningStore, event: ExecutionEvent) -> None:
        counts.append(forked.count(ours))
        await enqueueing(6)(store, event)
        counts.append(forked.count(ours))

    a_strategy(n_runners=2, max_restarts=1).execute(algorithm, dying_once(tmp_path / "died"), InMemoryLightningStore())

    assert (tmp_path / "died").exists()
    assert counts == [2, 2]  # though a runner was started again meanwhile


def test_what_a_runner_claims_that_was_started_again_is_not_given_back(tmp_path: Path) -> None:
    died, seen = tmp_path / "died", tmp_path / "seen"

    async def runner(store: LightningStore, worker_id: str, event: ExecutionEvent) -> None:
        claim = await store.dequeue_rollout(worker_id=worker_id, wait=PATIENCE_SECONDS)
        assert claim is not None
        if not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        while len(await store.query_rollouts(status_in=["preparing"])) > 1:  # until the dead one's is given back
            await asyncio.sleep(0.01)
        latest = await store.get_latest_attempt(claim.rollout_id)
        assert latest is not None
        seen.write_text(latest.status)
        await store.update_attempt(claim.rollout_id, latest.attempt_id, status="succeeded")
        await working(store, 1, event)

    store = InMemoryLightningStore()
    a_strategy(max_restarts=1).execute(enqueueing(2), Named(runner), store)

    assert seen.read_text() == "preparing"
    assert sorted(outcomes(store)) == [["succeeded"], ["unresponsive", "succeeded"]]


def test_a_runner_that_always_dies_is_not_started_for_ever() -> None:
    async def runner(store: LightningStore, worker_id: int, event: ExecutionEvent) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RuntimeError, match=r"Subprocesses failed: .*runner-0"):
        a_strategy(max_restarts=2).execute(enqueueing(1), runner, InMemoryLightningStore())


def test_a_runner_that_awaits_for_ever_ends_by_itself_while_it_is_served(caplog: pytest.LogCaptureFixture) -> None:
    async def runner(store: LightningStore, worker_id: int, event: ExecutionEvent) -> None:
        await store.enqueue_rollout("ready")
        try:
            await asyncio.sleep(1000)
        finally:
            await store.enqueue_rollout("left")

    async def algorithm(store: LightningStore, event: ExecutionEvent) -> None:
        while not await store.query_rollouts():
            await asyncio.sleep(0.01)

    store = InMemoryLightningStore()
    with caplog.at_level(logging.WARNING):
        a_strategy(graceful_timeout=0.2).execute(algorithm, runner, store)

    assert [rollout.input for rollout in asyncio.run(store.query_rollouts())] == ["ready", "left"]
    assert "did not end" not in caplog.text


async def hanging(store: LightningStore, worker_id: str, event: ExecutionEvent) -> None:
    """A runner that claims, and heeds nobody any more."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    await store.dequeue_rollout(worker_id, wait=20)
    while True:
        time.sleep(1)  # noqa: ASYNC251 # that is what is wrong with it


def test_a_runner_that_hangs_is_ended_in_the_stated_time_and_its_attempt_too() -> None:
    async def algorithm(store: LightningStore, event: ExecutionEvent) -> None:
        await store.enqueue_rollout("task", rollout_id="r")
        while not await store.query_attempts("r"):
            await asyncio.sleep(0.01)

    store, began = InMemoryLightningStore(), time.monotonic()
    with pytest.raises(RuntimeError, match=r"Subprocesses failed: .*-9"):
        a_strategy(graceful_timeout=0.5, terminate_timeout=0.5).execute(algorithm, Named(hanging), store)

    assert time.monotonic() - began < 20
    assert [attempt.status for attempt in asyncio.run(store.query_attempts("r"))] == ["unresponsive"]


@pytest.mark.parametrize("n_runners", [1, 2])
def test_runners_alone_work_for_a_server_elsewhere(n_runners: int) -> None:
    port = free_port()
    algorithm_side = a_strategy(role="algorithm", server_port=port)
    runner_side = a_strategy(role="runner", server_port=port, n_runners=n_runners)

    async def run_some(store: LightningStore, worker_id: int, event: ExecutionEvent) -> None:
        for _number in range(2 // n_runners):
            claim = None
            while claim is None:
                claim = await store.dequeue_rollout(worker_id=f"Worker-{worker_id}", wait=1.0)
            await store.update_attempt(claim.rollout_id, claim.attempt.attempt_id, status="succeeded")

    store = InMemoryLightningStore()
    serving_side = threading.Thread(target=algorithm_side.execute, args=(enqueueing(2), serving, store))
    serving_side.start()
    runner_side.execute(doing_nothing, run_some, InMemoryLightningStore())
    serving_side.join(PATIENCE_SECONDS)

    assert outcomes(store) == [["succeeded"], ["succeeded"]]


# ---------------------------------------------------------------------- spawn


async def spawned_runner(store: LightningStore, worker_id: int, event: ExecutionEvent) -> None:
    await working(store, worker_id, event)


@pytest.mark.slow
@pytest.mark.parametrize("max_restarts", [0, 1])
def test_what_can_be_pickled_runs_under_spawn(max_restarts: int) -> None:
    strategy = a_strategy(start_method="spawn", n_runners=2, graceful_timeout=15, max_restarts=max_restarts)

    store = InMemoryLightningStore()
    strategy.execute(enqueueing(4), spawned_runner, store)

    assert outcomes(store) == [["succeeded"]] * 4


def test_what_cannot_be_pickled_is_told_under_spawn() -> None:
    async def closure(store: LightningStore, worker_id: int, event: ExecutionEvent) -> None:
        return None

    with pytest.raises(ConfigurationError, match="cannot be pickled"):
        a_strategy(start_method="spawn").execute(doing_nothing, closure, InMemoryLightningStore())


# ---------------------------------------------------------------------- a port that is free


def can_be_taken(port: int) -> bool:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            other.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def test_port_0_is_kept_from_others_until_the_store_is_served() -> None:
    strategy = a_strategy(server_host="127.0.0.1", server_port=0)
    port = strategy.server_port

    is_free = can_be_taken(port)
    strategy.execute(enqueueing(2), working, InMemoryLightningStore())
    strategy.execute(enqueueing(2), working, InMemoryLightningStore())

    assert not is_free
    assert (strategy.server_port, can_be_taken(port)) == (port, True)


@pytest.mark.parametrize("options", [{"main_process": "runner"}, {"max_restarts": 1}, {"n_runners": 3}], ids=str)
def test_port_0_is_where_runners_find_the_store(options: dict[str, Any]) -> None:
    store = InMemoryLightningStore()
    strategy = a_strategy(server_port=0, **options)

    if "main_process" in options:
        strategy.execute(enqueueing(1), working, SqliteLightningStore())
    else:
        strategy.execute(enqueueing(3), working, store)
        assert outcomes(store) == [["succeeded"]] * 3


# ---------------------------------------------------------------------- the default port


@pytest.fixture
def default_port(monkeypatch: pytest.MonkeyPatch) -> int:
    """One of this test's own."""
    monkeypatch.setattr(module, "DEFAULT_PORT", free_port())
    return module.DEFAULT_PORT


def test_the_default_port_is_used_and_let_go(default_port: int, caplog: pytest.LogCaptureFixture) -> None:
    strategy, store = a_strategy(server_port=None), InMemoryLightningStore()

    strategy.execute(enqueueing(1), working, store)
    strategy.execute(enqueueing(1), working, store)

    assert strategy.server_port == default_port
    assert outcomes(store) == [["succeeded"]] * 2
    assert can_be_taken(default_port)
    assert "is taken" not in caplog.text


@pytest.mark.parametrize("options", [{"main_process": "runner"}, {"n_runners": 2}], ids=str)
def test_runners_find_the_store_where_the_default_port_is_taken(default_port: int, options: dict[str, Any]) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", default_port))
        holder.listen()
        strategy = a_strategy(server_port=None, **options)

        strategy.execute(enqueueing(2), working, SqliteLightningStore())

    assert strategy.server_port != default_port
    assert can_be_taken(strategy.server_port)
