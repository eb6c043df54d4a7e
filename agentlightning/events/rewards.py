"""Rewards of events: read off spans as `types.rewards` does, and written so that every reader understands them."""

from agentlightning.events.event import NamedReward
from agentlightning.semconv import LightningSpanAttributes, RewardAttributes
from agentlightning.types import AttributeValue, Span, rewards

__all__ = ["PRIMARY", "is_reward_binary", "reward_attributes", "rewards_of"]

PRIMARY = "primary"
"""Name of a reward that stands alone."""
OLD_REWARD = "reward"


def rewards_of(span: Span) -> tuple[NamedReward, ...]:
    """The rewards of a span, the primary one first; empty if it has none."""
    return tuple(NamedReward(found.name, found.value) for found in rewards.rewards_of(span))


def is_reward_binary(span: Span) -> bool:
    """Whether the reward was written as a truth value."""
    return isinstance(rewards.reward_payload_of(span).get("value"), bool)


def reward_attributes(named: tuple[NamedReward, ...]) -> dict[str, AttributeValue]:
    """Rewards as attributes that readers of every format understand."""
    attributes: dict[str, AttributeValue] = {OLD_REWARD: named[0].value}
    for number, reward in enumerate(named):
        key = f"{LightningSpanAttributes.REWARD.value}.{number}"
        attributes[f"{key}.{RewardAttributes.REWARD_NAME.value}"] = reward.name
        attributes[f"{key}.{RewardAttributes.REWARD_VALUE.value}"] = reward.value
    return attributes
