"""Trainer and runner have the same life cycle: init, start, pause, resume, stop, error and retry, and a state."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.errors import InvalidTransition, StoreUnavailable

PATIENCE_SECONDS = 30.0


@agl.rollout
def agent(task: Any, resources: agl.NamedResources) -> float:
    return 1.0


class Endless(agl.Algorithm):
    """Runs until it is stopped; never calls `super().__init__()`."""

    def __init__(self) -> None:
        self.steps = 0

    async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:  # type: ignore[override]
        while True:
            self.steps += 1
            await asyncio.sleep(0.01)


def a_trainer(**options: Any) -> agl.Trainer:
    defaults: dict[str, Any] = {"strategy": "shm", "progress": "off", "tracer": agl.DummyTracer()}
    return agl.Trainer(**{**defaults, "initial_resources": {}, "algorithm": Endless(), **options})


@contextmanager
def trainer() -> Iterator[agl.Trainer]:
    made = a_trainer()
    made.add_agent(agent)
    yield made


@contextmanager
def runner() -> Iterator[Any]:
    made = agl.LitAgentRunner[Any](agl.DummyTracer(), agent=agent, heartbeat_interval=0, poll_interval=0.05)
    made.init_worker(0, agl.InMemoryLightningStore())
    yield made
    made.teardown_worker(0)
    made.teardown()


COMPONENTS = pytest.mark.parametrize("component", [trainer, runner], ids=lambda make: make.__name__)


@COMPONENTS
@pytest.mark.claim(362, 363, 364, 365, 513)
def test_a_component_lives_as_the_state_diagram_has_it(component: Any) -> None:
    with component() as part:
        seen = [part.state.value]
        for step in (part.init, part.start, part.pause, part.resume):
            step()
            seen.append(part.state.value)
        part.stop()
        seen.append(part.wait(PATIENCE_SECONDS).value)

    assert seen == ["created", "ready", "running", "paused", "running", "stopped"]


@COMPONENTS
def test_a_component_that_stopped_may_start_again(component: Any) -> None:
    with component() as part:
        for _ in range(2):
            part.start()
            part.stop()
            state = part.wait(PATIENCE_SECONDS)

    assert state == "stopped"


@COMPONENTS
@pytest.mark.claim(366, 513)
def test_an_error_ends_a_component_as_failed_and_retry_makes_it_ready(component: Any) -> None:
    error = ValueError("it does not work")
    with component() as part:
        part.start()
        part.error(error)
        with pytest.raises(ValueError, match="it does not work"):
            part.wait(PATIENCE_SECONDS)
        failed = (part.state.value, part.failure)
        if component is not trainer:  # whose retry is a training
            part.retry()

    assert failed == ("failed", error)
    assert component is trainer or part.state in ("ready", "stopped")  # a runner was torn down


@COMPONENTS
def test_a_step_that_is_not_possible_is_refused_with_those_that_are(component: Any) -> None:
    with component() as part:
        for step in ("pause", "resume", "stop", "retry"):
            with pytest.raises(InvalidTransition, match=f"is created and cannot {step}; from here it can"):
                getattr(part, step)()


@COMPONENTS
def test_a_component_starts_once_at_a_time(component: Any) -> None:
    with component() as part:
        part.start()
        with pytest.raises(InvalidTransition, match="is running and cannot start"):
            part.start()
        part.stop()
        part.wait(PATIENCE_SECONDS)


# ---------------------------------------------------------------------- the trainer


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it has not come true"
        time.sleep(0.01)


def test_a_training_in_the_background_does_its_work() -> None:
    done = a_trainer(algorithm=agl.Baseline(polling_interval=0.05))

    done.start(agent, [1, 2])

    assert done.wait(PATIENCE_SECONDS) == "stopped"
    assert [r.status for r in asyncio.run(done.store.query_rollouts())] == ["succeeded"] * 2


def test_a_training_that_cannot_begin_is_refused_by_start_itself() -> None:
    with pytest.raises(ValueError, match="There is no agent"):
        a_trainer().start()


class FailsOnce(agl.Algorithm):
    def __init__(self) -> None:
        self.datasets: list[Any] = []

    async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:  # type: ignore[override]
        self.datasets.append((train_dataset, val_dataset))
        if len(self.datasets) == 1:
            raise ValueError("once")


def test_a_retry_remembers_the_agent_and_the_data_of_the_training_that_failed() -> None:
    algorithm = FailsOnce()
    failing = a_trainer(algorithm=algorithm)
    with pytest.raises(ValueError, match="once"):
        failing.fit(agent, [1], [2])

    failing.retry()

    assert algorithm.datasets == [([1], [2])] * 2
    assert failing.state == "stopped"


def test_an_error_that_is_reported_ends_the_fit_and_its_run() -> None:
    reported = a_trainer()
    reported.start(agent)

    reported.error(ValueError("the judge is down"))
    with pytest.raises(ValueError, match="the judge is down"):
        reported.wait(PATIENCE_SECONDS)

    (run,) = asyncio.run(reported.store.query_runs())
    assert (run.status, "the judge is down" in str(run.summary)) == ("failed", True)


class OldAlgorithm(agl.Algorithm):
    """Uses the names of the life cycle for itself, as algorithms of earlier releases may."""

    def __init__(self) -> None:
        self.state = "epoch 3"
        self.resume = True

    def stop(self) -> str:
        return "its own"

    def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
        self.state = "done"


def test_an_old_algorithm_that_uses_these_names_for_itself_still_trains() -> None:
    algorithm: Any = OldAlgorithm()

    a_trainer(algorithm=algorithm).fit(agent)

    assert (algorithm.state, algorithm.stop(), algorithm.resume) == ("done", "its own", True)


# ---------------------------------------------------------------------- runners


def test_a_runner_in_the_background_works_off_the_queue() -> None:
    store = agl.InMemoryLightningStore()
    made = agl.LitAgentRunner[Any](agl.DummyTracer(), heartbeat_interval=0, poll_interval=0.05)
    with made.run_context(agent=agent, store=store):
        asyncio.run(store.add_resources({}))
        sent = asyncio.run(store.enqueue_rollout("task"))

        made.start()
        done = asyncio.run(store.wait_for_rollouts(rollout_ids=[sent.rollout_id], timeout=PATIENCE_SECONDS))
        made.stop()

        assert made.wait(PATIENCE_SECONDS) == "stopped"
    assert [rollout.status for rollout in done] == ["succeeded"]


class OwnRunner(agl.Runner[str]):
    """A runner of a user, who knows nothing of life cycles."""

    async def step(self, input: str, *, resources: Any = None, mode: Any = None, event: Any = None) -> agl.Rollout:
        await asyncio.sleep(0)
        return agl.Rollout(rollout_id=f"ro-{input}", input=input, start_time=0.0)

    async def iter(self, *, event: Any = None) -> None:
        await asyncio.sleep(0)


@pytest.mark.claim(169)
def test_any_runner_can_step_from_plain_code() -> None:
    assert OwnRunner().step_sync("1").rollout_id == "ro-1"


@pytest.mark.claim(169)
async def test_any_runner_can_step_from_plain_code_inside_an_event_loop() -> None:
    assert OwnRunner().step_sync("1").rollout_id == "ro-1"


def test_any_runner_can_work_in_the_background() -> None:
    own = OwnRunner()

    own.start()

    assert own.wait(PATIENCE_SECONDS) == "stopped"


# ---------------------------------------------------------------------- stores


def memory(folder: Path) -> agl.LightningStore:
    return agl.InMemoryLightningStore()


def sqlite(folder: Path) -> agl.LightningStore:
    return agl.SqliteLightningStore(folder / "runs.db")


def threaded(folder: Path) -> agl.LightningStore:
    return agl.LightningStoreThreaded(agl.InMemoryLightningStore())


def server(folder: Path) -> agl.LightningStore:
    return agl.LightningStoreServer(agl.InMemoryLightningStore(), port=0)


STORES = pytest.mark.parametrize("make", [memory, sqlite, threaded, server], ids=lambda make: make.__name__)


@STORES
@pytest.mark.claim(175)
async def test_a_store_is_open_until_it_is_closed_and_then_refuses(make: Any, tmp_path: Path) -> None:
    store = make(tmp_path)
    await store.enqueue_rollout("task")
    assert store.state == "open"

    await store.close()

    assert store.state == "closed"
    for call in (lambda: store.enqueue_rollout("task"), store.query_rollouts, store.statistics):
        with pytest.raises(StoreUnavailable):
            await call()


def test_a_blocking_store_is_closed_before_the_store_behind_it() -> None:
    store = agl.InMemoryLightningStore()
    blocking = agl.BlockingStore(store)
    assert blocking.state == "open"

    blocking.close()

    assert (blocking.state, store.state) == ("closed", "open")


async def test_a_client_is_closed_until_it_is_used_again(tmp_path: Path) -> None:
    async with agl.InMemoryLightningStore() as store:
        served = agl.LightningStoreServer(store, port=0)
        await served.start()
        client = agl.LightningStoreClient(served.endpoint)
        states = [client.state]
        await client.close()
        states.append(client.state)
        await client.query_rollouts()
        states.append(client.state)
        await client.close()
        await served.stop()

    assert states == ["open", "closed", "open"]


def test_a_store_of_a_user_may_have_a_state_of_its_own() -> None:
    class Own(agl.LightningStore):
        def __init__(self) -> None:
            self.state = {"rows": 0}  # type: ignore[assignment] # as such a class does

    own: Any = Own()

    assert own.state == {"rows": 0}


def test_threads_are_gone_when_all_has_stopped() -> None:
    running = a_trainer()
    before = {thread.name for thread in threading.enumerate()}

    running.start(agent)
    running.stop()
    running.wait(PATIENCE_SECONDS)

    until(lambda: {thread.name for thread in threading.enumerate()} <= before)
