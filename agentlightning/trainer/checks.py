"""What users hand to a Trainer, checked: the agent, the data sets, arguments that have another name now."""

import inspect
from collections.abc import Mapping
from typing import Any, TypeVar

from agentlightning.errors import ConfigurationError
from agentlightning.litagent import LitAgent
from agentlightning.litagent.decorator import FunctionalLitAgent
from agentlightning.litagent.signature import check_signature
from agentlightning.utils.deprecation import deprecated

__all__ = ["check_dataset", "checked_agent", "renamed"]

_Value = TypeVar("_Value")


def renamed(new: str, value: _Value | None, old: str, old_value: _Value | None) -> _Value | None:
    """The value of an argument that had another name."""
    if old_value is None:
        return value
    deprecated(f"Argument '{old}' of Trainer is deprecated; use '{new}'.", stacklevel=4)
    if value is not None and value != old_value:
        deprecated(f"Both '{new}' and '{old}' are given; '{old}' is ignored.", stacklevel=4)
    return old_value if value is None else value


def checked_agent(agent: Any) -> LitAgent[Any]:
    """The agent, or a plain function as one: it is given its task, and what else it asks for by name."""
    if inspect.isfunction(agent):
        agent = FunctionalLitAgent(agent)
    if isinstance(agent, LitAgent):
        check_signature(agent)
        return agent
    hint = "derive it from LitAgent, or give a function"
    if isinstance(agent, type) and issubclass(agent, LitAgent):
        hint = f"make an instance: {agent.__name__}()"
    raise ConfigurationError(f"The agent must be a LitAgent; {agent!r} is none: {hint}.")


def check_dataset(label: str, dataset: Any) -> None:
    if isinstance(dataset, (str, bytes)):
        raise ConfigurationError(f"{label} is the text {dataset!r:.80}; read the tasks into a list first.")
    is_indexed = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__") and not isinstance(dataset, Mapping)
    if dataset is None or is_indexed:
        return
    raise ConfigurationError(
        f"{label} must have a length and give its samples by number, as a list does; a {type(dataset).__name__} does "
        "not. Make a list of it: list(...)."
    )
