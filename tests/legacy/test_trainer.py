"""fit_v0 and fit("http://…"): whole trainings over the v0.1 protocol, in this process and in several."""

import asyncio
import os
import signal
import socket
import threading
import warnings
from collections.abc import Callable
from typing import Any

import psutil
import pytest

import agentlightning as agl
from agentlightning.adapter import TracerTraceToTriplet, TraceToMessages
from agentlightning.algorithm import Algorithm
from agentlightning.legacy.client import AgentLightningClient
from agentlightning.legacy.dev_task_loader import DevTaskLoader
from agentlightning.legacy.server import AgentLightningServer
from agentlightning.legacy.trainer import TrainerLegacy
from agentlightning.litagent import LitAgent
from agentlightning.tracer import DummyTracer
from agentlightning.types import Hook, NamedResources
from tests.e2e.server_process import left_behind
from tests.legacy.agents import FirstRelease, Newer, NewerAsync
from tests.legacy.conftest import ServerInThread

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

Connect = Callable[..., AgentLightningClient]
TASKS = [{"name": name} for name in ("Ada", "Alan", "Grace", "Edsger")]


def queued(served: ServerInThread, resources: NamedResources, mode: Any = "train") -> list[str]:
    served.run(served.server.update_resources(resources))
    return [served.run(served.server.queue_task(task, mode)) for task in TASKS]


def rewards_of(served: ServerInThread, rollout_ids: list[str]) -> list[float | None]:
    """Waits for the results."""
    done = [served.run(served.server.poll_completed_rollout(rollout_id, timeout=30)) for rollout_id in rollout_ids]
    return [rollout.final_reward for rollout in done]


def training(**options: Any) -> agl.Trainer:
    return agl.Trainer(**{"tracer": DummyTracer(), "n_runners": 1, "progress": "off", **options})


def is_running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


class TellingItsProcess(LitAgent[Any]):
    """Its reward is the number of the process that ran it."""

    def rollout(self, task: Any, resources: Any, rollout: Any) -> float:
        if task == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        return float(os.getpid())


# ---------------------------------------------------------------------- the tasks of a server


@pytest.mark.parametrize("release", [FirstRelease, NewerAsync])
def test_fitting_a_url_does_the_tasks_of_its_server(release: Any, served: ServerInThread, resources: Any) -> None:
    rollout_ids = queued(served, resources)

    training(max_rollouts=len(TASKS)).fit(release(), served.endpoint)

    assert rewards_of(served, rollout_ids) == [1.0] * len(TASKS)


def test_several_workers_have_processes_that_end(served: ServerInThread, connect: Connect, resources: Any) -> None:
    rollout_ids = queued(served, resources)

    training(max_rollouts=2, n_runners=2).fit_v0(TellingItsProcess(), connect(served.endpoint))

    pids = {int(reward or 0) for reward in rewards_of(served, rollout_ids)}
    assert len(pids) == 2
    assert os.getpid() not in pids
    assert not any(is_running(pid) for pid in pids)


def test_a_worker_that_dies_is_an_error(
    served: ServerInThread, connect: Connect, resources: Any, caplog: pytest.LogCaptureFixture
) -> None:
    served.run(served.server.update_resources(resources))
    served.run(served.server.queue_task("die"))
    served.run(served.server.queue_task("live"))

    with pytest.raises(RuntimeError, match=r"Subprocesses failed: AgentLightning-Worker-\d \(exit code -9\)"):
        training(max_rollouts=1, n_runners=2).fit_v0(TellingItsProcess(), connect(served.endpoint))


