"""How rollouts are brought to the shape of verl's batches."""

from agentlightning.algorithm.verl.padding import (
    get_left_padded_ids_and_attention_mask,
    get_right_padded_ids_and_attention_mask,
)

__all__ = ["get_left_padded_ids_and_attention_mask", "get_right_padded_ids_and_attention_mask"]
