"""What an agent returned: numbers are rewards, spans are kept, any other value is the rollout's output.

None says that the trace is all. A mapping of names to numbers is several rewards, of which the one named `primary` or
`reward` counts, otherwise the first.
"""

import functools
import logging
import math
from collections.abc import AsyncGenerator, Awaitable, Generator, Mapping, Sequence
from decimal import Decimal
from numbers import Real
from typing import Any, Final

from agentlightning.emitter import emit_reward
from agentlightning.litagent.litagent import current_work
from agentlightning.runner.output import output_of
from agentlightning.semconv import AGL_REWARD, LightningSpanAttributes, RewardAttributes
from agentlightning.store.base import UNSET, LightningStore, Unset
from agentlightning.tracer import get_active_tracer
from agentlightning.tracer.binding import current_binding
from agentlightning.types import AttemptedRollout, Span, SpanCoreFields
from agentlightning.types.rewards import is_reward_span

__all__ = ["hint_at_output", "holds_spans", "record_result", "rewards_of_result", "store_returned_spans"]

logger = logging.getLogger(__name__)

_PREFIX: Final = LightningSpanAttributes.REWARD.value
_PRIMARY_NAMES: Final = ("primary", "reward")
_HINTS_KEPT: Final = 256


async def record_result(result: object, rollout: AttemptedRollout, store: LightningStore) -> Any | Unset:
    """Record the rewards that an agent returned, while its trace is open; returns the output, if the result is one."""
    if result is None or holds_spans(result):
        return UNSET
    rewards = rewards_of_result(result)
    if rewards is None:
        if isinstance(result, (Awaitable, Generator, AsyncGenerator)):  # none of the agent's code has run yet
            raise TypeError(
                f"The agent returned a {type(result).__name__} that has not run; make the agent an `async def` that "
                "awaits it, or have it return what its generator yields."
            )
        return output_of(result)
    for name, reward in rewards.items():
        if not math.isfinite(reward):
            named = f" '{name}'" if isinstance(result, Mapping) else ""
            raise ValueError(f"The agent returned {reward} as its reward{named}, which must be a finite number.")
    if current_binding() is None and get_active_tracer() is None:  # the tracer records elsewhere
        await _store_rewards(rewards, rollout, store)
    elif isinstance(result, Mapping):
        emit_reward(rewards, primary_key=next(iter(rewards)), attributes=_chosen_agent())
    else:
        emit_reward(rewards[_PRIMARY_NAMES[0]], attributes=_chosen_agent())
    return UNSET


def _chosen_agent() -> dict[str, str]:
    """Whose reward it is, where a router chose one of several agents: the trace of its work has ended by now."""
    work = current_work()
    return {} if work is None or work.agent_name is None else {"gen_ai.agent.name": work.agent_name}


def rewards_of_result(result: object) -> dict[str, float] | None:
    """The rewards by name, the primary one first; None if the result is something else."""
    if isinstance(result, float):
        return {_PRIMARY_NAMES[0]: result}
    if not isinstance(result, Mapping):
        reward = _number(result)
        if reward is None:
            return None
        logger.debug("The agent returned %r, which is taken as the reward %s.", result, reward)
        return {_PRIMARY_NAMES[0]: reward}
    rewards = {str(name): number for name, value in result.items() if (number := _number(value)) is not None}
    if not rewards or len(rewards) < len(result):
        return None
    primary = next((name for name in _PRIMARY_NAMES if name in rewards), next(iter(rewards)))
    return {primary: rewards.pop(primary), **rewards}


def _number(value: Any) -> float | None:
    """A value as a number, that of an array without dimensions included; None if it is none."""
    if isinstance(value, (Real, Decimal)):
        return float(value)
    if hasattr(type(value), "item") and getattr(value, "ndim", None) == 0:
        item = value.item()
        return float(item) if isinstance(item, Real) else None
    return None


async def _store_rewards(rewards: Mapping[str, float], rollout: AttemptedRollout, store: LightningStore) -> None:
    rollout_id, attempt_id = rollout.rollout_id, rollout.attempt.attempt_id
    attributes: dict[str, Any] = {"reward": next(iter(rewards.values()))}
    for number, (name, reward) in enumerate(rewards.items()):
        attributes[f"{_PREFIX}.{number}.{RewardAttributes.REWARD_NAME.value}"] = name
        attributes[f"{_PREFIX}.{number}.{RewardAttributes.REWARD_VALUE.value}"] = reward
    span = Span.from_attributes(
        attributes={**attributes, **_chosen_agent()},
        rollout_id=rollout_id,
        attempt_id=attempt_id,
        sequence_id=await store.get_next_span_sequence_id(rollout_id, attempt_id),
        name=AGL_REWARD,
    )
    await store.add_span(span)


def hint_at_output(result: object, spans: Sequence[Any]) -> None:
    """Say once for each type of result that it is no reward, unless the agent has recorded one."""
    if not any(is_reward_span(span) for span in spans if hasattr(span, "attributes")):
        _hint(type(result).__name__)


@functools.lru_cache(maxsize=_HINTS_KEPT)  # once, not once for each rollout
def _hint(kind: str) -> None:
    logger.warning(
        "The agent returned a %s: it is kept as the rollout's output. There is no reward; return a number or call "
        "emit_reward to give one.",
        kind,
    )


async def store_returned_spans(
    result: object, rollout: AttemptedRollout, store: LightningStore, traced: Sequence[Any]
) -> Sequence[Any]:
    """Store the span or spans that an agent returned, but for those its tracer has stored; returns the rollout's."""
    items: list[Any] = list(result) if isinstance(result, list) else [result]
    if not items:
        logger.warning("The agent returned an empty list; return None if there is nothing to say.")
        return traced
    for item in items:
        if not _is_span(item):  # before any of it is stored
            raise ValueError(
                f"The agent returned a list with spans and a {type(item).__name__} in it; such a list may hold spans "
                "only: Span, SpanCoreFields, or ReadableSpan of OpenTelemetry."
            )
    rollout_id, attempt_id = rollout.rollout_id, rollout.attempt.attempt_id
    known = {_span_id(span) for span in traced}
    for item in items:
        if isinstance(item, Span):
            await store.add_span(item)
        elif isinstance(item, SpanCoreFields):
            number = await store.get_next_span_sequence_id(rollout_id, attempt_id)
            ids = {"rollout_id": rollout_id, "attempt_id": attempt_id, "sequence_id": number}
            await store.add_span(Span.from_core_fields(item, **ids))  # type: ignore[arg-type] # a mapping of all kinds
        elif _span_id(item) not in known:
            await store.add_otel_span(rollout_id, attempt_id, item)
    return items


def holds_spans(result: object) -> bool:
    """Whether a result is a span, or a list with spans in it, or an empty list."""
    if isinstance(result, list):
        return not result or any(map(_is_span, result))
    return isinstance(result, SpanCoreFields) or hasattr(type(result), "get_span_context")


def _is_span(item: object) -> bool:
    return isinstance(item, (Span, SpanCoreFields)) or hasattr(item, "get_span_context")


def _span_id(span: Any) -> Any:
    context = span.get_span_context() if hasattr(span, "get_span_context") else None
    return getattr(span, "span_id", None) if context is None else context.span_id
