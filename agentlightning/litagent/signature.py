"""Whether an agent can be called at all, said before anything runs."""

import inspect
from collections.abc import Callable
from typing import Any

from agentlightning.errors import ConfigurationError
from agentlightning.litagent.decorator import FunctionalLitAgent
from agentlightning.litagent.litagent import LitAgent, is_v0_1_rollout_api

__all__ = ["check_signature"]

_METHODS = ("rollout", "training_rollout", "validation_rollout")


def check_signature(agent: LitAgent[Any]) -> None:
    """ConfigurationError if a runner could not call the agent."""
    if isinstance(agent, FunctionalLitAgent):
        agent.check_parameters()
        return
    names = [*_METHODS, *(f"{name}_async" for name in _METHODS)]
    own = [name for name in names if getattr(type(agent), name) is not getattr(LitAgent, name)]
    if not own:
        raise ConfigurationError(
            f"{type(agent).__name__} does nothing; define rollout(task, resources, rollout), plain or async."
        )
    for name in own:
        _check_method(type(agent).__name__, name, getattr(agent, name))


def _check_method(kind: str, name: str, method: Callable[..., Any]) -> None:
    if is_v0_1_rollout_api(method):
        raise ConfigurationError(
            f"{kind}.{name} takes rollout_id, as in the legacy protocol; let it take (task, resources, rollout), or "
            "call fit_v0."
        )
    try:
        inspect.signature(method).bind(None, resources=None, rollout=None)
    except TypeError as error:
        raise ConfigurationError(
            f"{kind}.{name}{inspect.signature(method)} cannot be called with (task, resources, rollout): {error}."
        ) from error
