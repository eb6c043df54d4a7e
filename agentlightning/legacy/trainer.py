"""Training with the v0.1 protocol: workers that take their tasks from a server, and perhaps the algorithm behind it.

The server is named by its address or by a client. A data set instead of it is for the algorithm, which serves the tasks
itself and says through `get_client` where. There is no store in this: results go to the server and nowhere else.

Workers run in this process if there is one, else each in a process of its own. No process is left behind, however this
one ends: they are ended when their work is over or interrupted, as daemons they end with a program that is done, and
each watches for the death of its parent.
"""

import copy
import inspect
import logging
import pkgutil
import signal
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final, TypeAlias

import psutil

from agentlightning.adapter.base import TraceAdapter
from agentlightning.algorithm import Algorithm
from agentlightning.algorithm.base import Tasks
from agentlightning.errors import ConfigurationError, TrainingError
from agentlightning.execution.processes import start_context
from agentlightning.legacy.client import AgentLightningClient
from agentlightning.legacy.runner import LegacyAgentRunner
from agentlightning.litagent import LitAgent
from agentlightning.trainer import Trainer
from agentlightning.types import TaskInput
from agentlightning.utils.child_process import end_process, leave_with_parent
from agentlightning.utils.deprecation import deprecated
from agentlightning.utils.json_values import JsonObject
from agentlightning.utils.loop_thread import run_in_loop

logger = logging.getLogger(__name__)

Backend: TypeAlias = str | AgentLightningClient
"""Where tasks come from: the address of a server, or a client of one."""

_USER_OF_FIT_V0: Final = 4
"""Stack level of whoever called `Trainer.fit_v0`, which calls ours."""


def fit_v0(
    trainer: Trainer,
    agent: LitAgent[TaskInput],
    train_data: Backend | Tasks,
    *,
    val_data: Backend | Tasks | None = None,
    dev_data: Backend | None = None,
    dev_backend: Backend | None = None,
) -> None:
    """Run an agent on the tasks of a server, or train it with an algorithm that is one. Ctrl-C ends it well.

    Args:
        train_data: The server; or tasks, which go to the trainer's algorithm.
        val_data: Further tasks for the algorithm.
        dev_data: The server to use with `Trainer(dev=True)`, where the algorithm does not run.
        dev_backend: Former name of `dev_data`.
    """
    text = "fit_v0 and URLs as data sets speak the v0.1 protocol, which is deprecated; use fit and a store."
    deprecated(text, stacklevel=_USER_OF_FIT_V0)
    if not isinstance(agent, LitAgent):
        raise ConfigurationError(f"fit_v0 needs an agent, an instance of LitAgent; it is {agent!r}.")
    if dev_backend is not None:
        deprecated("Argument 'dev_backend' of fit_v0() is now called 'dev_data'.", stacklevel=_USER_OF_FIT_V0)
    source = (dev_data if dev_data is not None else dev_backend) if trainer.dev_mode else train_data
    algorithm = None if isinstance(source, (str, AgentLightningClient)) else _serving(trainer)
    with ExitStack() as life:
        client = _client_of(source if algorithm is None else algorithm.get_client(), life)
        agent.set_trainer(trainer)
        with already_told():
            adapter = _exporter_for(agent, trainer.adapter)
            runner = LegacyAgentRunner(agent, client, trainer.tracer, adapter, max_tasks=trainer.max_tasks)
        trainer.tracer.init()
        life.callback(trainer.tracer.teardown)
        if algorithm is None and (unused := _unused(trainer, val_data)):
            logger.warning("Not used with tasks of a v0.1 server: %s.", unused)
        if algorithm is None and trainer.n_workers == 1:
            work(runner, 0)
            return
        processes = life.enter_context(worker_processes(runner, trainer.n_workers, daemon=trainer.daemon))
        if algorithm is not None:
            _run(algorithm, trainer, train_data, val_data)
        else:
            join_workers(processes)


def _serving(trainer: Trainer) -> Algorithm:
    """The trainer's algorithm, if it is to serve the tasks to v0.1 clients."""
    if trainer.dev_mode:
        raise ConfigurationError(
            "Trainer(dev=True) takes its tasks from dev_data, the URL of a v0.1 server or a client such as "
            "DevTaskLoader."
        )
    algorithm = trainer.algorithm
    if algorithm is None or type(algorithm).get_client is Algorithm.get_client:
        name = "there is none" if algorithm is None else f"{type(algorithm).__name__} has none"
        raise ConfigurationError(
            f"fit_v0 hands a data set to an algorithm with a method get_client, and {name}; pass the URL of a server, "
            "or call fit."
        )
    return algorithm


def _unused(trainer: Trainer, val_data: object) -> str:
    options = {"val_data": val_data, "algorithm": trainer.algorithm, "hooks": trainer.hooks or None}
    return ", ".join(name for name, value in options.items() if value is not None)


def _client_of(backend: Any, life: ExitStack) -> AgentLightningClient:
    """A client of the server; one that is made here is closed with the stack."""
    with already_told():
        return (
            backend if isinstance(backend, AgentLightningClient) else life.enter_context(AgentLightningClient(backend))
        )


# ---------------------------------------------------------------------- parts


def _exporter_for(agent: LitAgent[TaskInput], adapter: TraceAdapter[Any]) -> TraceAdapter[object]:
    """The adapter, for the agents that the agent says are to be trained."""
    if agent.trained_agents is None:
        return adapter
    if not hasattr(adapter, "agent_match"):
        logger.warning("%s has no agent_match, so trained_agents has no effect.", type(adapter).__name__)
        return adapter
    chosen = copy.copy(adapter)
    chosen.agent_match = agent.trained_agents
    return chosen


