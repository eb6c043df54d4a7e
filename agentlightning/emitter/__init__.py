"""SPEAKING — what agent code calls to say what it did, what it saw, and how good it was."""

from agentlightning.emitter.annotation import OperationContext, emit_annotation, operation
from agentlightning.emitter.emission import EmittedSpan
from agentlightning.emitter.exception import emit_exception
from agentlightning.emitter.message import emit_conversation, emit_message, get_message_value
from agentlightning.emitter.object import emit_object, encode_object, get_object_value
from agentlightning.emitter.reward import (
    emit_reward,
    find_final_reward,
    find_reward_spans,
    get_reward_value,
    get_rewards_from_span,
    is_reward_span,
    reward,
)

__all__ = [
    "reward",
    "emit_reward",
    "get_reward_value",
    "get_rewards_from_span",
    "is_reward_span",
    "find_reward_spans",
    "find_final_reward",
    "emit_message",
    "emit_conversation",
    "get_message_value",
    "emit_object",
    "encode_object",
    "get_object_value",
    "emit_exception",
    "emit_annotation",
    "operation",
    "OperationContext",
    "EmittedSpan",
]
