"""Worker processes: none outlives its trainer, and those of others are never killed.

Whatever is killed here was started here: only processes of these tests are shown to `kill_orphaned_processes`.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from agentlightning.adapter import TracerTraceToTriplet
from agentlightning.legacy.dev_task_loader import DevTaskLoader
from agentlightning.legacy.runner import LegacyAgentRunner
from agentlightning.legacy.trainer import TrainerLegacy, join_workers, may_be_killed, worker_processes
from agentlightning.litagent import LitAgent
from agentlightning.tracer import DummyTracer
from tests.legacy.agents import Newer

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning"),
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux shows names of processes without setproctitle"),
]

PATIENCE_SECONDS = 30

WORKING = """
import os, sys
from pathlib import Path
Path("/proc/self/comm").write_text("{name}")
print(os.getpid(), flush=True)
sys.stdin.read()
"""
"""Waits until nobody holds its input any more, so that it ends with the test at the latest."""

STARTING = """
import subprocess, sys
worker = subprocess.Popen([sys.executable, "-c", sys.argv[1]])
if sys.argv[2] == "stay":
    worker.wait()
"""

TRAINING = """
import os, threading, warnings
warnings.simplefilter("ignore")
import agentlightning as agl
from agentlightning.legacy.dev_task_loader import DevTaskLoader

class Agent(agl.LitAgent):
    def rollout(self, task, resources, rollout):
        os.write(1, f"{os.getpid()}\\n".encode())
        threading.Event().wait()

trainer = agl.Trainer(tracer=agl.DummyTracer(), n_runners=2, progress="off")
trainer.fit_v0(Agent(), DevTaskLoader(["hello"], {}))
"""

Start = Callable[..., psutil.Process]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a process and gives the last of so many workers among it and its children, by the numbers they print."""
    started: list[subprocess.Popen[str]] = []

    def run(*arguments: str, workers: int = 1, leaves: bool = False) -> psutil.Process:
        command = [sys.executable, "-c", *arguments]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        worker = [psutil.Process(int(process.stdout.readline())) for _ in range(workers)][-1]
        if leaves:
            process.wait(timeout=PATIENCE_SECONDS)
        return worker

    yield run
    for process in started:
        process.kill()
        process.communicate(timeout=PATIENCE_SECONDS)


@pytest.fixture
def worker() -> str:
    return WORKING.format(name="AgentLightning-Worker-7")


def ended(process: psutil.Process) -> bool:
    """Whether it ends soon; one whose parent does not collect it counts."""
    try:
        process.wait(timeout=PATIENCE_SECONDS)
    except psutil.TimeoutExpired:
        return process.status() == psutil.STATUS_ZOMBIE
    return True


def test_an_orphan_is_killed(start: Start, worker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    orphan = start(STARTING, worker, "leave", leaves=True)
    monkeypatch.setattr(psutil, "process_iter", lambda: iter([orphan]))

    TrainerLegacy.kill_orphaned_processes()

    assert ended(orphan)


def test_a_worker_of_another_training_is_left_alone(start: Start, worker: str) -> None:
    assert not may_be_killed(start(STARTING, worker, "stay"))


def test_a_child_of_ours_is_taken_if_it_is_a_worker(start: Start, worker: str) -> None:
    child, other = start(worker), start(WORKING.format(name="something-else"))

    assert [may_be_killed(child), may_be_killed(other)] == [True, False]


def refuse() -> str:
    raise psutil.AccessDenied


@pytest.mark.parametrize("username", [lambda: "somebody-else", refuse], ids=["another user", "may not be looked at"])
def test_a_process_that_is_not_known_to_be_ours_is_left_alone(
    start: Start, worker: str, monkeypatch: pytest.MonkeyPatch, username: Callable[[], str]
) -> None:
    child = start(worker)
    monkeypatch.setattr(child, "username", username)

    assert not may_be_killed(child)


def test_this_process_and_those_that_are_gone_are_left_alone(start: Start, worker: str) -> None:
    gone = start(worker)
    gone.kill()
    gone.wait()

    assert not may_be_killed(psutil.Process())
    assert not may_be_killed(gone)


def test_workers_end_with_their_trainer(start: Start) -> None:
    trainer = start(TRAINING, workers=2).parent()
    assert trainer is not None
    workers = trainer.children(recursive=True)
    assert len(workers) == 2

    trainer.kill()

    assert all(ended(worker) for worker in workers)


def test_workers_bear_their_names_and_are_daemons() -> None:
    runner = LegacyAgentRunner(Newer(), DevTaskLoader(["hello"], {}), DummyTracer(), TracerTraceToTriplet())

    with worker_processes(runner, 2) as processes:
        names = [process.name for process in processes]
        assert all(process.daemon for process in processes)

    assert names == ["AgentLightning-Worker-0", "AgentLightning-Worker-1"]
    assert not any(process.is_alive() for process in processes)


@pytest.mark.parametrize(("daemon", "exit_code"), [(True, 7), (False, 0)], ids=["daemons", "others"])
def test_only_workers_that_are_no_daemons_may_have_children(daemon: bool, exit_code: int) -> None:
    class Starting(LitAgent[Any]):
        def rollout(self, task: Any, resources: Any, rollout: Any) -> None:
            import multiprocessing

            try:
                child = multiprocessing.get_context("fork").Process(target=int)
                child.start()
                child.join()
            except AssertionError:
                os._exit(7)

    loader = DevTaskLoader(["hello"], {})
    runner = LegacyAgentRunner(Starting(), loader, DummyTracer(), TracerTraceToTriplet(), max_tasks=1)

    with worker_processes(runner, 1, daemon=daemon) as processes:
        if exit_code:
            with pytest.raises(RuntimeError, match=rf"exit code {exit_code}"):
                join_workers(processes)
        else:
            join_workers(processes)
