"""A Trainer's parts from the ways users write them: an instance, a class, a factory, a name, or a dictionary."""

import inspect
from typing import Any

from agentlightning.adapter import TraceAdapter, TracerTraceToTriplet
from agentlightning.execution import ClientServerExecutionStrategy, ExecutionStrategy
from agentlightning.llm_proxy import LLMProxy
from agentlightning.runner import LitAgentRunner, Runner
from agentlightning.store.base import LightningStore
from agentlightning.tracer import Tracer
from agentlightning.trainer.init_utils import build_component, instantiate_component
from agentlightning.trainer.registry import ExecutionStrategyRegistry
from agentlightning.utils.deprecation import deprecated

__all__ = ["built_adapter", "built_proxy", "built_runner", "built_strategy"]


def built_adapter(adapter: Any, triplet_exporter: Any) -> TraceAdapter[Any]:
    if triplet_exporter is not None:
        deprecated(
            "triplet_exporter is deprecated; use adapter."
            if adapter is None
            else "Both adapter and the deprecated triplet_exporter are given; adapter is used.",
            stacklevel=4,
        )
    return build_component(
        adapter if adapter is not None else triplet_exporter,
        expected_type=TraceAdapter,
        spec_name="adapter",
        default_factory=TracerTraceToTriplet,
        dict_requires_type=False,
        dict_default_cls=TracerTraceToTriplet,
    )


def built_strategy(strategy: Any, *, n_runners: int, port: int | None) -> ExecutionStrategy:
    defaults: dict[str, Any] = {"n_runners": n_runners}
    if port is not None:
        defaults["server_port"] = port
    if n_runners > 1:
        defaults["main_thread"] = "algorithm"  # for `shm`
    built = build_component(
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


def built_runner(runner: Any, *, tracer: Tracer, max_rollouts: int | None) -> Runner[Any]:
    defaults: dict[str, Any] = {"tracer": tracer}
    if max_rollouts is not None:
        defaults["max_rollouts"] = max_rollouts
    return build_component(
        runner,
        expected_type=Runner,
        spec_name="runner",
        default_factory=lambda: LitAgentRunner(tracer, max_rollouts=max_rollouts),
        optional_defaults=defaults,
        dict_requires_type=False,
        dict_default_cls=LitAgentRunner,
    )


def built_proxy(llm_proxy: Any, *, store: LightningStore) -> Any:
    """A proxy of another make is taken as it is."""
    if llm_proxy is None or (hasattr(llm_proxy, "set_store") and not inspect.isclass(llm_proxy)):
        return llm_proxy
    spec: Any = llm_proxy
    return build_component(
        spec,
        expected_type=LLMProxy,
        spec_name="llm_proxy",
        optional_defaults={"store": store},
        dict_requires_type=False,
        dict_default_cls=LLMProxy,
    )
