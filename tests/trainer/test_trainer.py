"""Trainer: its parts in every form, its runs, and what it says of wrong use."""

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentlightning.adapter import TracerTraceToTriplet
from agentlightning.algorithm import Algorithm, Baseline, algo
from agentlightning.emitter import find_final_reward
from agentlightning.errors import ConfigurationError, InvalidTransition, TrainingError
from agentlightning.execution import (
    ClientServerExecutionStrategy,
    ExecutionEvent,
    ExecutionStrategy,
    SharedMemoryExecutionStrategy,
)
from agentlightning.litagent import LitAgent, rollout
from agentlightning.runner import LitAgentRunner
from agentlightning.store import InMemoryLightningStore, LightningStore, LightningStoreClient, SqliteLightningStore
from agentlightning.tracer import AgentOpsTracer, DummyTracer, OtelTracer
from agentlightning.trainer import Trainer
from agentlightning.types import Hook, NamedResources, PromptTemplate, Rollout, RolloutRawResult, Run
from agentlightning.types.lifecycle import LifecycleState
from tests.e2e.server_process import ServerProcess, free_port, left_behind
from tests.runner.test_stores import OldStore
from tests.runner.working import PATIENCE_SECONDS, RESOURCES, Answering


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("AGL_CURRENT_ROLE", "AGL_SERVER_HOST", "AGL_SERVER_PORT", "AGL_MANAGED_STORE", "AGL_STORE_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    yield
    assert left_behind() == []


class Halving(LitAgent[Any]):
    """Rewards half of its task."""

    def rollout(self, task: Any, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        return task / 2


def a_trainer(**options: Any) -> Trainer:
    defaults: dict[str, Any] = {
        "strategy": "shm",
        "progress": "off",
        "initial_resources": RESOURCES,
        "tracer": DummyTracer(),
        "algorithm": Baseline(polling_interval=0.1),
    }
    return Trainer(**{**defaults, **options})


def over_processes(**options: Any) -> Trainer:
    return a_trainer(
        **{"strategy": ClientServerExecutionStrategy(server_port=free_port(), n_runners=options.pop("n", 1)), **options}
    )


def runs_of(store: LightningStore) -> list[Run]:
    return list(asyncio.run(store.query_runs()))


def rewards_of(store: LightningStore) -> list[float | None]:
    async def read() -> list[float | None]:
        rollouts = await store.query_rollouts(sort_by="start_time")
        return [find_final_reward(list(await store.query_spans(r.rollout_id))) for r in rollouts]

    return asyncio.run(read())


def until(condition: Any) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it has not come true"
        time.sleep(0.01)


# ---------------------------------------------------------------------- parts


def test_all_parts_have_defaults() -> None:
    trainer = Trainer(progress="off")

    assert isinstance(trainer.store, InMemoryLightningStore)
    assert isinstance(trainer.adapter, TracerTraceToTriplet)
    assert isinstance(trainer.runner, LitAgentRunner)
    assert isinstance(trainer.strategy, ClientServerExecutionStrategy)
    assert trainer.runner.tracer is trainer.tracer
    assert trainer.triplet_exporter is trainer.adapter
    assert (trainer.algorithm, trainer.llm_proxy, trainer.hooks) == (None, None, ())
    assert (trainer.n_runners, trainer.max_rollouts) == (1, None)


def test_a_trainer_takes_keywords_only() -> None:
    with pytest.raises(TypeError):
        Trainer("shm")  # type: ignore[misc] # on purpose


@pytest.mark.parametrize(
    "spec",
    [
        DummyTracer(),
        DummyTracer,
        lambda: DummyTracer(),
        "agentlightning.tracer.DummyTracer",
        {"type": "agentlightning.tracer.DummyTracer"},
    ],
    ids=["instance", "class", "factory", "path", "dict"],
)
def test_a_part_may_be_given_in_every_form(spec: Any) -> None:
    trainer = Trainer(tracer=spec, progress="off")

    assert isinstance(trainer.tracer, DummyTracer)
    assert isinstance(trainer.runner, LitAgentRunner)
    assert trainer.runner.tracer is trainer.tracer


def test_an_adapter_s_arguments_need_no_type() -> None:
    trainer = Trainer(adapter={"agent_match": "writer"}, progress="off")

    assert isinstance(trainer.adapter, TracerTraceToTriplet)
    assert trainer.adapter.agent_match == "writer"


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        ("shm", SharedMemoryExecutionStrategy),
        ("cs", ClientServerExecutionStrategy),
        (SharedMemoryExecutionStrategy, SharedMemoryExecutionStrategy),
        ({"type": "shm"}, SharedMemoryExecutionStrategy),
        ({"name": "cs"}, ClientServerExecutionStrategy),
    ],
    ids=["shm", "cs", "class", "type", "name"],
)
def test_a_strategy_gets_the_number_of_runners(spec: Any, kind: type[ExecutionStrategy]) -> None:
    trainer = Trainer(strategy=spec, n_runners=3, progress="off")

    assert isinstance(trainer.strategy, kind)
    assert (trainer.strategy.n_runners, trainer.n_runners) == (3, 3)


