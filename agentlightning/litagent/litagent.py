"""LitAgent: an agent as a class, for those who want more than a function.

A subclass says how to do one task, as a plain method or as a coroutine, under whichever of the names below. What it
returns is its result: None if its spans say it all, a number as the reward, or spans.
"""

import inspect
import weakref
from collections.abc import Awaitable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from agentlightning.errors import ConfigurationError
from agentlightning.store.claims import Claim
from agentlightning.types import NamedResources, ParallelWorkerBase, Rollout, RolloutRawResult, Task
from agentlightning.utils.daemon_threads import DaemonThreads
from agentlightning.utils.deprecation import deprecated
from agentlightning.utils.json_values import JsonObject

if TYPE_CHECKING:
    from agentlightning.tracer import Tracer

__all__ = ["LitAgent", "current_claim", "current_work", "is_v0_1_rollout_api", "working_for"]

T = TypeVar("T")

_PLAIN_NAMES = ("rollout", "training_rollout", "validation_rollout")
_ASYNC_NAMES = tuple(f"{name}_async" for name in _PLAIN_NAMES)


class working_for:  # noqa: N801 # read as a verb; a class, because a generator takes longer
    """What agents do inside is done for this runner, which may have got the attempt by a claim."""

    def __init__(self, runner: Any, claim: Claim | None = None, threads: DaemonThreads | None = None) -> None:
        self.runner = runner
        self.claim = claim
        self.threads = threads
        """In which the runner calls plain agents, and ends with itself."""
        self.agent_name: str | None = None
        """The agent that a router chose, to whom the result belongs; the innermost, where routers nest."""
        self.routed: dict[int, Any] = {}
        """What each router, by its id, keeps between the callbacks of this attempt."""

    def __enter__(self) -> None:
        self._reset = _WORK.set(self)

    def __exit__(self, *exc_info: object) -> None:
        _WORK.reset(self._reset)


_WORK: ContextVar[working_for | None] = ContextVar("agentlightning_work", default=None)
current_work = _WORK.get


def current_claim() -> Claim | None:
    """The claim that the agent works on here, with the credentials of its attempt; None outside of claimed work."""
    work = _WORK.get()
    return None if work is None else work.claim


def is_v0_1_rollout_api(func: Any) -> bool:
    """Whether a rollout method takes `rollout_id`, as those of the first release did."""
    return "rollout_id" in inspect.signature(func).parameters


class LitAgent(Generic[T]):
    """Base of agents; `T` is the type of their tasks."""

    trained_agents: str | None = None

    def __init__(self, trained_agents: str | None = None) -> None:
        """All of it is optional; subclasses need not call this.

        Args:
            trained_agents: Deprecated; give the adapter an `agent_match` instead.
        """
        if trained_agents is not None:
            deprecated("`trained_agents` is deprecated; configure `agent_match` of the adapter instead.")
        self.trained_agents = trained_agents

    def is_async(self) -> bool:
        """Whether the agent is written as coroutines, under the names that say so or under the plain ones."""
        is_named_so = any(map(self.overrides, _ASYNC_NAMES))
        return is_named_so or any(inspect.iscoroutinefunction(getattr(type(self), name)) for name in _PLAIN_NAMES)

    def overrides(self, name: str) -> bool:
        """Whether the agent defines this method itself."""
        return getattr(type(self), name) is not getattr(LitAgent, name)

    def check_parameters(self) -> None:
        """ConfigurationError if a runner could not call the agent."""
        kind, own = type(self).__name__, [name for name in (*_PLAIN_NAMES, *_ASYNC_NAMES) if self.overrides(name)]
        if not own:
            raise ConfigurationError(f"{kind} does nothing; define rollout(task, resources, rollout), plain or async.")
        for name in own:
            method = getattr(self, name)
            if is_v0_1_rollout_api(method):
                raise ConfigurationError(
                    f"{kind}.{name} takes rollout_id, as in the legacy protocol; let it take (task, resources, "
                    "rollout), or call fit_v0."
                )
            try:
                inspect.signature(method).bind(None, resources=None, rollout=None)
            except TypeError as error:
                raise ConfigurationError(
                    f"{kind}.{name}{inspect.signature(method)} cannot be called with (task, resources, rollout): "
                    f"{error}."
                ) from error

    # ------------------------------------------------------------------ whom it works for

    def set_trainer(self, trainer: Any) -> None:
        self._trainer_ref = weakref.ref(trainer)

    def get_trainer(self) -> Any:
        """The trainer; ValueError if there is none."""
        return self._owner("trainer")

    def set_runner(self, runner: Any) -> None:
        self._runner_ref = weakref.ref(runner)

    def get_runner(self) -> Any:
        """The runner that runs the agent here or, outside of rollouts, the last that was set; ValueError if none."""
        work = _WORK.get()
        return work.runner if work is not None and work.runner is not None else self._owner("runner")

    def _owner(self, name: str) -> Any:
        reference = vars(self).get(f"_{name}_ref")
        owner = None if reference is None else reference()
        if owner is None:
            raise ConfigurationError(
                f"{type(self).__name__} has no {name}; it is set by set_{name}, and kept while the {name} is in use."
            )
        return owner

    def get_tracer(self) -> "Tracer":
        """The tracer of the runner or, without one, of the trainer."""
        reference, work = vars(self).get("_runner_ref"), _WORK.get()
        runner = (work and work.runner) or (None if reference is None else reference())
        tracer: Tracer | None = getattr(runner, "tracer", None)
        return self.get_trainer().tracer if tracer is None else tracer

    trainer = property(get_trainer)
    runner = property(get_runner)
    tracer = property(get_tracer)

    def __getstate__(self) -> JsonObject:
        """An agent travels to another process without its owners."""
        return {name: value for name, value in vars(self).items() if name not in ("_trainer_ref", "_runner_ref")}

    # ------------------------------------------------------------------ called around a rollout

    def on_rollout_start(self, task: Task, runner: ParallelWorkerBase, tracer: "Tracer") -> Awaitable[None] | None:
        """A rollout is about to begin; may be a coroutine function. Hooks of the trainer get more arguments."""
        return None

    def on_rollout_end(
        self, task: Task, rollout: Any, runner: ParallelWorkerBase, tracer: "Tracer"
    ) -> Awaitable[None] | None:
        """A rollout is over; may be a coroutine function."""
        return None

    def has_callback(self, name: str) -> bool:
        """Whether the agent defines the callback `on_rollout_start` or `on_rollout_end`."""
        return self.overrides(name)

    # ------------------------------------------------------------------ the work

    def rollout(self, task: T, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        """Do one task; may be a coroutine function."""
        raise NotImplementedError(
            f"{type(self).__name__} must define rollout(task, resources, rollout) or rollout_async(...)."
        )

    async def rollout_async(self, task: T, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        """Do one task, as a coroutine."""
        raise NotImplementedError(
            f"{type(self).__name__} must define rollout_async(task, resources, rollout) or rollout(...)."
        )

    def training_rollout(self, task: T, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        """Do one task of the training set."""
        return self.rollout(task, resources, rollout)

    def validation_rollout(self, task: T, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        """Do one task of any other set."""
        return self.rollout(task, resources, rollout)

    async def training_rollout_async(self, task: T, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        """Do one task of the training set, as a coroutine."""
        return await self.rollout_async(task, resources, rollout)

    async def validation_rollout_async(self, task: T, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        """Do one task of any other set, as a coroutine."""
        return await self.rollout_async(task, resources, rollout)
