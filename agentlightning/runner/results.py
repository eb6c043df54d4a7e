"""What an agent returned: numbers are rewards, spans are kept, any other value is the rollout's output.

None says that the trace is all. A mapping of names to numbers is several rewards, of which the one named `primary` or
`reward` counts, otherwise the first.

An output is JSON that every store can keep. Nothing is refused: a model, a data class or a response of an SDK becomes a
mapping of its fields, what JSON has no word for becomes text, and what is too large is cut where a mark says how much
there was. One walk does all of it, and stops when the limit is used up, so that a result that contains itself costs no
more than a large one.
"""

import dataclasses
import datetime as dt
import enum
import functools
import logging
import math
import pathlib
import uuid
from collections.abc import AsyncGenerator, Awaitable, Collection, Generator, Mapping, Sequence, Set
from decimal import Decimal
from numbers import Real
from typing import Any, Final

import orjson
from pydantic import BaseModel

from agentlightning.emitter import emit_reward
from agentlightning.litagent.litagent import current_work
from agentlightning.semconv import AGENT_NAME, AGL_REWARD, LightningSpanAttributes, RewardAttributes
from agentlightning.store.base import UNSET, LightningStore, Unset
from agentlightning.tracer import get_active_tracer
from agentlightning.tracer.binding import current_binding
from agentlightning.types import AttemptedRollout, Span, SpanCoreFields
from agentlightning.types.resources import Resource
from agentlightning.types.rewards import is_reward_span

logger = logging.getLogger(__name__)

_PREFIX: Final = LightningSpanAttributes.REWARD.value
_PRIMARY_NAMES: Final = ("primary", "reward")
_HINTS_KEPT: Final = 256

MAX_OUTPUT_BYTES: Final = 64 * 1024
"""Of JSON that are kept of an output, but for the marks."""
_MOST_LEVELS: Final = 50
"""Of lists and mappings within each other; of what lies deeper only the type is kept."""
_LARGEST_INTEGER: Final = 2**63 - 1
_BYTES_OF_A_NUMBER: Final = 8
_BYTES_AROUND: Final = 3
"""Quotes or brackets, and the comma behind them."""
_MARK: Final = "…"
_WRITTEN_AS_TEXT: Final = (
    dt.date,
    dt.time,
    dt.timedelta,
    Decimal,
    pathlib.PurePath,
    uuid.UUID,
)


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
    return {} if work is None or work.agent_name is None else {AGENT_NAME: work.agent_name}


def rewards_of_result(result: object) -> dict[str, float] | None:
    """The rewards by name, the primary one first; None if the result is something else."""
    if not isinstance(result, Mapping):
        reward = _number(result)
        return None if reward is None else {_PRIMARY_NAMES[0]: reward}
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
        is_number = isinstance(result, str) and result.strip().replace(".", "", 1).removeprefix("-").isdigit()
        _hint("text that looks like a number" if is_number else type(result).__name__)


@functools.lru_cache(maxsize=_HINTS_KEPT)  # once, not once for each rollout
def _hint(kind: str) -> None:
    logger.warning(
        "The agent returned a %s: it is kept as the rollout's output. There is no reward; return a number or call "
        "emit_reward to give one.",
        kind,
    )