def test_a_strategy_s_number_of_runners_wins() -> None:
    trainer = Trainer(strategy=ClientServerExecutionStrategy(n_runners=5), n_runners=2, progress="off")

    assert trainer.n_runners == trainer.n_workers == 5


def test_a_strategy_that_does_not_say_leaves_the_number_alone() -> None:
    class Own(ExecutionStrategy):
        """Says nothing of runners."""

    assert Trainer(strategy=Own(), n_runners=4, progress="off").n_runners == 4


def test_a_port_is_that_of_the_strategy() -> None:
    strategy = ClientServerExecutionStrategy(server_port=1)

    assert Trainer(port=9, progress="off").strategy.server_port == 9  # type: ignore[attr-defined] # it is a cs
    assert Trainer(strategy="cs", port=9, progress="off").strategy.server_port == 9  # type: ignore[attr-defined] # as above
    Trainer(strategy=strategy, port=9, progress="off")
    assert strategy.server_port == 9


def test_max_rollouts_are_those_of_the_runner() -> None:
    trainer = Trainer(max_rollouts=7, progress="off")

    assert isinstance(trainer.runner, LitAgentRunner)
    assert (trainer.runner._max_rollouts, trainer.max_tasks) == (7, 7)


def test_a_runner_s_arguments_need_no_type() -> None:
    trainer = Trainer(runner={"max_concurrency": 8}, max_rollouts=3, progress="off")

    assert isinstance(trainer.runner, LitAgentRunner)
    assert (trainer.runner._max_concurrency, trainer.runner._max_rollouts) == (8, 3)


def test_hooks_may_be_one_or_several() -> None:
    hook = Hook()

    assert Trainer(hooks=hook, progress="off").hooks == (hook,)
    assert Trainer(hooks=[hook, hook], progress="off").hooks == (hook, hook)


@pytest.mark.parametrize(
    ("options", "message", "attribute", "value"),
    [
        ({"n_workers": 3}, "n_workers", "n_runners", 3),
        ({"max_tasks": 3}, "max_tasks", "max_rollouts", 3),
        ({"n_workers": 3, "n_runners": 2}, "'n_workers' is ignored", "n_runners", 2),
        ({"max_tasks": 3, "max_rollouts": 2}, "'max_tasks' is ignored", "max_rollouts", 2),
        ({"dev": True}, "dev=True", "n_runners", 1),
        ({"triplet_exporter": {"agent_match": "x"}}, "triplet_exporter", "n_runners", 1),
        ({"triplet_exporter": {}, "adapter": {}}, "adapter is used", "n_runners", 1),
    ],
    ids=str,
)
def test_old_arguments_are_deprecated(options: dict[str, Any], message: str, attribute: str, value: Any) -> None:
    with pytest.warns(DeprecationWarning, match="deprecated|are given") as warned:
        trainer = Trainer(**options, progress="off")

    assert any(message in str(warning.message) for warning in warned)
    assert {warning.filename for warning in warned} == {__file__}
    assert getattr(trainer, attribute) == value


def test_daemon_has_no_effect_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    Trainer(daemon=False, progress="off")

    assert "daemon=False has no effect" in caplog.text