def _run(algorithm: Algorithm, trainer: Trainer, train_data: Any, val_data: Any) -> None:
    """Give the algorithm what it works with, but no store: its absence tells that this is the old protocol."""
    algorithm.set_trainer(trainer)
    algorithm.set_adapter(trainer.adapter)
    algorithm.set_llm_proxy(trainer.llm_proxy)
    if trainer.initial_resources is not None:
        algorithm.set_initial_resources(trainer.initial_resources)
    result = algorithm.run(train_dataset=train_data, val_dataset=val_data)
    if inspect.iscoroutine(result):
        run_in_loop(result)


# ---------------------------------------------------------------------- workers


NAME_PREFIX: Final = "AgentLightning-"
"""How names of worker processes begin. Linux shows the first 15 letters of a name, which are these."""


@contextmanager
def already_told() -> Iterator[None]:
    """No warnings of deprecation: whoever used what is deprecated has had one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def work(runner: LegacyAgentRunner, worker_id: int) -> int:
    """Do tasks here until there are enough; how many were done."""
    runner.init_worker(worker_id)
    runner.agent.set_runner(runner)
    runner.tracer.init_worker(worker_id)
    try:
        return run_in_loop(runner.iter_async()) if runner.agent.is_async() else runner.iter()
    finally:
        runner.tracer.teardown_worker(worker_id)


def _work_as_process(runner: LegacyAgentRunner, worker_id: int, name: str) -> None:
    """In a child: as `work`. Ctrl-C is for the parent, which ends its children."""
    leave_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _show_name(name)
    logger.info("%s has done %d tasks.", name, work(runner, worker_id))


def _show_name(name: str) -> None:
    """Have the system show the process under its name: the whole of it where setproctitle is installed."""
    try:
        pkgutil.resolve_name("setproctitle:setproctitle")(name)
    except ImportError:
        with suppress(OSError):  # only Linux has this file
            Path("/proc/self/comm").write_text(name, encoding="utf-8")


@contextmanager
def worker_processes(runner: LegacyAgentRunner, count: int, *, daemon: bool = True) -> Iterator[Sequence[BaseProcess]]:
    """So many processes that work, until the context is left.

    Args:
        daemon: False lets an agent start processes with multiprocessing, which a daemon may not.
    """
    processes: list[BaseProcess] = []
    with ExitStack() as ends:
        for number in range(count):
            name = f"{NAME_PREFIX}Worker-{number}"
            options: JsonObject = {"target": _work_as_process, "args": (runner, number, name), "name": name}
            process: BaseProcess = start_context().Process(**options, daemon=daemon)
            with already_told():  # Python 3.12 warns of threads in a process that forks
                process.start()
            processes.append(process)
            ends.callback(end_process, process)
        yield processes


def join_workers(processes: Sequence[BaseProcess]) -> None:
    """Wait until all have ended by themselves; TrainingError if one failed."""
    for process in processes:
        process.join()
    failed = [f"{process.name} (exit code {process.exitcode})" for process in processes if process.exitcode]
    if failed:
        raise TrainingError(f"Subprocesses failed: {', '.join(failed)}; the log says why.")


# Our workers end with the process that started them; those of earlier releases may have been left. A process is killed
# only if it bears a worker's name, belongs to the user who asks, and is a child of this process or an orphan: workers
# of another training on the same machine are neither.


def kill_orphaned_processes() -> None:
    """Kill the workers that were left behind by this user's trainings, and those of this process."""
    for process in filter(may_be_killed, psutil.process_iter()):
        with suppress(psutil.Error):
            process.kill()  # psutil makes sure that the number does not belong to another process by now
            logger.info("Killed process %d, which was left behind.", process.pid)


def may_be_killed(process: psutil.Process) -> bool:
    """Whether a process is a worker that was left behind; one that cannot be looked at, or ends meanwhile, is not."""
    me = psutil.Process()
    try:
        is_worker = process != me and process.name().startswith(NAME_PREFIX) and process.username() == me.username()
        if not is_worker or process.status() == psutil.STATUS_ZOMBIE:
            return False
        # An orphan is adopted by a process of the system. A worker runs the same Python as its trainer, under the same
        # user, so a parent that does not has adopted it; this holds in a container too, whose trainer may be number 1.
        parent = process.parent()
        if parent is None or parent == me or parent.username() != process.username():
            return True
    except psutil.Error:
        return False
    try:
        return parent.exe() != process.exe()
    except psutil.Error as error:
        return isinstance(error, psutil.AccessDenied)  # the parent has more rights than its children


class TrainerLegacy(Trainer):
    """A `Trainer` that can be taken through its life by hand, as in the first release."""

    _connection: ExitStack | None = None

    def init(self, backend: Backend) -> None:
        """Connect to a server and prepare the tracer."""
        deprecated("TrainerLegacy speaks the v0.1 protocol, which is deprecated; use Trainer.fit and a store.")
        with ExitStack() as life:
            self._client = _client_of(backend, life)
            self.tracer.init()
            life.callback(self.tracer.teardown)
            self._connection = life.pop_all()

    def teardown(self) -> None:
        """Undo `init`; harmless without it."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def client(self) -> AgentLightningClient:
        """The client; RuntimeError before `init`."""
        if self._connection is None:
            raise TrainingError("The trainer has no client yet; call init(backend) first.")
        return self._client

    kill_orphaned_processes = staticmethod(kill_orphaned_processes)
