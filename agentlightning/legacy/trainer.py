"""Training with the v0.1 protocol: workers that take their tasks from a server, and perhaps the algorithm behind it.

The server is named by its address or by a client. A data set instead of it is for the algorithm, which serves the tasks
itself and says through `get_client` where. There is no store in this: results go to the server and nowhere else.
"""

import copy
import inspect
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

from typing_extensions import TypeIs

from agentlightning.adapter.base import TraceAdapter
from agentlightning.algorithm import Algorithm
from agentlightning.errors import ConfigurationError, TrainingError
from agentlightning.legacy.client import AgentLightningClient
from agentlightning.legacy.workers import (
    WorkerPlan,
    already_told,
    join_workers,
    kill_orphaned_processes,
    worker_processes,
)
from agentlightning.litagent import LitAgent
from agentlightning.trainer import Trainer
from agentlightning.types import Dataset
from agentlightning.utils.deprecation import deprecated
from agentlightning.utils.loop_thread import LoopThread

__all__ = ["TrainerLegacy", "fit_v0"]

logger = logging.getLogger(__name__)

Backend: TypeAlias = str | AgentLightningClient
"""Where tasks come from: the address of a server, or a client of one."""

_USER_OF_FIT_V0 = 4
"""Stack level of whoever called `Trainer.fit_v0`, which calls ours."""


def fit_v0(
    trainer: Trainer,
    agent: LitAgent[Any],
    train_data: Backend | Dataset[Any],
    *,
    val_data: Backend | Dataset[Any] | None = None,
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
    deprecated(
        "fit_v0 and URLs as data sets speak the v0.1 protocol, which is deprecated; use fit and a store.",
        stacklevel=_USER_OF_FIT_V0,
    )
    if not isinstance(agent, LitAgent):
        raise ConfigurationError(f"fit_v0 needs an agent, an instance of LitAgent; it is {agent!r}.")
    source = _dev_backend(dev_data, dev_backend) if trainer.dev_mode else train_data
    algorithm: Algorithm | None = None
    if not _is_backend(source):
        algorithm = _serving(trainer.algorithm)
        source = algorithm.get_client()
    with _client_of(source) as client:
        agent.set_trainer(trainer)
        plan = WorkerPlan(agent, client, trainer.tracer, _exporter_for(agent, trainer.adapter), trainer.max_tasks)
        trainer.tracer.init()
        try:
            if algorithm is not None:
                _bind(algorithm, trainer)
                with worker_processes(plan, trainer.n_workers, daemon=trainer.daemon):
                    _run(algorithm, train_data, val_data)
            else:
                _tell_unused(trainer, val_data)
                _work(plan, trainer)
        except KeyboardInterrupt:
            logger.info("Interrupted; the workers have ended.")
        finally:
            trainer.tracer.teardown()


def _work(plan: WorkerPlan, trainer: Trainer) -> None:
    if trainer.n_workers == 1:
        plan.work(0)
        return
    with worker_processes(plan, trainer.n_workers, daemon=trainer.daemon) as processes:
        join_workers(processes)


# ---------------------------------------------------------------------- where tasks come from


def _is_backend(given: object) -> TypeIs[Backend]:
    return isinstance(given, (str, AgentLightningClient))


def _dev_backend(dev_data: Backend | None, dev_backend: Backend | None) -> Backend:
    if dev_backend is not None:
        deprecated("Argument 'dev_backend' of fit_v0() is now called 'dev_data'.", stacklevel=_USER_OF_FIT_V0 + 1)
    chosen = dev_data if dev_data is not None else dev_backend
    if not _is_backend(chosen):
        raise ConfigurationError(
            "Trainer(dev=True) takes its tasks from dev_data, the URL of a v0.1 server or a client such as "
            f"DevTaskLoader; it is {chosen!r}."
        )
    return chosen


def _serving(algorithm: Algorithm | None) -> Algorithm:
    """The algorithm, if it serves v0.1 clients."""
    if algorithm is None or type(algorithm).get_client is Algorithm.get_client:
        name = "there is none" if algorithm is None else f"{type(algorithm).__name__} has none"
        raise ConfigurationError(
            f"fit_v0 hands a data set to an algorithm with a method get_client, and {name}; pass the URL of a server, "
            "or call fit."
        )
    return algorithm


@contextmanager
def _client_of(backend: Backend) -> Iterator[AgentLightningClient]:
    """A client of the server; one that is made here is closed at the end."""
    client = _connected(backend)
    try:
        yield client
    finally:
        if client is not backend:
            client.close()


def _connected(backend: Backend) -> AgentLightningClient:
    if isinstance(backend, AgentLightningClient):
        return backend
    with already_told():
        return AgentLightningClient(backend)


# ---------------------------------------------------------------------- parts


def _exporter_for(agent: LitAgent[Any], adapter: TraceAdapter[Any]) -> TraceAdapter[Any]:
    """The adapter, for the agents that the agent says are to be trained."""
    if agent.trained_agents is None:
        return adapter
    if not hasattr(adapter, "agent_match"):
        logger.warning("%s has no agent_match, so trained_agents has no effect.", type(adapter).__name__)
        return adapter
    chosen = copy.copy(adapter)
    chosen.agent_match = agent.trained_agents
    return chosen


def _tell_unused(trainer: Trainer, val_data: object) -> None:
    """Say what has no meaning when a server decides which tasks there are."""
    unused = {"val_data": val_data, "algorithm": trainer.algorithm, "hooks": trainer.hooks or None}
    names = [name for name, value in unused.items() if value is not None]
    if names:
        logger.warning("Not used with tasks of a v0.1 server: %s.", ", ".join(names))


def _bind(algorithm: Algorithm, trainer: Trainer) -> None:
    """Give the algorithm what it works with, but no store: its absence tells that this is the old protocol."""
    algorithm.set_trainer(trainer)
    algorithm.set_adapter(trainer.adapter)
    algorithm.set_llm_proxy(trainer.llm_proxy)
    if trainer.initial_resources is not None:
        algorithm.set_initial_resources(trainer.initial_resources)


def _run(algorithm: Algorithm, train_data: Any, val_data: Any) -> None:
    result = algorithm.run(train_dataset=train_data, val_dataset=val_data)
    if inspect.iscoroutine(result):
        thread = LoopThread("legacy-algorithm")
        try:
            thread.run(result)
        finally:
            thread.stop()


# ---------------------------------------------------------------------- the trainer of the first release


class TrainerLegacy(Trainer):
    """A `Trainer` that can be taken through its life by hand, as in the first release."""

    _client: AgentLightningClient | None = None
    _connection: ExitStack | None = None

    def init(self, backend: Backend) -> None:
        """Connect to a server and prepare the tracer."""
        deprecated("TrainerLegacy speaks the v0.1 protocol, which is deprecated; use Trainer.fit and a store.")
        self._connection = ExitStack()
        self._client = self._connection.enter_context(_client_of(backend))
        self.tracer.init()

    def teardown(self) -> None:
        """Undo `init`; harmless without it."""
        if self._connection is not None:
            self._connection.close()
            self._client = self._connection = None
            self.tracer.teardown()

    def client(self) -> AgentLightningClient:
        """The client; RuntimeError before `init`."""
        if self._client is None:
            raise TrainingError("The trainer has no client yet; call init(backend) first.")
        return self._client

    kill_orphaned_processes = staticmethod(kill_orphaned_processes)
