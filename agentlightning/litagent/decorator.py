"""Plain functions as agents: what a function needs of the resources is handed to it by the name of the parameter.

@rollout
def agent(task, llm):            # or prompt_template, both, `resources` or neither; and `rollout`, for its ids
    ...
    return reward
"""

import functools
import inspect
import logging
import pkgutil
from collections.abc import Callable
from typing import Any, Literal, TypeVar, overload

from agentlightning.errors import ConfigurationError
from agentlightning.litagent.litagent import LitAgent
from agentlightning.types import (
    LLM,
    AttemptedRollout,
    NamedResources,
    PromptTemplate,
    ProxyLLM,
    Resource,
    ResourcesUpdate,
    Rollout,
    RolloutRawResult,
    TaskInput,
)
from agentlightning.types.resources import resources_for, scoped_to
from agentlightning.utils.json_values import JsonObject

__all__ = ["FunctionalLitAgent", "llm_rollout", "prompt_rollout", "rollout"]

logger = logging.getLogger(__name__)

T = TypeVar("T")
_ResourceT = TypeVar("_ResourceT", bound=Resource)
RolloutFunction = Callable[..., Any]
"""Takes a task and, by name, what it needs; plain or a coroutine function."""

_LEAST_PARAMETERS = 2
_OPEN_KINDS = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class FunctionalLitAgent(LitAgent[T]):
    """A function as an agent; it can still be called as the function it is."""

    def __init__(self, rollout_func: RolloutFunction, *, strip_proxy: bool = True) -> None:
        """Nothing is called yet.

        Args:
            rollout_func: Its first parameter is the task; `llm`, `prompt_template`, `resources` and `rollout` are
                filled by name.
            strip_proxy: Give the function a plain `LLM` whose URL names its attempt, instead of the `ProxyLLM`.
        """
        super().__init__()
        self._rollout_func = rollout_func
        self._strip_proxy = strip_proxy
        self._is_async = inspect.iscoroutinefunction(rollout_func)
        self._parameters = frozenset(inspect.signature(rollout_func).parameters)
        functools.update_wrapper(self, rollout_func)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        return self._rollout_func(*args, **kwargs)

    def is_async(self) -> bool:
        return self._is_async

    def rollout(self, task: T, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        if self._is_async:
            raise RuntimeError(f"{self._name} is a coroutine function; call rollout_async.")
        result: RolloutRawResult = self._rollout_func(task, **self._arguments(resources, rollout))
        return result

    async def rollout_async(self, task: T, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        if not self._is_async:
            raise RuntimeError(f"{self._name} is not a coroutine function; call rollout.")
        result: RolloutRawResult = await self._rollout_func(task, **self._arguments(resources, rollout))
        return result

    def check_parameters(self) -> None:
        """ConfigurationError if the function asks for something that there is not."""
        known = {"rollout", "llm", "prompt_template", "resources"}
        signature = inspect.signature(self._rollout_func)
        others = list(signature.parameters.values())[1:]
        unknown = [p.name for p in others if p.name not in known and p.default is p.empty and p.kind not in _OPEN_KINDS]
        if unknown:
            raise ConfigurationError(
                f"{self._name} asks for {', '.join(unknown)}; a function is given its task and, by name, llm, "
                "prompt_template, resources and rollout. Give the others defaults, or write a LitAgent."
            )
        try:
            signature.bind(None, **dict.fromkeys(known & self._parameters))
        except TypeError as error:
            raise ConfigurationError(
                f"{self._name}{signature} cannot be called with its task first and the others by name: {error}; "
                f"write it as {self._name}(task)."
            ) from error

    def __reduce__(self) -> Any:
        """By its address, because that is where the function is too, which cannot be found by its own any more."""
        function = self._rollout_func
        address = f"{function.__module__}:{getattr(function, '__qualname__', '')}"
        try:
            is_there = pkgutil.resolve_name(address) is self
        except (ValueError, ImportError, AttributeError):  # made inside a function, or in a program's main module
            is_there = False
        return (pkgutil.resolve_name, (address,)) if is_there else super().__reduce__()

    @property
    def _name(self) -> str:
        return getattr(self._rollout_func, "__name__", repr(self._rollout_func))

    def _arguments(self, resources: NamedResources | ResourcesUpdate, rollout: Rollout) -> JsonObject:
        """What the function asks for besides the task."""
        given = resources.resources if isinstance(resources, ResourcesUpdate) else resources
        named = resources_for(self._name, given)
        arguments: JsonObject = {}
        if "rollout" in self._parameters:
            arguments["rollout"] = rollout
        if "llm" in self._parameters:
            arguments["llm"] = self._plain(self._only(named, LLM, "llm"), rollout)
        if "prompt_template" in self._parameters:
            arguments["prompt_template"] = self._only(named, PromptTemplate, "prompt_template")
        if "resources" in self._parameters:
            own = scoped_to(self._name, given)
            # An LLM that leaves its endpoint to the default is made whole by `resources_for`.
            whole = {name: one for name, one in own.items() if isinstance(one, LLM) and vars(one)["endpoint"]}
            arguments["resources"] = {**own, **{name: self._plain(one, rollout) for name, one in whole.items()}}
        return arguments

    def _only(self, resources: NamedResources, kind: type[_ResourceT], parameter: str) -> _ResourceT:
        """The resource of this kind; of several, the first."""
        found = [(name, resource) for name, resource in resources.items() if isinstance(resource, kind)]
        if not found:
            raise ConfigurationError(
                f"{self._name} asks for {parameter}, a resource of type {kind.__name__}, and the rollout has "
                f"{sorted(resources) or 'no resources at all'}; give the Trainer "
                f"initial_resources={{'{parameter}': {kind.__name__}(...)}}, or publish one with store.add_resources."
            )
        name, resource = found[0]
        if len(found) > 1:
            logger.warning(
                "%s gets the %s '%s'; there are others that it does not see: %s.",
                self._name,
                kind.__name__,
                name,
                ", ".join(other for other, _ in found[1:]),
            )
        return resource

    def _plain(self, llm: LLM, rollout: Rollout) -> LLM:
        if not self._strip_proxy or not isinstance(llm, ProxyLLM):
            return llm
        if not isinstance(rollout, AttemptedRollout):
            raise ConfigurationError(
                f"{self._name} uses the LLM proxy, whose URL names the attempt; a {type(rollout).__name__} has none. "
                "Pass an AttemptedRollout, or decorate with strip_proxy=False."
            )
        return llm.with_attempted_rollout(rollout)


# ---------------------------------------------------------------------- decorators


def _validate(func: RolloutFunction, resource: Literal["llm", "prompt_template"]) -> bool:
    parameters = list(inspect.signature(func).parameters.values())
    name = getattr(func, "__name__", repr(func))
    if len(parameters) < _LEAST_PARAMETERS:
        raise ConfigurationError(f"{name} must have at least 2 parameters: task, and {resource}.")
    if parameters[0].name != "task":
        raise ConfigurationError(
            f"The first parameter of {name} must be a positional parameter called 'task', not '{parameters[0].name}'."
        )
    if resource not in (parameter.name for parameter in parameters):
        raise ConfigurationError(f"{name} must have a positional parameter called '{resource}'.")
    return True


_validate_llm_rollout_func = functools.partial(_validate, resource="llm")
_validate_prompt_rollout_func = functools.partial(_validate, resource="prompt_template")


@overload
def llm_rollout(func: RolloutFunction) -> FunctionalLitAgent[TaskInput]: ...


@overload
def llm_rollout(*, strip_proxy: bool = True) -> Callable[[RolloutFunction], FunctionalLitAgent[TaskInput]]: ...


def llm_rollout(
    func: RolloutFunction | None = None, *, strip_proxy: bool = True
) -> FunctionalLitAgent[TaskInput] | Callable[[RolloutFunction], FunctionalLitAgent[TaskInput]]:
    """Make an agent of a function that takes a task and an `llm`; used bare or with arguments."""

    def decorate(function: RolloutFunction) -> FunctionalLitAgent[TaskInput]:
        _validate_llm_rollout_func(function)
        return FunctionalLitAgent(function, strip_proxy=strip_proxy)

    return decorate if func is None else decorate(func)


@overload
def prompt_rollout(func: RolloutFunction) -> FunctionalLitAgent[TaskInput]: ...


@overload
def prompt_rollout() -> Callable[[RolloutFunction], FunctionalLitAgent[TaskInput]]: ...


def prompt_rollout(
    func: RolloutFunction | None = None,
) -> FunctionalLitAgent[TaskInput] | Callable[[RolloutFunction], FunctionalLitAgent[TaskInput]]:
    """Make an agent of a function that takes a task and a `prompt_template`; used bare or with `()`."""
    if func is None:
        return prompt_rollout
    _validate_prompt_rollout_func(func)
    return FunctionalLitAgent(func)


def rollout(func: RolloutFunction) -> FunctionalLitAgent[TaskInput]:
    """Make an agent of a function of a task and, by name, of an llm, prompt_template, resources or rollout."""
    parameters = list(inspect.signature(func).parameters.values())
    names = [parameter.name for parameter in parameters]
    unknown = [p for p in parameters[1:] if p.name != "rollout" and p.default is p.empty and p.kind not in _OPEN_KINDS]
    if names[:1] != ["task"] or (unknown and not {"llm", "prompt_template", "resources"} & set(names)):
        raise NotImplementedError(
            f"{getattr(func, '__name__', func)!r} does not match any known agent patterns: its first parameter must be "
            f"'task', and others without a default 'llm', 'prompt_template', 'resources' or 'rollout'; it has {names}."
        )
    return FunctionalLitAgent(func)
