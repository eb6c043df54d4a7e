"""Trainer: fits, and the runs they are in the store."""

import asyncio
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from agentlightning.algorithm import Algorithm, Baseline, algo
from agentlightning.emitter import emit_annotation
from agentlightning.errors import TrainingError
from agentlightning.execution import ClientServerExecutionStrategy
from agentlightning.litagent import LitAgent, rollout
from agentlightning.runner import LitAgentRunner
from agentlightning.store import InMemoryLightningStore, LightningStore, LightningStoreServer, SqliteLightningStore
from agentlightning.tracer import AgentOpsTracer, DummyTracer, OtelTracer
from agentlightning.trainer import Trainer
from agentlightning.types import NamedResources, Run
from agentlightning.types.lifecycle import LifecycleState
from tests.e2e.server_process import free_port
from tests.runner.working import PATIENCE_SECONDS, RESOURCES, Answering
from tests.store.test_composed import OldStore
from tests.trainer.trainings import Halving, a_trainer, endless, over_processes, rewards_of, runs_of, until

pytestmark = pytest.mark.usefixtures("nothing_is_left")


# ---------------------------------------------------------------------- fits


@pytest.mark.parametrize(("n_runners", "tracer"), [(4, OtelTracer), (1, AgentOpsTracer), (4, DummyTracer)])
def test_a_fit_over_threads_returns_when_the_algorithm_is_done(n_runners: int, tracer: Any) -> None:
    trainer = a_trainer(n_runners=n_runners, tracer=tracer())

    trainer.fit(Halving(), [1, 2, 3, 4], val_dataset=[5])

    assert sorted(map(float, rewards_of(trainer.store))) == [0.5, 1.0, 1.5, 2.0, 2.5]  # type: ignore[arg-type] # none is None
    assert trainer.state is LifecycleState.STOPPED


def test_a_fit_over_processes_returns_when_the_algorithm_is_done() -> None:
    trainer = over_processes(n=2)

    trainer.fit(Halving(), [1, 2, 3, 4], [5])

    assert sorted(map(float, rewards_of(trainer.store))) == [0.5, 1.0, 1.5, 2.0, 2.5]  # type: ignore[arg-type] # none is None


@pytest.mark.parametrize("where", ["threads", "processes", "around a runner", "processes that open the file"])
def test_the_file_of_a_store_alone_holds_a_fit_that_has_ended(tmp_path: Path, where: str) -> None:
    places: dict[str, Any] = {
        "threads": "shm",
        "processes": ClientServerExecutionStrategy(server_port=free_port()),
        "around a runner": ClientServerExecutionStrategy(server_port=free_port(), main_process="runner"),
        "processes that open the file": ClientServerExecutionStrategy(managed_store=False),
    }
    trainer = a_trainer(strategy=places[where], store=f"sqlite:///{tmp_path / 'runs.db'}")

    trainer.fit(Halving(), [1, 2, 3])
    copy = SqliteLightningStore(shutil.copy(tmp_path / "runs.db", tmp_path / "copy.db"))

    assert sorted(map(float, rewards_of(copy))) == [0.5, 1.0, 1.5]  # type: ignore[arg-type] # none is None
    assert [run.status for run in runs_of(copy)] == ["succeeded"]
    assert runs_of(trainer.store) == runs_of(copy)
    for store in (copy, trainer.store):
        asyncio.run(store.close())


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


async def test_a_run_that_is_cancelled_stops_the_training() -> None:
    trainer = a_trainer(algorithm=endless)
    trainer.add_agent(Halving())

    work = asyncio.create_task(trainer.run())
    while trainer.state is not LifecycleState.RUNNING:
        await asyncio.sleep(0.01)
    work.cancel()
    await asyncio.wait([work], timeout=PATIENCE_SECONDS)

    assert work.cancelled()
    assert trainer.state is LifecycleState.STOPPED


@pytest.mark.parametrize("n_runners", [1, 2])
async def test_a_run_of_runners_alone_ends_when_it_is_cancelled(n_runners: int) -> None:
    store = InMemoryLightningStore()
    server = LightningStoreServer(store, host="127.0.0.1", port=0)
    await server.start()
    strategy = ClientServerExecutionStrategy(
        role="runner", server_host="127.0.0.1", server_port=server.port, n_runners=n_runners
    )
    trainer = a_trainer(strategy=strategy)
    trainer.add_agent(Halving())

    work = asyncio.create_task(trainer.run())
    await store.add_resources(RESOURCES)
    sent = await store.enqueue_rollout(1)
    done = await store.wait_for_rollouts(rollout_ids=[sent.rollout_id], timeout=PATIENCE_SECONDS)
    work.cancel()
    await asyncio.wait([work], timeout=PATIENCE_SECONDS)
    await server.stop()

    assert [rollout.status for rollout in done] == ["succeeded"]
    assert work.cancelled()
    assert trainer.state is LifecycleState.STOPPED


def test_a_plain_algorithm_gets_a_store_that_blocks() -> None:
    seen: list[str] = []

    @algo
    def plain(*, store: Any, train_dataset: Any) -> None:
        store.add_resources(RESOURCES)
        ids = [store.enqueue_rollout(task).rollout_id for task in train_dataset]
        seen.extend(rollout.status for rollout in store.wait_for_rollouts(rollout_ids=ids, timeout=PATIENCE_SECONDS))

    over_processes(algorithm=plain).fit(Halving(), [3])

    assert seen == ["succeeded"]


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


