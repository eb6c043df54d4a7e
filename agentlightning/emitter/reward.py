"""Rewards: how good it was. Written in the formats of both releases, and read in all of them.

A span may carry several rewards by name; the first one, the *primary*, is what `get_reward_value` gives. Written are
the span `agentlightning.reward` with its attribute `reward`, and `agentlightning.reward.{i}.name` and `.value`. The
readers are those of `types.rewards`, under their public names.
"""

import functools
import importlib
import inspect
import logging
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from agentlightning.emitter.emission import EmittedSpan, emit, user_attributes
from agentlightning.emitter.utils import get_tracer
from agentlightning.semconv import AGL_EVENT_KIND, AGL_REWARD, LightningSpanAttributes, RewardAttributes
from agentlightning.types import SpanLike
from agentlightning.types.rewards import final_reward_of, is_reward_span, reward_value_of, rewards_of
from agentlightning.utils.deprecation import deprecated

__all__ = [
    "reward",
    "emit_reward",
    "get_reward_value",
    "get_rewards_from_span",
    "is_reward_span",
    "find_reward_spans",
    "find_final_reward",
]

logger = logging.getLogger(__name__)

_FunctionT = TypeVar("_FunctionT", bound=Callable[..., Any])
_SpanT = TypeVar("_SpanT", bound=SpanLike)

_OLD_VALUE = "reward"
_PREFIX = LightningSpanAttributes.REWARD.value
_NAME, _VALUE = RewardAttributes.REWARD_NAME.value, RewardAttributes.REWARD_VALUE.value

# ---------------------------------------------------------------------- writing


def emit_reward(
    reward: float | Mapping[str, float] | Sequence[float],
    *,
    primary_key: str | int | None = None,
    attributes: Mapping[str, Any] | None = None,
    propagate: bool = True,
) -> EmittedSpan:
    """Record a reward: a number, a truth value (read back as a `BinaryReward`), several by name, or several in a row.

    Of a mapping, `primary_key` names the one that counts. Of a sequence, whose items are named by their position, the
    last one counts, as if they had been emitted one after the other, unless `primary_key` gives another position.

    Args:
        primary_key: A key of the mapping, or a position in the sequence.
        attributes: More to note on the span.
        propagate: False makes the span without sending it anywhere.
    """
    is_single = isinstance(reward, (float, int))
    named = {"primary": _number(reward)} if is_single else _named(reward, primary_key)
    noted = user_attributes(attributes)
    for position, (name, value) in enumerate(named.items()):
        if position == 0:
            noted[_OLD_VALUE] = value
        noted[f"{_PREFIX}.{position}.{_NAME}"] = name
        noted[f"{_PREFIX}.{position}.{_VALUE}"] = value
    if isinstance(reward, bool):
        # `kind` of the event that a truth value is.
        noted.setdefault(AGL_EVENT_KIND, "reward.binary")
    span = emit(AGL_REWARD, noted, get_tracer, propagate=propagate)
    if span is None:
        raise ValueError(
            f"The reward {reward!r} was not recorded, because the tracer provider does not record spans; "
            "look at its sampler, and whether OTEL_SDK_DISABLED is set."
        )
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug("Rollout %s is rewarded with %s.", span.rollout_id, noted[_OLD_VALUE])
    return span


def _number(value: object, name: str = "") -> float:
    if not isinstance(value, (int, float)):
        raise ValueError(f"Reward {name}must be a number; {value!r} is of type {type(value).__name__}.")
    if not math.isfinite(value):
        raise ValueError(f"Reward {name}must be a finite number; it is {value}.")
    return float(value)


def _named(reward: object, primary_key: str | int | None) -> dict[str, float]:
    """The rewards by name, the primary one first."""
    if isinstance(reward, Mapping):
        if primary_key is None or primary_key not in reward:
            raise ValueError(
                f"primary_key is {primary_key!r}; of several rewards it must name the one that counts: {list(reward)}."
            )
        items = {str(key): _number(value, f"'{key}' ") for key, value in reward.items()}
    elif isinstance(reward, Sequence) and not isinstance(reward, (str, bytes)) and reward:
        items = {str(position): _number(value, f"{position} ") for position, value in enumerate(reward)}
        primary_key = len(items) - 1 if primary_key is None else primary_key
        if str(primary_key) not in items:
            raise ValueError(f"primary_key is {primary_key!r}; the rewards have the positions 0 to {len(items) - 1}.")
    else:
        raise ValueError(f"Reward must be a number, a mapping or a sequence of numbers; it is {reward!r}.")
    primary = str(primary_key)
    return {primary: items.pop(primary), **items}


# ---------------------------------------------------------------------- reading


get_rewards_from_span = rewards_of
get_reward_value = reward_value_of
find_final_reward = final_reward_of


def find_reward_spans(spans: Iterable[_SpanT]) -> list[_SpanT]:
    """The spans that carry a reward, in the given order."""
    return [span for span in spans if is_reward_span(span)]


# ---------------------------------------------------------------------- the decorator


def reward(function: _FunctionT) -> _FunctionT:
    """Record what a function, plain or async, returns as a reward; its result is passed on. Deprecated: `emit_reward`.

    None is not recorded. Where AgentOps is in use the call becomes one of its operations.
    """
    deprecated("The @reward decorator is deprecated; call emit_reward with the result.")
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def async_wrapper(*args: Any, **kwargs: Any) -> Any:
            kept: list[Any] = []

            async def agentops_reward_operation() -> dict[str, Any]:
                kept.append(await function(*args, **kwargs))
                return _agentops_output(kept[0])

            if not _uses_agentops():
                return _recorded(await function(*args, **kwargs))
            await _agentops_operation(agentops_reward_operation)()
            return kept[0]

        return async_wrapper  # type: ignore[return-value] # it has the signature of what it wraps

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        kept: list[Any] = []

        def agentops_reward_operation() -> dict[str, Any]:
            kept.append(function(*args, **kwargs))
            return _agentops_output(kept[0])

        if not _uses_agentops():
            return _recorded(function(*args, **kwargs))
        _agentops_operation(agentops_reward_operation)()
        return kept[0]

    return wrapper  # type: ignore[return-value] # as above


def _recorded(result: Any) -> Any:
    if result is not None:
        emit_reward(result)
    return result


def _uses_agentops() -> bool:
    """Whether the program has imported AgentOps and started it; we do not import it for this."""
    agentops = sys.modules.get("agentops")
    client = None if agentops is None else agentops.get_client()
    return bool(client is not None and client.initialized)


def _agentops_operation(function: Callable[..., object]) -> Callable[..., Any]:
    operation: Callable[..., Any] = importlib.import_module("agentops.sdk.decorators").operation
    decorated: Callable[..., Any] = operation(function)
    return decorated


def _agentops_output(result: object) -> dict[str, Any]:
    if result is None or isinstance(result, (int, float)):
        return {"type": "reward", "value": None if result is None else float(result)}
    logger.warning("The reward function returned %r, which is not a number; its reward is recorded as None.", result)
    return {"type": "reward", "value": None}
