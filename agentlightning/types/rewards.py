"""Reading rewards off spans: three formats, one answer, which every other reader in the package gives too.

The first that is present counts: numbered attributes (`agentlightning.reward.0.value`, the primary reward first), the
output of an AgentOps task (`{"type": "reward", "value": 1.0}`, as a dictionary or as JSON), and the span
`agentlightning.reward` with its attribute `reward`. Everything here is a pure function of one span. A value that is not
a number is the writer's mistake: it is logged and is no reward.
"""

import logging
from collections.abc import Iterable, Mapping
from typing import Any, Final, Protocol

from agentlightning.semconv import (
    AGL_LATE,
    AGL_OPERATION,
    AGL_REWARD,
    LightningSpanAttributes,
    RewardAttributes,
    RewardPydanticModel,
)
from agentlightning.utils.json_values import as_float, parsed

logger = logging.getLogger(__name__)

_TASK_OUTPUT, _ENTITY_OUTPUT = "agentops.task.output", "agentops.entity.output"
_PREFIX = LightningSpanAttributes.REWARD.value
_PRIMARY_VALUE = f"{_PREFIX}.0.{RewardAttributes.REWARD_VALUE.value}"
_OPERATION_NAME = LightningSpanAttributes.OPERATION_NAME.value
LARGEST_REWARD: Final = 1e100  # those beyond cannot be squared and summed, and are read as infinite


class Described(Protocol):
    """Whatever has a name and attributes: our spans and those of the OpenTelemetry SDK."""

    @property
    def name(self) -> str: ...

    @property
    def attributes(self) -> Mapping[str, Any] | None: ...


def reward_payload_of(span: Described) -> dict[str, Any]:
    """`{"type": "reward", "value": ...}` if the span carries a reward, whose value may be None.

    The output of an AgentOps task that is no reward is given back as it is; a span without any of it gives `{}`, as
    does a reward that the store has marked as late.
    """
    attributes = span.attributes
    if not attributes or AGL_LATE in attributes:
        return {}
    if _PRIMARY_VALUE in attributes:
        return {"type": "reward", "value": attributes[_PRIMARY_VALUE]}
    if span.name != AGL_REWARD and _TASK_OUTPUT not in attributes and _ENTITY_OUTPUT not in attributes:
        return {}
    for key in (_TASK_OUTPUT, _ENTITY_OUTPUT):
        if key in attributes and (output := _as_dict(attributes[key])):
            return output
    if span.name == AGL_REWARD:
        return {"type": "reward", "value": attributes.get("reward")}
    return {}


def reward_value_of(span: Described) -> float | None:
    """The reward, the primary one if there are several; None if the span has none or says None."""
    payload = reward_payload_of(span)
    return number_or_none(payload.get("value"), span) if payload.get("type") == "reward" else None


def number_or_none(value: object, span: Described) -> float | None:
    """A reward as a number, infinite beyond `LARGEST_REWARD`; what is no number is logged and counts as None."""
    if value is None or isinstance(value, (int, float)):
        return None if value is None else as_float(value, LARGEST_REWARD)
    logger.error("reward of span %r is %.80r, which is not a number, and is left out", span.name, value)
    return None


def rewards_of(span: Described) -> list[RewardPydanticModel]:
    """All rewards of a span by name, the primary one first; none if that is not a number."""
    primary = reward_value_of(span)
    if primary is None:
        return []
    attributes = span.attributes or {}
    rewards = [RewardPydanticModel(name=_name_of(attributes, 0), value=primary)]
    if _PRIMARY_VALUE not in attributes:
        return rewards
    number = 1
    while (key := f"{_PREFIX}.{number}.{RewardAttributes.REWARD_VALUE.value}") in attributes:
        if (value := number_or_none(attributes[key], span)) is not None:
            rewards.append(RewardPydanticModel(name=_name_of(attributes, number), value=value))
        number += 1
    return rewards


def _name_of(attributes: Mapping[str, object], number: int) -> str:
    return str(attributes.get(f"{_PREFIX}.{number}.{RewardAttributes.REWARD_NAME.value}", "primary"))


def is_reward_span(span: Described) -> bool:
    """Whether the span carries a reward that is a number."""
    return reward_value_of(span) is not None


def is_reward_scope(span: Described) -> bool:
    """Whether what happens beneath the span is the judging, not the work: a reward, or the operation that makes one."""
    if reward_payload_of(span).get("type") == "reward":
        return True
    return span.name == AGL_OPERATION and (span.attributes or {}).get(_OPERATION_NAME) == AGL_REWARD


def final_reward_of(spans: Iterable[Described]) -> float | None:
    """The last reward, in the order given."""
    for span in reversed([*spans]):
        value = reward_value_of(span)
        if value is not None:
            return value
    return None


def named_rewards_of(spans: Iterable[Described]) -> dict[str, float]:
    """The last reward under each name, in the order given."""
    return {reward.name: reward.value for span in spans for reward in rewards_of(span)}


def _as_dict(output: object) -> dict[str, object]:
    output = parsed(output, literals=False)  # any text may be the output of a task
    return dict(output) if isinstance(output, Mapping) else {}