def test_a_sqlite_store_may_be_named(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    for spec in (f"sqlite:///{path}", str(path), path):
        store = Trainer(store=spec, progress="off").store

        assert isinstance(store, SqliteLightningStore)
        assert Path(str(store.path)) == path
        asyncio.run(store.close())


def test_a_server_s_store_may_be_named() -> None:
    store = Trainer(store="http://127.0.0.1:9999", progress="off").store

    assert isinstance(store, LightningStoreClient)
    asyncio.run(store.close())


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"store": "sqlite://"}, ValueError, "names no file"),
        ({"store": "redis://host"}, ValueError, "store"),
        ({"store": 7}, ValueError, "store"),
        ({"strategy": "ipc2"}, ValueError, "strategy"),
        ({"tracer": {"level": 1}}, ValueError, "tracer dict must have a 'type' key"),
        ({"algorithm": lambda: 7}, TypeError, "algorithm factory returned int"),
        ({"tracer": "agentlightning.tracer.Missing"}, ValueError, "Missing"),
    ],
    ids=["no file", "unknown scheme", "number", "unknown strategy", "no type", "wrong type", "no such class"],
)
def test_a_part_that_cannot_be_built_is_told(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Trainer(**options, progress="off")


# ---------------------------------------------------------------------- fits


@pytest.mark.parametrize("n_runners", [1, 4])
@pytest.mark.parametrize("tracer", [OtelTracer, AgentOpsTracer, DummyTracer], ids=lambda t: t.__name__)
def test_a_fit_over_threads_returns_when_the_algorithm_is_done(n_runners: int, tracer: Any) -> None:
    trainer = a_trainer(n_runners=n_runners, tracer=tracer())

    trainer.fit(Halving(), [1, 2, 3, 4], val_dataset=[5])

    assert sorted(map(float, rewards_of(trainer.store))) == [0.5, 1.0, 1.5, 2.0, 2.5]  # type: ignore[arg-type] # none is None
    assert trainer.state is LifecycleState.STOPPED


@pytest.mark.parametrize("n_runners", [1, 4])
def test_a_fit_over_processes_returns_when_the_algorithm_is_done(n_runners: int) -> None:
    trainer = over_processes(n=n_runners)

    trainer.fit(Halving(), [1, 2, 3, 4], [5])

    assert sorted(map(float, rewards_of(trainer.store))) == [0.5, 1.0, 1.5, 2.0, 2.5]  # type: ignore[arg-type] # none is None


def test_a_fit_around_a_runner_in_the_main_process_returns(tmp_path: Path) -> None:
    strategy = ClientServerExecutionStrategy(server_port=free_port(), main_process="runner")
    trainer = a_trainer(strategy=strategy, store=f"sqlite:///{tmp_path / 'runs.db'}")

    trainer.fit(Halving(), [1, 2])

    assert sorted(map(float, rewards_of(trainer.store))) == [0.5, 1.0]  # type: ignore[arg-type] # none is None
    asyncio.run(trainer.store.close())


def test_a_trainer_may_fit_again() -> None:
    trainer = a_trainer()

    trainer.fit(Halving(), [1])
    trainer.fit(Halving(), [2])

    assert rewards_of(trainer.store) == [0.5, 1.0]
    assert [run.status for run in runs_of(trainer.store)] == ["succeeded", "succeeded"]


def test_dev_needs_no_algorithm() -> None:
    trainer = a_trainer(algorithm=None)

    trainer.dev(Halving(), [1])

    assert rewards_of(trainer.store) == [0.5]


async def test_run_uses_the_registered_agent_and_does_not_block_the_loop() -> None:
    trainer = a_trainer(algorithm=None)
    loop_runs = threading.Event()

    def answer(_: Any) -> float:
        return float(loop_runs.wait(PATIENCE_SECONDS))

    trainer.add_agent(Answering(answer))
    work = asyncio.create_task(trainer.run([1], [2]))
    while trainer.state is not LifecycleState.RUNNING:
        await asyncio.sleep(0.01)
    loop_runs.set()
    await asyncio.wait_for(work, PATIENCE_SECONDS)

    assert [rollout.status for rollout in await trainer.store.query_rollouts()] == ["succeeded"] * 2


async def test_run_works_over_processes_too() -> None:
    trainer = over_processes(n=2, algorithm=None)
    trainer.add_agent(Halving())

    await asyncio.wait_for(trainer.run([1], [2]), PATIENCE_SECONDS)

    assert len(await trainer.store.query_rollouts(status_in=["succeeded"])) == 2


async def test_a_run_that_is_cancelled_stops_the_training() -> None:
    @algo
    async def endless(*, store: LightningStore) -> None:
        await asyncio.sleep(1000)

    trainer = a_trainer(algorithm=endless)
    trainer.add_agent(Halving())

    work = asyncio.create_task(trainer.run())
    while trainer.state is not LifecycleState.RUNNING:
        await asyncio.sleep(0.01)
    work.cancel()
    await asyncio.wait([work], timeout=PATIENCE_SECONDS)
    deadline = time.monotonic() + 10
    while trainer.state is not LifecycleState.STOPPED and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    state = trainer.state
    if state is LifecycleState.RUNNING:
        trainer.stop()

    assert state is LifecycleState.STOPPED


def test_a_plain_algorithm_gets_a_store_that_blocks() -> None:
    seen: list[str] = []

    @algo
    def plain(*, store: Any, train_dataset: Any) -> None:
        store.add_resources(RESOURCES)
        ids = [store.enqueue_rollout(task).rollout_id for task in train_dataset]
        seen.extend(rollout.status for rollout in store.wait_for_rollouts(rollout_ids=ids, timeout=PATIENCE_SECONDS))

    a_trainer(algorithm=plain).fit(Halving(), [1, 2])
    over_processes(algorithm=plain).fit(Halving(), [3])

    assert seen == ["succeeded"] * 3


def test_an_algorithm_gets_all_its_parts() -> None:
    seen: dict[str, Any] = {}

    class Looking(Algorithm):
        async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
            seen.update(
                adapter=self.get_adapter(),
                trainer=self.get_trainer(),
                resources=self.get_initial_resources(),
                datasets=(train_dataset, val_dataset),
            )

    trainer = a_trainer(algorithm=Looking())
    trainer.fit(Halving(), [1], [2])

    assert seen == {
        "adapter": trainer.adapter,
        "trainer": trainer,
        "resources": RESOURCES,
        "datasets": ([1], [2]),
    }


def test_every_worker_has_a_runner_and_a_tracer_of_its_own() -> None:
    seen: set[tuple[int, int, str]] = set()
    meeting = threading.Barrier(3)

    class Looking(Hook):
        async def on_trace_start(self, *, agent: Any, runner: Any, tracer: Any, rollout: Any) -> None:
            seen.add((id(runner), id(tracer), runner.get_worker_id()))

    def answer(_: Any) -> None:
        meeting.wait(PATIENCE_SECONDS)

    trainer = a_trainer(n_runners=3, tracer=OtelTracer(), hooks=Looking(), algorithm=Baseline(max_queue_length=9))
    trainer.fit(Answering(answer), [1, 2, 3])

    assert sorted(name for _, _, name in seen) == ["Worker-0", "Worker-1", "Worker-2"]
    assert len({runner for runner, _, _ in seen}) == len({tracer for _, tracer, _ in seen}) == 3


def test_an_agent_s_runner_is_the_one_that_runs_it() -> None:
    seen: list[tuple[str, str]] = []
    meeting = threading.Barrier(3)

    class Looking(LitAgent[Any]):
        def rollout(self, task: Any, resources: NamedResources, rollout: Any) -> RolloutRawResult:
            meeting.wait(PATIENCE_SECONDS)
            seen.append((self.runner.get_worker_id(), rollout.attempt.worker_id))
            meeting.wait(PATIENCE_SECONDS)
            return None

    a_trainer(n_runners=3, algorithm=Baseline(max_queue_length=9)).fit(Looking(), [1, 2, 3])

    assert [own for own, _ in seen] == [real for _, real in seen]


def test_a_store_of_the_0_2_release_will_do_over_threads() -> None:
    store = OldStore()

    @algo
    async def algorithm(*, store: LightningStore) -> None:
        await store.add_resources(RESOURCES)
        ids = [(await store.enqueue_rollout(task)).rollout_id for task in range(4)]
        assert len(await store.wait_for_rollouts(rollout_ids=ids, timeout=PATIENCE_SECONDS)) == 4

    a_trainer(store=store, algorithm=algorithm, n_runners=2).fit(Halving())


def test_a_store_of_the_0_2_release_will_do_over_processes() -> None:
    store = OldStore()

    @algo
    async def algorithm(*, store: LightningStore) -> None:
        await store.add_resources(RESOURCES)
        ids = [(await store.enqueue_rollout(task)).rollout_id for task in range(4)]
        assert len(await store.wait_for_rollouts(rollout_ids=ids, timeout=PATIENCE_SECONDS)) == 4

    over_processes(store=store, algorithm=algorithm, n=2).fit(Halving())


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["shm", "cs"])
def test_a_store_on_a_server_will_do(strategy: str) -> None:
    with ServerProcess() as server:
        trainer = a_trainer(strategy=strategy, store=server.url, port=free_port())
        trainer.fit(Halving(), [1, 2])

        assert sorted(map(float, rewards_of(trainer.store))) == [0.5, 1.0]  # type: ignore[arg-type] # none is None
        asyncio.run(trainer.store.close())