# An interrupt in the middle of a request leaves its socket to the collector, which nobody else can close.
@pytest.mark.filterwarnings("ignore:Exception ignored in. <socket:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("n_runners", [1, 2])
def test_an_interrupt_ends_it_well(n_runners: int, served: ServerInThread, connect: Connect, resources: Any) -> None:
    rollout_ids = queued(served, resources)

    def interrupt_when_done() -> None:
        rewards_of(served, rollout_ids)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    threading.Thread(target=interrupt_when_done).start()
    with pytest.raises(KeyboardInterrupt):
        training(n_runners=n_runners).fit_v0(Newer(), connect(served.endpoint))

    children = [child.name() for child in left_behind()]
    assert [name for name in children if name.startswith("AgentLightning-")] == []


def test_what_is_not_used_is_said(served: ServerInThread, resources: Any, caplog: pytest.LogCaptureFixture) -> None:
    queued(served, resources)

    training(max_rollouts=1, hooks=Hook(), algorithm=agl.Baseline()).fit(Newer(), served.endpoint, val_dataset=TASKS)

    assert "Not used with tasks of a v0.1 server: val_data, algorithm, hooks." in caplog.text


def test_one_warning_points_at_the_caller(served: ServerInThread, resources: Any) -> None:
    queued(served, resources)
    trainer = training(max_rollouts=1)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit_v0(Newer(), served.endpoint)

    assert [(str(warning.message)[:6], warning.filename) for warning in caught] == [("fit_v0", __file__)]


# ---------------------------------------------------------------------- the tasks of an algorithm


class Serving(Algorithm):
    """An algorithm of the first release: it serves the tasks itself, and says where."""

    def __init__(self, resources: NamedResources) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.resources = resources
        self.rewards: dict[str, list[float | None]] = {}

    def get_client(self) -> AgentLightningClient:
        return AgentLightningClient(f"http://127.0.0.1:{self.port}", poll_interval=0.02)

    async def serve(self, **datasets: Any) -> None:
        server = AgentLightningServer(port=self.port)
        await server.start()
        await server.update_resources(self.resources)
        for name, dataset in datasets.items():
            rollout_ids = [await server.queue_task(task, mode=name) for task in dataset or []]
            done = [await server.poll_completed_rollout(rollout_id, timeout=30) for rollout_id in rollout_ids]
            self.rewards[name] = [rollout and rollout.final_reward for rollout in done]
        await server.stop()


class ServingAsync(Serving):
    async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:  # type: ignore[override]
        await self.serve(train=train_dataset, val=val_dataset)


class ServingPlainly(Serving):
    def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
        asyncio.run(self.serve(train=train_dataset, val=val_dataset))


@pytest.mark.parametrize(("kind", "n_runners"), [(ServingAsync, 1), (ServingPlainly, 2)])
def test_an_algorithm_that_serves_gets_its_results(kind: type[Serving], n_runners: int, resources: Any) -> None:
    algorithm = kind(resources)

    training(algorithm=algorithm, n_runners=n_runners).fit_v0(TellingItsProcess(), TASKS, val_data=TASKS[:2])

    pids = [int(reward or 0) for reward in algorithm.rewards["train"] + algorithm.rewards["val"]]
    assert len(pids) == 6
    assert os.getpid() not in pids
    assert not any(is_running(pid) for pid in pids)


def test_an_algorithm_that_fails_leaves_no_process(resources: Any) -> None:
    class Failing(Serving):
        def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
            self.children = left_behind()
            raise ValueError("not today")

    algorithm = Failing(resources)

    with pytest.raises(ValueError, match="not today"):
        training(algorithm=algorithm, n_runners=2).fit_v0(Newer(), TASKS)

    assert len(algorithm.children) >= 2
    assert not any(child.is_running() for child in algorithm.children)


def test_the_algorithm_is_given_its_parts_but_no_store(resources: Any) -> None:
    algorithm = ServingPlainly({})
    trainer = training(algorithm=algorithm, initial_resources=resources)

    trainer.fit_v0(Newer(), [])

    assert algorithm.get_trainer() is trainer
    assert algorithm.get_adapter() is trainer.adapter
    assert algorithm.get_initial_resources() == resources
    with pytest.raises(ValueError, match="no store"):
        algorithm.get_store()


@pytest.mark.parametrize("address", ["127.0.0.1:8000", ""])
def test_only_addresses_of_the_web_are_servers(address: str) -> None:
    with pytest.raises(ValueError, match="must begin with http:// or https://"):
        training().fit(Newer(), address)


# ---------------------------------------------------------------------- wrong use


@pytest.mark.parametrize("algorithm", [None, agl.Baseline()], ids=["none", "one that serves nobody"])
def test_a_data_set_needs_an_algorithm_that_serves(algorithm: Any) -> None:
    with pytest.raises(ValueError, match="with a method get_client"):
        training(algorithm=algorithm).fit_v0(Newer(), TASKS)


def test_something_else_than_an_agent_is_refused() -> None:
    with pytest.raises(ValueError, match="an instance of LitAgent"):
        training().fit_v0(Newer, "http://127.0.0.1:1")


# ---------------------------------------------------------------------- dev=True


def test_a_trial_takes_its_tasks_from_elsewhere(resources: Any) -> None:
    loader = DevTaskLoader(TASKS, resources)

    training(dev=True, max_rollouts=3).fit_v0(Newer(), "http://127.0.0.1:1", dev_data=loader)

    assert [rollout.final_reward for rollout in loader.rollouts] == [1.0] * 3


@pytest.mark.parametrize("dev_data", [None, TASKS])
def test_a_trial_without_a_server_or_client_is_refused(dev_data: Any) -> None:
    with pytest.raises(ValueError, match="takes its tasks from dev_data"):
        training(dev=True).fit_v0(Newer(), TASKS, dev_data=dev_data)


def test_the_former_name_is_deprecated(resources: Any) -> None:
    trainer = training(dev=True, max_rollouts=1)

    with pytest.warns(DeprecationWarning, match="now called 'dev_data'") as caught:
        trainer.fit_v0(Newer(), TASKS, dev_backend=DevTaskLoader(TASKS, resources))

    assert {warning.filename for warning in caught} == {__file__}


# ---------------------------------------------------------------------- trained agents


def test_trained_agents_decide_what_the_adapter_reads(resources: Any) -> None:
    matches: list[Any] = []

    class Noting(TracerTraceToTriplet):
        def adapt(self, source: Any, /) -> Any:
            matches.append(self.agent_match)
            return []

    class Emitting(LitAgent[Any]):
        def rollout(self, task: Any, resources: Any, rollout: Any) -> None:
            agl.emit_reward(1.0)

    adapter = Noting(agent_match="all")
    training(adapter=adapter, max_rollouts=1).fit_v0(Emitting("writer"), DevTaskLoader(TASKS, resources))

    assert (matches, adapter.agent_match) == (["writer"], "all")


def test_trained_agents_mean_nothing_to_other_adapters(resources: Any, caplog: pytest.LogCaptureFixture) -> None:
    agent = Newer()
    agent.trained_agents = "writer"

    training(adapter=TraceToMessages(), max_rollouts=1).fit_v0(agent, DevTaskLoader(TASKS, resources))

    assert "TraceToMessages has no agent_match" in caplog.text


# ---------------------------------------------------------------------- the trainer of the first release


def test_the_client_is_there_between_init_and_teardown() -> None:
    trainer = TrainerLegacy(tracer=DummyTracer())
    with pytest.raises(RuntimeError, match="call init"):
        trainer.client()

    trainer.init("http://127.0.0.1:1")
    client = trainer.client()
    trainer.teardown()
    trainer.teardown()

    assert (client.endpoint, client._closed.is_set()) == ("http://127.0.0.1:1", True)
    with pytest.raises(RuntimeError, match="call init"):
        trainer.client()
