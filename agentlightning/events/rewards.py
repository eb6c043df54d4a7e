"""Rewards as spans carry them, in the three formats that exist.

Named rewards in numbered attributes come first, then the output of an AgentOps operation, then the `reward` attribute
of a reward span.
"""

import json
from collections.abc import Mapping
from itertools import count

from agentlightning.events.event import NamedReward
from agentlightning.semconv import AGL_REWARD, LightningSpanAttributes, RewardAttributes
from agentlightning.types import AttributeValue, Span

__all__ = ["PRIMARY", "is_reward_binary", "reward_attributes", "rewards_of"]

PRIMARY = "primary"
"""Name of a reward that stands alone."""
OLD_REWARD = "reward"
_AGENTOPS_OUTPUTS = ("agentops.task.output", "agentops.entity.output")


def rewards_of(span: Span) -> tuple[NamedReward, ...]:
    """The rewards of a span, the primary one first; empty if it has none."""
    named = _numbered(span.attributes)
    if named:
        return named
    value = _plain_value(span)
    return () if value is None else (NamedReward(PRIMARY, float(value)),)


def is_reward_binary(span: Span) -> bool:
    """Whether the reward was written as a truth value."""
    return isinstance(_plain_value(span), bool)


def reward_attributes(rewards: tuple[NamedReward, ...]) -> dict[str, AttributeValue]:
    """Rewards as attributes that readers of every format understand."""
    attributes: dict[str, AttributeValue] = {OLD_REWARD: rewards[0].value}
    for number, reward in enumerate(rewards):
        attributes[_key(number, RewardAttributes.REWARD_NAME)] = reward.name
        attributes[_key(number, RewardAttributes.REWARD_VALUE)] = reward.value
    return attributes


def _numbered(attributes: Mapping[str, AttributeValue]) -> tuple[NamedReward, ...]:
    rewards = []
    for number in count():
        value = attributes.get(_key(number, RewardAttributes.REWARD_VALUE))
        if not isinstance(value, (int, float)):
            break
        name = attributes.get(_key(number, RewardAttributes.REWARD_NAME), PRIMARY)
        rewards.append(NamedReward(str(name), float(value)))
    return tuple(rewards)


def _key(number: int, part: RewardAttributes) -> str:
    return f"{LightningSpanAttributes.REWARD.value}.{number}.{part.value}"


def _plain_value(span: Span) -> float | bool | None:
    for key in _AGENTOPS_OUTPUTS:
        output = _object(span.attributes.get(key))
        if output is not None and output.get("type") == "reward":
            return _number(output.get("value"))
    return _number(span.attributes.get(OLD_REWARD)) if span.name == AGL_REWARD else None


def _object(text: object) -> dict[str, object] | None:
    """The object that a JSON text holds; None for anything else, which is somebody's own output."""
    if not isinstance(text, str):
        return None
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _number(value: object) -> float | bool | None:
    return value if isinstance(value, (int, float)) else None
