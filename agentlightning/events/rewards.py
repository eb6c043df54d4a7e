"""Rewards as spans carry them, in the three formats that exist.

Named rewards in numbered attributes come first, then the output of an AgentOps operation, then the `reward` attribute
of a reward span.
"""

from collections.abc import Mapping
from itertools import count

from agentlightning.events.event import NamedReward
from agentlightning.semconv import LightningSpanAttributes, RewardAttributes
from agentlightning.types import AttributeValue, Span
from agentlightning.types.rewards import reward_payload_of

__all__ = ["PRIMARY", "is_reward_binary", "reward_attributes", "rewards_of"]

PRIMARY = "primary"
"""Name of a reward that stands alone."""
OLD_REWARD = "reward"


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
    payload = reward_payload_of(span)
    value = payload.get("value") if payload.get("type") == "reward" else None
    return value if isinstance(value, (int, float)) else None