# ---------------------------------------------------------------------- runs


def test_every_fit_is_a_run_with_its_configuration() -> None:
    trainer = a_trainer(name="mine", n_runners=2)

    trainer.fit(Halving(), [1, 2, 3], [4])

    (run,) = runs_of(trainer.store)
    assert (run.name, run.status) == ("mine", "succeeded")
    assert (run.config["n_train"], run.config["n_val"], run.config["n_runners"]) == (3, 1, 2)
    assert run.config["algorithm"].endswith("Baseline")
    assert run.summary["seconds"] > 0


@pytest.mark.parametrize("make", [a_trainer, over_processes], ids=["threads", "processes"])
def test_an_algorithm_that_fails_leaves_a_failed_run(make: Any) -> None:
    @algo
    async def failing(*, store: Any) -> None:
        raise ValueError("a reason")

    trainer = make(algorithm=failing)

    with pytest.raises(ValueError, match="a reason"):
        trainer.fit(Halving())
    (run,) = runs_of(trainer.store)
    assert (run.status, run.summary["error"]) == ("failed", "ValueError: a reason")
    assert trainer.state is LifecycleState.FAILED


def around_the_algorithm(**options: Any) -> Trainer:
    return a_trainer(strategy={"type": "shm", "main_thread": "algorithm"}, **options)