def test_every_worker_has_a_runner_and_a_tracer_of_its_own_which_its_agent_sees() -> None:
    seen: list[tuple[Any, Any, str]] = []
    meeting = threading.Barrier(3)

    class Looking(LitAgent[Any]):
        def rollout(self, task: Any, resources: NamedResources, rollout: Any) -> None:
            meeting.wait(PATIENCE_SECONDS)
            assert self.runner.get_worker_id() == rollout.attempt.worker_id.partition("@")[0]
            seen.append((self.runner, self.tracer, self.runner.get_worker_id()))
            meeting.wait(PATIENCE_SECONDS)

    trainer = a_trainer(n_runners=3, tracer=OtelTracer(), algorithm=Baseline(max_queue_length=9))
    trainer.fit(Looking(), [1, 2, 3])

    assert sorted(name for _, _, name in seen) == ["Worker-0", "Worker-1", "Worker-2"]
    assert len({id(runner) for runner, _, _ in seen}) == len({id(tracer) for _, tracer, _ in seen}) == 3


def test_asynchronous_agents_of_all_threads_share_one_event_loop() -> None:
    both, loops = threading.Barrier(2), set[asyncio.AbstractEventLoop]()
    lock = asyncio.Lock()  # as in the clients that frameworks keep for the whole process

    async def agent(task: int) -> float:
        loops.add(asyncio.get_running_loop())
        await asyncio.to_thread(both.wait, PATIENCE_SECONDS)
        async with lock:
            await asyncio.sleep(0.01)
        return float(task)

    trainer = a_trainer(n_runners=2, algorithm=Baseline(max_queue_length=9))
    trainer.fit(agent, [1, 2, 3, 4])

    assert len(loops) == 1
    assert sorted(map(float, rewards_of(trainer.store))) == [1.0, 2.0, 3.0, 4.0]  # type: ignore[arg-type] # none is None
    assert "agents" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.parametrize(("make", "runners"), [(a_trainer, "n_runners"), (over_processes, "n")], ids=["shm", "cs"])
def test_a_store_of_the_0_2_release_will_do(make: Any, runners: str) -> None:
    store = OldStore()

    @algo
    async def algorithm(*, store: LightningStore) -> None:
        await store.add_resources(RESOURCES)
        ids = [(await store.enqueue_rollout(task)).rollout_id for task in range(4)]
        assert len(await store.wait_for_rollouts(rollout_ids=ids, timeout=PATIENCE_SECONDS)) == 4

    make(store=store, algorithm=algorithm, **{runners: 2}).fit(Halving())


# ---------------------------------------------------------------------- runs


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
    monkeypatch.setattr("agentlightning.execution.watch.PATIENCE_SECONDS", 0.2)

    trainer = make(max_rollouts=2)

    with pytest.raises(TrainingError, match=r"1 rollouts are still in the queue.* raise max_rollouts"):
        trainer.fit(Halving(), train_dataset=[1.0, 2.0, 3.0])
    (run,) = runs_of(trainer.store)
    assert run.status == "failed"
    assert "All runners have ended" in run.summary["error"]
    assert len(rewards_of(trainer.store)) == 3


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


def test_a_tracer_that_fails_at_the_end_leaves_a_trainer_that_may_fit_again() -> None:
    class Failing(DummyTracer):
        def teardown(self, *args: Any, **kwargs: Any) -> None:
            raise ValueError("cannot be undone")

    trainer = a_trainer(tracer=Failing(), runner=LitAgentRunner(DummyTracer()))

    for _ in range(2):
        with pytest.raises(ValueError, match="cannot be undone"):
            trainer.fit(Halving(), [1])
    assert trainer.state is LifecycleState.FAILED


def test_a_runner_that_cannot_start_fails_the_fit() -> None:
    class Failing(LitAgentRunner[Any]):
        def init_worker(self, worker_id: int, store: LightningStore, **kwargs: Any) -> None:
            raise ValueError("no worker today")

    trainer = a_trainer(runner=Failing(DummyTracer()))
    trainer.strategy.graceful_delay = 0.2  # type: ignore[attr-defined] # it is a shm

    with pytest.raises(ValueError, match="no worker today"):
        trainer.fit(Halving(), [1])
    assert [run.status for run in runs_of(trainer.store)] in (["failed"], ["stopped"])


@pytest.mark.parametrize("count", [2**63 - 1, 1.7e308, -1, "many"])
def test_tokens_that_no_call_can_have_are_not_counted(count: Any) -> None:
    @rollout
    def forging(task: Any) -> float:
        emit_annotation({"gen_ai.usage.prompt_tokens": count, "gen_ai.usage.completion_tokens": 2})
        return 1.0

    store = InMemoryLightningStore()
    a_trainer(store=store, tracer=OtelTracer(), progress="json").fit(forging, [1, 2, 3])

    (run,) = runs_of(store)
    assert (run.status, run.summary["tokens"]) == ("succeeded", 6)


def test_a_run_reports_while_the_algorithm_blocks_its_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentlightning.trainer.roles.REPORT_SECONDS", 0.01)
    store = InMemoryLightningStore()

    def last_report() -> Any:
        (run,) = store._tx._records[Run].values()
        return run.metadata["reports"].get("last_time")

    @algo
    async def blocking(*, store: LightningStore) -> None:
        until(lambda: last_report() is not None)

    a_trainer(store=store, algorithm=blocking).fit(Halving())

    (run,) = runs_of(store)
    assert run.status == "succeeded"
    assert run.start_time <= run.metadata["reports"]["last_time"] <= run.end_time
