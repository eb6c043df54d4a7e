"""What an agent returned becomes spans: a number is its reward, spans are kept, None says that the trace is all."""

import logging
import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

from agentlightning.emitter import emit_reward
from agentlightning.semconv import AGL_REWARD, LightningSpanAttributes, RewardAttributes
from agentlightning.store.base import LightningStore
from agentlightning.tracer import get_active_tracer
from agentlightning.tracer.binding import current_binding
from agentlightning.types import AttemptedRollout, RolloutRawResult, Span, SpanCoreFields

__all__ = ["record_reward", "store_returned_spans"]

logger = logging.getLogger(__name__)

_FIRST_REWARD = f"{LightningSpanAttributes.REWARD.value}.0"


async def record_reward(result: object, rollout: AttemptedRollout, store: LightningStore) -> None:
    """Record a number that an agent returned; called while its trace is open. Anything else is left alone."""
    if result is None or isinstance(result, list):
        return
    if isinstance(result, float):
        reward = result
    elif isinstance(result, Real):
        reward = float(result)
        logger.warning("The agent returned %r, which is taken as the reward %s.", result, reward)
    else:
        raise TypeError(
            f"The agent returned a {type(result).__name__}; it may return None, a number as its reward, or a list of "
            "spans. To record something else, call emit_object."
        )
    if not math.isfinite(reward):
        raise ValueError(f"The agent returned {reward} as its reward, which must be a finite number.")
    if current_binding() is None and get_active_tracer() is None:  # the tracer records elsewhere
        await _store_reward(reward, rollout, store)
    else:
        emit_reward(reward)


async def _store_reward(reward: float, rollout: AttemptedRollout, store: LightningStore) -> None:
    rollout_id, attempt_id = rollout.rollout_id, rollout.attempt.attempt_id
    span = Span.from_attributes(
        attributes={
            "reward": reward,
            f"{_FIRST_REWARD}.{RewardAttributes.REWARD_NAME.value}": "primary",
            f"{_FIRST_REWARD}.{RewardAttributes.REWARD_VALUE.value}": reward,
        },
        rollout_id=rollout_id,
        attempt_id=attempt_id,
        sequence_id=await store.get_next_span_sequence_id(rollout_id, attempt_id),
        name=AGL_REWARD,
    )
    await store.add_span(span)


async def store_returned_spans(
    result: RolloutRawResult, rollout: AttemptedRollout, store: LightningStore, traced: Sequence[Any]
) -> Sequence[Any]:
    """Store the spans that an agent returned, but for those its tracer has stored; returns the spans of the rollout."""
    if not isinstance(result, list):
        return traced
    if not result:
        logger.warning("The agent returned an empty list; return None if there is nothing to say.")
        return traced
    items = _any_of(result)
    _refuse_others(items)
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


def _refuse_others(items: list[Any]) -> None:
    """Refuse a list with anything but spans in it, before any of it is stored."""
    for item in items:
        if not isinstance(item, (Span, SpanCoreFields)) and not hasattr(item, "get_span_context"):
            raise ValueError(
                f"The agent returned a list with a {type(item).__name__} in it; a list may hold spans only: Span, "
                "SpanCoreFields, or ReadableSpan of OpenTelemetry."
            )


def _any_of(result: list[Any]) -> list[Any]:
    """A copy of what an agent returned, of whatever types."""
    return list(result)


def _span_id(span: Any) -> Any:
    context = span.get_span_context() if hasattr(span, "get_span_context") else None
    return getattr(span, "span_id", None) if context is None else context.span_id