@pytest.mark.parametrize(
    "make", [a_trainer, around_the_algorithm, over_processes], ids=["runner-outside", "algorithm-outside", "processes"]
)
def test_a_fit_ends_when_its_runners_have_run_all_they_may(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentlightning.execution.stranded.PATIENCE_SECONDS", 0.2)

    trainer = make(max_rollouts=2)

    with pytest.raises(TrainingError, match=r"1 rollouts are still in the queue.* raise max_rollouts"):
        trainer.fit(Halving(), train_dataset=[1.0, 2.0, 3.0])
    (run,) = runs_of(trainer.store)
    assert run.status == "failed"
    assert "All runners have ended" in run.summary["error"]
    assert len(rewards_of(trainer.store)) == 3


def test_a_plain_algorithm_that_fails_is_told() -> None:
    @algo
    def failing(*, store: Any) -> None:
        raise ValueError("a reason")

    with pytest.raises(ValueError, match="a reason"):
        a_trainer(algorithm=failing).fit(Halving())


def test_an_algorithm_that_is_cancelled_from_within_fails() -> None:
    @algo
    async def leaving(*, store: Any) -> None:
        raise asyncio.CancelledError("odd")

    trainer = a_trainer(algorithm=leaving)

    with pytest.raises(TrainingError, match="cancelled from within"):
        trainer.fit(Halving())
    assert [run.status for run in runs_of(trainer.store)] == ["failed"]


@pytest.mark.parametrize("make", [a_trainer, over_processes], ids=["threads", "processes"])
def test_an_algorithm_that_exits_ends_the_program_and_its_run(make: Any) -> None:
    @algo
    async def leaving(*, store: Any) -> None:
        raise SystemExit(3)

    trainer = make(algorithm=leaving)

    with pytest.raises(SystemExit):
        trainer.fit(Halving())
    assert [run.status for run in runs_of(trainer.store)] in (["failed"], ["stopped"])


def test_a_failed_fit_may_be_retried() -> None:
    calls: list[int] = []

    @algo
    async def failing_once(*, store: Any) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise ValueError("once")

    trainer = a_trainer(algorithm=failing_once)
    with pytest.raises(ValueError, match="once"):
        trainer.fit(Halving())

    trainer.retry(Halving())

    assert [run.status for run in runs_of(trainer.store)] == ["failed", "succeeded"]


def test_a_runner_that_cannot_start_fails_the_fit() -> None:
    class Failing(LitAgentRunner[Any]):
        def init_worker(self, worker_id: int, store: LightningStore, **kwargs: Any) -> None:
            raise ValueError("no worker today")

    trainer = a_trainer(runner=Failing(DummyTracer()))
    trainer.strategy.graceful_delay = 0.2  # type: ignore[attr-defined] # it is a shm

    with pytest.raises(ValueError, match="no worker today"):
        trainer.fit(Halving(), [1])
    assert [run.status for run in runs_of(trainer.store)] in (["failed"], ["stopped"])


# ---------------------------------------------------------------------- pausing and stopping


def fitting(trainer: Trainer, agent: LitAgent[Any], *datasets: Any) -> threading.Thread:
    thread = threading.Thread(target=trainer.fit, args=(agent, *datasets), name="fitting", daemon=True)
    thread.start()
    until(lambda: trainer.state is LifecycleState.RUNNING)
    return thread


@algo
async def endless(*, store: LightningStore) -> None:
    await asyncio.sleep(1000)


@pytest.mark.parametrize("make", [a_trainer, over_processes], ids=["threads", "processes"])
def test_a_stopped_training_ends_and_its_run_says_so(make: Any) -> None:
    trainer = make(algorithm=endless)
    thread = fitting(trainer, Halving())
    until(lambda: runs_of(trainer.store))

    trainer.stop()
    thread.join(PATIENCE_SECONDS)

    assert not thread.is_alive()
    assert [run.status for run in runs_of(trainer.store)] == ["stopped"]
    assert trainer.state is LifecycleState.STOPPED


def test_a_training_without_an_algorithm_serves_what_is_enqueued_until_it_is_stopped() -> None:
    trainer = a_trainer(algorithm=None)
    thread = fitting(trainer, Halving())
    asyncio.run(trainer.store.add_resources(RESOURCES))
    asyncio.run(trainer.store.enqueue_rollout(1))

    until(lambda: rewards_of(trainer.store) == [0.5])
    trainer.stop()
    thread.join(PATIENCE_SECONDS)

    assert not thread.is_alive()


@pytest.mark.parametrize("make", [a_trainer, over_processes], ids=["threads", "processes"])
def test_a_paused_training_claims_nothing_until_it_resumes(make: Any) -> None:
    trainer = make(algorithm=None)
    thread = fitting(trainer, Halving())
    store = trainer.store
    asyncio.run(store.add_resources(RESOURCES))
    asyncio.run(store.enqueue_rollout(1))
    until(lambda: rewards_of(store) == [0.5])

    trainer.pause()
    time.sleep(1.0)  # for the switch to be seen, and a claim under way to end
    paused = asyncio.run(store.enqueue_rollout(2))
    done = asyncio.run(store.wait_for_rollouts(rollout_ids=[paused.rollout_id], timeout=0.5))
    state = trainer.state
    trainer.resume()
    resumed = asyncio.run(store.wait_for_rollouts(rollout_ids=[paused.rollout_id], timeout=PATIENCE_SECONDS))
    trainer.stop()
    thread.join(PATIENCE_SECONDS)

    assert (done, state) == ([], LifecycleState.PAUSED)
    assert [rollout.status for rollout in resumed] == ["succeeded"]
    assert not thread.is_alive()


def test_a_training_that_does_not_run_cannot_be_paused_or_stopped() -> None:
    trainer = a_trainer()

    for act in (trainer.pause, trainer.resume, trainer.stop):
        with pytest.raises(InvalidTransition, match="The trainer is created"):
            act()


def test_a_trainer_fits_once_at_a_time() -> None:
    trainer = a_trainer(algorithm=endless)
    thread = fitting(trainer, Halving())

    with pytest.raises(InvalidTransition):
        trainer.fit(Halving())
    trainer.stop()
    thread.join(PATIENCE_SECONDS)

    assert not thread.is_alive()


def test_a_training_that_is_stopped_while_paused_ends() -> None:
    trainer = a_trainer(algorithm=endless)
    thread = fitting(trainer, Halving())

    trainer.pause()
    trainer.stop()
    thread.join(PATIENCE_SECONDS)

    assert not thread.is_alive()


# ---------------------------------------------------------------------- wrong use


def plain_function(task: Any) -> float:
    return task / 2


def greedy_function(task: Any, budget: float) -> float:
    return task / budget


def test_a_plain_function_is_an_agent() -> None:
    rewards: list[float | None] = []

    async def algorithm(*, store: Any, train_dataset: Any) -> None:
        await store.add_resources(RESOURCES)
        for task in train_dataset:
            rollout = await store.enqueue_rollout(task)
            await store.wait_for_rollouts(rollout_ids=[rollout.rollout_id], timeout=PATIENCE_SECONDS)
            rewards.append(find_final_reward(await store.query_spans(rollout.rollout_id)))

    a_trainer(algorithm=algo(algorithm)).fit(plain_function, [1, 2])

    assert rewards == [0.5, 1.0]


@pytest.mark.parametrize(
    ("agent", "words"),
    [
        (greedy_function, "asks for budget"),
        (Halving, r"make an instance: Halving\(\)"),
        ("my_agent", "must be a LitAgent"),
        (int, "derive it from LitAgent"),
    ],
    ids=["function", "class", "text", "other class"],
)
def test_what_is_no_agent_is_told(agent: Any, words: str) -> None:
    for use in (a_trainer().fit, a_trainer().dev, a_trainer().add_agent):
        with pytest.raises(ConfigurationError, match=words):
            use(agent)


def test_no_agent_and_too_many_agents_are_told() -> None:
    trainer = a_trainer()

    with pytest.raises(ValueError, match="There is no agent"):
        trainer.fit(train_dataset=[1])
    trainer.add_agent(Halving())
    trainer.add_agent(Halving())
    with pytest.raises(ValueError, match="2 agents are registered"):
        trainer.fit(train_dataset=[1])


async def test_a_run_without_an_agent_is_told() -> None:
    with pytest.raises(ValueError, match="There is no agent"):
        await a_trainer().run([1])


@pytest.mark.parametrize("dataset", [(n for n in range(3)), iter([1]), {1, 2}, 7], ids=lambda d: type(d).__name__)
@pytest.mark.parametrize("label", ["train_dataset", "val_dataset"])
def test_a_data_set_that_is_not_indexable_is_told(dataset: Any, label: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{label} must have a length"):
        a_trainer().fit(Halving(), **{label: dataset})


def test_a_data_set_by_name_is_no_data_set() -> None:
    with pytest.raises(ConfigurationError, match="train_dataset"):
        a_trainer().fit(Halving(), {"a": 1, "b": 2})  # type: ignore[arg-type] # on purpose


def test_data_sets_without_an_algorithm_are_told() -> None:
    with pytest.raises(ConfigurationError, match="no algorithm to read the data sets"):
        a_trainer(algorithm=None).fit(Halving(), [1])


def test_dev_with_an_algorithm_that_trains_is_told() -> None:
    with pytest.raises(TypeError, match="dev needs a FastAlgorithm"):
        a_trainer(algorithm=endless).dev(Halving(), [1])


def test_a_data_set_that_the_algorithm_does_not_declare_is_told() -> None:
    with pytest.raises(TypeError, match="val_dataset is provided but not supported"):
        a_trainer(algorithm=endless).fit(Halving(), val_dataset=[1])


@pytest.mark.slow
def test_an_agent_that_can_be_pickled_is_trained_under_spawn() -> None:
    strategy = ClientServerExecutionStrategy(server_port=free_port(), start_method="spawn", graceful_timeout=20)
    trainer = a_trainer(strategy=strategy)

    trainer.fit(Halving(), [1, 2])

    assert sorted(map(float, rewards_of(trainer.store))) == [0.5, 1.0]  # type: ignore[arg-type] # none is None


@rollout
def prompted(task: Any, prompt_template: PromptTemplate) -> float:
    return task / 2


@pytest.mark.slow
def test_a_function_as_agent_is_trained_under_spawn() -> None:
    strategy = ClientServerExecutionStrategy(server_port=free_port(), start_method="spawn", graceful_timeout=20)
    trainer = a_trainer(strategy=strategy, tracer=OtelTracer())

    trainer.fit(prompted, [1])

    assert rewards_of(trainer.store) == [0.5]


def test_an_agent_that_cannot_be_pickled_is_told_under_spawn() -> None:
    strategy = ClientServerExecutionStrategy(server_port=free_port(), start_method="spawn")

    with pytest.raises(ConfigurationError, match="cannot be pickled"):
        a_trainer(strategy=strategy).fit(Answering(lambda _: 1.0), [1])


def test_a_custom_strategy_gets_both_sides() -> None:
    class Counting(ExecutionStrategy):
        def execute(self, algorithm: Any, runner: Any, store: LightningStore) -> None:
            async def both() -> None:
                event: ExecutionEvent = __import__("agentlightning").ThreadingEvent()
                serving = asyncio.create_task(runner(store, 0, event))
                await algorithm(store, event)
                event.set()
                await serving

            asyncio.run(both())

    trainer = a_trainer(strategy=Counting())
    trainer.fit(Halving(), [1])

    assert rewards_of(trainer.store) == [0.5]
