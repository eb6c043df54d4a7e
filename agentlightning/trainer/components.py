"""What users hand to a Trainer, checked and built: its parts, its agents, its data sets."""

import inspect
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

from agentlightning.adapter import TraceAdapter, TracerTraceToTriplet
from agentlightning.algorithm import Algorithm
from agentlightning.errors import ConfigurationError, StoreUnavailable
from agentlightning.execution import ClientServerExecutionStrategy, ExecutionStrategy
from agentlightning.litagent import AgentRouter, LitAgent, Route
from agentlightning.litagent.decorator import FunctionalLitAgent
from agentlightning.litagent.invocation import Predicate, name_of
from agentlightning.llm_proxy import LLMProxy
from agentlightning.runner import LitAgentRunner, Runner
from agentlightning.store.base import LightningStore
from agentlightning.store.client_server import LightningStoreClient
from agentlightning.store.forwarding import innermost
from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.store.sqlite import SqliteLightningStore
from agentlightning.tracer import Tracer
from agentlightning.trainer.init_utils import build_component, instantiate_component
from agentlightning.trainer.registry import ExecutionStrategyRegistry
from agentlightning.types.resources import check_agent_name
from agentlightning.utils.deprecation import deprecated

logger = logging.getLogger(__name__)

_Value = TypeVar("_Value")
USER_OF_TRAINER: Final = 4
"""The stack level, for a warning, of who makes a Trainer, seen from its constructor, which is wrapped."""
_ALGORITHMS: Final = ("GRPO", "SFT", "APO", "GEPA", "VERL", "Baseline")


def renamed(new: str, value: _Value | None, old: str, old_value: _Value | None) -> _Value | None:
    """The value of an argument that had another name."""
    if old_value is None:
        return value
    deprecated(f"Argument '{old}' of Trainer is deprecated; use '{new}'.", stacklevel=USER_OF_TRAINER + 1)
    if value is not None and value != old_value:
        deprecated(f"Both '{new}' and '{old}' are given; '{old}' is ignored.", stacklevel=USER_OF_TRAINER + 1)
    return old_value if value is None else value


# ---------------------------------------------------------------------- parts


def build_adapter(adapter: object, triplet_exporter: object) -> TraceAdapter[Any]:
    if triplet_exporter is not None:
        deprecated(
            "triplet_exporter is deprecated; use adapter."
            if adapter is None
            else "Both adapter and the deprecated triplet_exporter are given; adapter is used.",
            stacklevel=USER_OF_TRAINER + 1,
        )
    return build_component(
        adapter if adapter is not None else triplet_exporter,
        expected_type=TraceAdapter,
        spec_name="adapter",
        default_factory=TracerTraceToTriplet,
        dict_requires_type=False,
        dict_default_cls=TracerTraceToTriplet,
    )


def build_algorithm(algorithm: object) -> Any:
    if isinstance(algorithm, str) and "." not in algorithm:
        likely = {name.lower(): name for name in _ALGORITHMS}.get(algorithm.lower(), _ALGORITHMS[0])
        raise ConfigurationError(
            f"algorithm cannot be '{algorithm}'; give an instance such as agl.{likely}(...) (there are "
            f"{', '.join(_ALGORITHMS)}), or an import path such as 'package.module.Class'."
        )
    return build_component(algorithm, expected_type=Algorithm, spec_name="algorithm", allow_none=True)


def check_reads_adapter(algorithm: Algorithm) -> None:
    """ConfigurationError for an adapter that would have no effect."""
    if not algorithm.reads_adapter:
        name = type(algorithm).__name__
        raise ConfigurationError(
            f"{name} reads model calls by itself and would not use the adapter; leave adapter out, and name the agents "
            f"whose calls count with {name}(agent_match=...)."
        )


def build_strategy(strategy: object, *, n_runners: int, port: int | None) -> ExecutionStrategy:
    defaults: dict[str, object] = {"n_runners": n_runners}
    if port is not None:
        defaults["server_port"] = port
    if n_runners > 1:
        defaults["main_thread"] = "algorithm"  # for `shm`
    built: ExecutionStrategy = build_component(
        strategy,
        expected_type=ExecutionStrategy,
        spec_name="strategy",
        default_factory=lambda: instantiate_component(ClientServerExecutionStrategy, None, defaults),
        optional_defaults=defaults,
        registry=ExecutionStrategyRegistry,
    )
    if isinstance(strategy, ClientServerExecutionStrategy) and port is not None:
        strategy.set_port(port)
    return built


def build_runner(runner: object, *, tracer: Tracer, max_rollouts: int | None) -> Runner[Any]:
    return build_component(
        runner,
        expected_type=Runner,
        spec_name="runner",
        default_factory=lambda: LitAgentRunner(tracer, max_rollouts=max_rollouts),
        optional_defaults={"tracer": tracer, **({} if max_rollouts is None else {"max_rollouts": max_rollouts})},
        dict_requires_type=False,
        dict_default_cls=LitAgentRunner,
    )


