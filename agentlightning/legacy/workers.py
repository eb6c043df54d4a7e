"""Workers of the v0.1 protocol: in this process if there is one, else each in a process of its own.

No process is left behind, however this one ends: they are ended when their work is over or interrupted, as daemons they
end with a program that is done, and each watches for the death of its parent.
"""

import logging
import multiprocessing
import pkgutil
import signal
import threading
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final

import psutil

from agentlightning.adapter.base import Adapter
from agentlightning.errors import TrainingError
from agentlightning.execution.processes import start_context
from agentlightning.legacy.client import AgentLightningClient
from agentlightning.legacy.runner import LegacyAgentRunner
from agentlightning.litagent import LitAgent
from agentlightning.tracer import Tracer
from agentlightning.utils.child_process import end_process, leave_with_parent
from agentlightning.utils.loop_thread import LoopThread

__all__ = [
    "WorkerPlan",
    "already_told",
    "join_workers",
    "kill_orphaned_processes",
    "orphaned_among",
    "worker_processes",
]

logger = logging.getLogger(__name__)

NAME_PREFIX: Final = "AgentLightning-"
"""How names of worker processes begin. Linux shows the first 15 letters of a name, which are these."""


@contextmanager
def already_told() -> Iterator[None]:
    """No warnings of deprecation: whoever used what is deprecated has had one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


@dataclass(frozen=True)
class WorkerPlan:
    """What every worker does; it travels to their processes."""

    agent: LitAgent[Any]
    client: AgentLightningClient
    tracer: Tracer
    triplet_exporter: Adapter[Any, Any]
    max_tasks: int | None = None

    def work(self, worker_id: int) -> int:
        """Do tasks here until there are enough; how many were done."""
        self.tracer.init_worker(worker_id)
        try:
            with already_told():
                runner = LegacyAgentRunner(
                    self.agent, self.client, self.tracer, self.triplet_exporter, worker_id, self.max_tasks
                )
            return self._worked_off(runner)
        finally:
            self.tracer.teardown_worker(worker_id)

    def _worked_off(self, runner: LegacyAgentRunner) -> int:
        if not self.agent.is_async():
            return runner.iter()
        thread = LoopThread("legacy-worker")
        try:
            return thread.run(runner.iter_async())
        finally:
            thread.stop()

    def work_as_process(self, worker_id: int, name: str) -> None:
        """In a child: as `work`. Ctrl-C is for the parent, which ends its children."""
        leave_with_parent()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _show_name(name)
        logger.info("%s has done %d tasks.", name, self.work(worker_id))


def _show_name(name: str) -> None:
    """Have the system show the process under its name: the whole of it where setproctitle is installed."""
    try:
        pkgutil.resolve_name("setproctitle:setproctitle")(name)
    except ImportError:
        with suppress(OSError):  # only Linux has this file
            Path("/proc/self/comm").write_text(name, encoding="utf-8")


@contextmanager
def worker_processes(plan: WorkerPlan, count: int, *, daemon: bool = True) -> Iterator[Sequence[BaseProcess]]:
    """So many processes that work, until the context is left.

    Args:
        daemon: False lets an agent start processes with multiprocessing, which a daemon may not.
    """
    context = start_context()
    processes: list[BaseProcess] = []
    try:
        for number in range(count):
            name = f"{NAME_PREFIX}Worker-{number}"
            target, arguments = plan.work_as_process, (number, name)
            process: BaseProcess = context.Process(target=target, args=arguments, name=name, daemon=daemon)
            with already_told():  # Python 3.12 warns of threads in a process that forks
                process.start()
            processes.append(process)
        with _ends_told(processes):
            yield processes
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            end_process(process)


def join_workers(processes: Sequence[BaseProcess]) -> None:
    """Wait until all have ended by themselves; TrainingError if one failed."""
    for process in processes:
        process.join()
    failed = [f"{process.name} (exit code {process.exitcode})" for process in processes if process.exitcode]
    if failed:
        raise TrainingError(f"Subprocesses failed: {', '.join(failed)}; the log says why.")


@contextmanager
def _ends_told(processes: Sequence[BaseProcess]) -> Iterator[None]:
    """While the context lasts, log at once that a worker has ended: whoever waits for its results may wait in vain."""
    reader, writer = multiprocessing.Pipe(duplex=False)  # closing one side wakes the other
    watch = threading.Thread(target=_tell_ends, args=(processes, reader), name="legacy-worker-watch", daemon=True)
    watch.start()
    try:
        yield
    finally:
        writer.close()
        watch.join()
        reader.close()


def _tell_ends(processes: Sequence[BaseProcess], closing: Connection) -> None:
    left = list(processes)
    while closing not in (ready := wait([closing, *(process.sentinel for process in left)])):
        for process in [known for known in left if known.sentinel in ready]:
            left.remove(process)
            logger.warning("%s has ended; %d of %d workers are left.", process.name, len(left), len(processes))


# ---------------------------------------------------------------------- workers that were left behind

# Our workers end with the process that started them; those of earlier releases may have been left. A process is killed
# only if it bears a worker's name, belongs to the user who asks, and is a child of this process or an orphan: workers
# of another training on the same machine are neither.


def kill_orphaned_processes() -> None:
    """Kill the workers that were left behind by this user's trainings, and those of this process."""
    for process in orphaned_among(psutil.process_iter()):
        try:
            process.kill()  # psutil makes sure that the number does not belong to another process by now
        except psutil.Error as error:
            logger.warning("Process %d could not be killed: %s", process.pid, error)
        else:
            logger.info("Killed process %d, which was left behind.", process.pid)


def orphaned_among(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those that may be killed; a process that cannot be looked at, or ends meanwhile, is none of them."""
    me = psutil.Process()
    found = []
    for process in processes:
        try:
            if _may_be_killed(process, me):
                found.append(process)
        except psutil.Error as error:
            logger.debug("Process %d is left alone: %s", process.pid, error)
    return found


def _may_be_killed(process: psutil.Process, me: psutil.Process) -> bool:
    if process == me or not process.name().startswith(NAME_PREFIX):
        return False
    if process.username() != me.username() or process.status() == psutil.STATUS_ZOMBIE:
        return False
    return process.ppid() == me.pid or _is_orphan(process)


def _is_orphan(process: psutil.Process) -> bool:
    """Whether the one who started it is gone.

    An orphan is adopted by a process of the system. A worker runs the same Python as its trainer, under the same user,
    so a parent that does not has adopted it; this holds in a container too, where the trainer may be number 1.
    """
    parent = process.parent()
    return parent is None or parent.username() != process.username() or _program_of(parent) != process.exe()


def _program_of(parent: psutil.Process) -> str | None:
    """None if it may not be known, as with processes that have more rights than their children."""
    try:
        return parent.exe()
    except psutil.AccessDenied:
        return None
