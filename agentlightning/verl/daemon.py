"""Public path of the padding helpers, and of a class that is gone."""

from typing import Any

from agentlightning.algorithm.verl.padding import (
    get_left_padded_ids_and_attention_mask,
    get_right_padded_ids_and_attention_mask,
)
from agentlightning.errors import ConfigurationError

__all__ = [
    "AgentModeDaemon",
    "get_left_padded_ids_and_attention_mask",
    "get_right_padded_ids_and_attention_mask",
]


class AgentModeDaemon:
    """Gone; verl's own agent loop has taken its place."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise ConfigurationError(
            "AgentModeDaemon is gone: verl asks StoreAgentLoopManager for rollouts; train with "
            "agl.Trainer(algorithm=agl.VERL(config)).fit(agent, train, val)."
        )