def build_proxy(llm_proxy: object, *, store: LightningStore) -> Any:
    """A proxy of another make is taken as it is."""
    if llm_proxy is None or (hasattr(llm_proxy, "set_store") and not inspect.isclass(llm_proxy)):
        return llm_proxy
    return build_component(
        llm_proxy,
        expected_type=LLMProxy,
        spec_name="llm_proxy",
        optional_defaults={"store": store},
        dict_requires_type=False,
        dict_default_cls=LLMProxy,
    )


# ---------------------------------------------------------------------- stores


def build_store(spec: object) -> LightningStore:
    """The store a user specifies; one in memory, if none.

    A text is `memory`, `sqlite` (a file in the working directory), `sqlite:///relative/path`,
    `sqlite:////absolute/path`, a path that ends in `.db` or `.sqlite`, `postgresql://user@host/database`, the URL of a
    server, or the import path of a class.
    """
    text = str(spec) if isinstance(spec, (str, Path)) else ""
    scheme = urlsplit(text).scheme
    if scheme == "sqlite":
        path = text.removeprefix("sqlite:///")
        if path == text or not path:
            raise ConfigurationError(f"store {text!r} names no file; write it as sqlite:///path/to/file.db.")
        return SqliteLightningStore(path)
    if scheme in ("postgresql", "postgres"):
        from agentlightning.store.postgres import PostgresLightningStore

        return PostgresLightningStore(text)
    if scheme in ("http", "https"):
        return LightningStoreClient(text)
    if "://" in text:
        raise ConfigurationError(
            f"store {text!r}: unknown scheme {scheme!r}; write sqlite:///file.db, http://host:4747 or postgresql://host/name"
        )
    if text == "sqlite" or text.endswith((".db", ".sqlite")):
        return SqliteLightningStore("agentlightning.db" if text == "sqlite" else text)
    return build_component(
        None if text == "memory" else spec,
        expected_type=LightningStore,
        spec_name="store",
        default_factory=InMemoryLightningStore,
    )


def store_address(store: LightningStore) -> str | None:
    """Where a store can be found again after the program has ended; None, if nowhere."""
    inner = innermost(store)
    if isinstance(inner, SqliteLightningStore):
        return str(inner.path)
    if isinstance(inner, LightningStoreClient):
        return inner.server_address
    address: str | None = getattr(inner, "address", None)  # of a database
    return address


def move_log(store: LightningStore) -> None:
    """At the end of a training, make the file of a SQLite store the whole store; it stays open, and may be used on."""
    inner = innermost(store)
    if isinstance(inner, SqliteLightningStore):
        try:
            inner.checkpoint()
        except StoreUnavailable as error:
            logger.warning("The log of the store stays beside its file, and must be copied with it: %s", error)


# ---------------------------------------------------------------------- agents and data sets


def checked_agent(agent: object) -> LitAgent[Any]:
    """The agent, or a function or method as one: it is given its task, and its other parameters by name."""
    if inspect.isfunction(agent) or inspect.ismethod(agent):
        agent = FunctionalLitAgent(agent)
    if isinstance(agent, LitAgent):
        agent.check_parameters()
        return agent
    hint = "give a function without calling it, or an instance of a class derived from LitAgent"
    if isinstance(agent, type) and issubclass(agent, LitAgent):
        hint = f"make an instance: {agent.__name__}()"
    raise ConfigurationError(f"The agent must be a function or a LitAgent; {agent!r:.80} is neither: {hint}.")


def checked_route(agent: object, name: str | None, when: Predicate | None, others: Sequence[Route]) -> Route:
    """An agent beside others, under a name of its own: the given one, or that of its function or class."""
    agent, taken = checked_agent(agent), {route.name for route in others}
    if name is None:
        base = name_of(agent)
        numbered = (f"{base}-{number}" for number in range(2, len(taken) + 3))
        name = base if base not in taken else next(each for each in numbered if each not in taken)
    check_agent_name(name)
    if name in taken:
        raise ConfigurationError(f"Two agents are called '{name}'; give one of them another name.")
    if when is not None and not callable(when):
        raise ConfigurationError(f"`when` of agent '{name}' must be a function of the task; it is {when!r}.")
    return Route(name, agent, when)


def combined(routes: Sequence[Route]) -> LitAgent[Any]:
    """The registered agents as one; the first without a rule of its own takes what is left."""
    first = routes[0]
    if len(routes) == 1 and first.matches is None and first.name == name_of(first.agent):
        return first.agent
    default = next((route.name for route in routes if route.matches is None), None)
    return AgentRouter(routes, default=default, by_name=len(routes) > 1)
