"""Token ids brought to one length, with the mask that tells tokens from padding; and a class that is gone."""

from collections.abc import Sequence
from typing import Any

from agentlightning.errors import ConfigurationError


class AgentModeDaemon:
    """Gone; verl's own agent loop has taken its place."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise ConfigurationError(
            "AgentModeDaemon is gone: verl asks StoreAgentLoopManager for rollouts; train with "
            "agl.Trainer(algorithm=agl.VERL(config)).fit(agent, train, val)."
        )


def get_left_padded_ids_and_attention_mask(
    ids: Sequence[int], max_length: int, pad_token_id: int
) -> tuple[list[int], list[int]]:
    """The last `max_length` ids, with padding before them; the mask is 0 on padding."""
    kept = list(ids[max(0, len(ids) - max_length) :])
    missing = max_length - len(kept)
    return [pad_token_id] * missing + kept, [0] * missing + [1] * len(kept)


def get_right_padded_ids_and_attention_mask(
    ids: Sequence[int], max_length: int, pad_token_id: int
) -> tuple[list[int], list[int]]:
    """The first `max_length` ids, with padding after them; the mask is 0 on padding."""
    kept = list(ids[:max_length])
    missing = max_length - len(kept)
    return kept + [pad_token_id] * missing, [1] * len(kept) + [0] * missing