async def store_returned_spans(
    result: object, rollout: AttemptedRollout, store: LightningStore, traced: Sequence[object]
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


def _span_id(span: object) -> object:
    context = span.get_span_context() if hasattr(span, "get_span_context") else None
    return getattr(span, "span_id", None) if context is None else context.span_id


# ---------------------------------------------------------------------- the output


def output_of(result: object) -> Any:
    """A result as plain JSON of at most `MAX_OUTPUT_BYTES`; never raises."""
    return _Walk().plain(result, 0)


class _Walk:
    """One result on its way to JSON."""

    def __init__(self) -> None:
        self._left = MAX_OUTPUT_BYTES

    def plain(self, value: object, level: int) -> object:
        try:
            return self._plain(value, level)
        except Exception:  # noqa: BLE001 # an object of the user's may raise anything when it is looked at
            return self._text(_described(value), level)

    def _plain(self, value: object, level: int) -> object:
        if value is None or isinstance(value, bool):
            self._left -= _BYTES_OF_A_NUMBER
            return value
        if isinstance(value, enum.Enum):
            return self.plain(value.value, level)
        if isinstance(value, str):
            return self._text(str(value), level)
        if isinstance(value, (int, float)):
            return self._number(value, level)
        if isinstance(value, (bytes, bytearray, memoryview)):
            return self._bytes(bytes(value[: max(self._left, 0) + 1]), len(value), level)
        if isinstance(value, _WRITTEN_AS_TEXT):
            return self._text(str(value), level)
        if level >= _MOST_LEVELS:
            return self._text(f"<{type(value).__name__}>", level)
        if isinstance(value, Mapping):
            return self._mapping(value, level)
        if isinstance(value, (list, tuple, Set)):
            return self._list(value, level)
        fields = _fields_of(value)
        return self._text(_described(value), level) if fields is None else self.plain(fields, level + 1)

    def _number(self, value: float, level: int) -> object:
        self._left -= _BYTES_OF_A_NUMBER
        if isinstance(value, int):
            if abs(value) <= _LARGEST_INTEGER:
                return int(value)
            try:
                return self._text(str(value), level)
            except ValueError:  # more digits than Python writes
                return self._text(hex(value), level)
        return float(value) if math.isfinite(value) else str(float(value))  # JSON has no word for the others

    def _text(self, text: str, level: int) -> str:
        """Text within something larger takes half of what is left at most, so that others have room too."""
        limit = max(self._left // 2 if level else self._left, _BYTES_AROUND)
        kept = text[: limit - _BYTES_AROUND]
        kept = kept if kept.isascii() else kept.encode(errors="replace").decode()  # lone surrogates
        while (size := len(orjson.dumps(kept)) + 1) > limit and kept:
            kept = kept[: min(len(kept) - 1, len(kept) * limit // size)]
        self._left -= size
        return kept if len(kept) == len(text) else f"{kept}{_MARK} ({len(text):,} characters in all)"

    def _bytes(self, start: bytes, count: int, level: int) -> str:
        text = self._text(repr(start), level)
        return text if count == len(start) else f"{text.partition(_MARK)[0]}{_MARK} ({count:,} bytes in all)"

    def _mapping(self, value: Mapping[object, object], level: int) -> dict[str, object]:
        kept: dict[str, object] = {}
        for key, item in value.items():
            if self._left <= 0:
                kept[_MARK] = f"({len(value):,} items in all)"
                break
            name = self._text(key if isinstance(key, str) else str(key), level + 1)
            kept[name] = self.plain(item, level + 1)
        self._left -= _BYTES_AROUND
        return kept

    def _list(self, value: Collection[object], level: int) -> list[object]:
        kept: list[object] = []
        for item in value:
            if self._left <= 0:
                kept.append(f"{_MARK} ({len(value):,} items in all)")
                break
            kept.append(self.plain(item, level + 1))
        self._left -= _BYTES_AROUND
        return kept


def _fields_of(value: object) -> object:
    """An object as a mapping, a list or a number; None if it cannot be taken apart."""
    if isinstance(value, type):
        return None
    if isinstance(value, Resource):
        return value.model_dump(mode="json", exclude={"api_key"})
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", warnings=False)
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if getattr(value, "nbytes", MAX_OUTPUT_BYTES + 1) <= MAX_OUTPUT_BYTES and hasattr(value, "tolist"):
        return _taken(value.tolist())  # an array, or a single number of one
    for name in ("model_dump", "to_dict"):
        convert = getattr(value, name, None)
        if callable(convert) and (fields := _taken(convert())) is not None:
            return fields
    return None


def _taken(fields: object) -> object:
    is_plain = isinstance(fields, (Mapping, list, tuple, str, int, float))
    return fields if is_plain else None


def _described(value: object) -> str:
    try:
        return repr(value)
    except Exception:  # noqa: BLE001 # as above
        return f"<{type(value).__name__}>"
