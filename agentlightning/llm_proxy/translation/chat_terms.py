"""Chat with backends of another dialect: what of a request need not be said to them, and the shape of an answer."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from agentlightning.dialects import JsonObject
from agentlightning.llm_proxy.translation.chat_parts import UsageCounts

__all__ = ["HINTS", "answer", "answer_message", "meant"]

HINTS: Final = frozenset(
    {
        "metadata",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "return_token_ids",
        "return_tokens_as_token_ids",
        "safety_identifier",
        "seed",
        "service_tier",
        "store",
        "stream_options",
        "user",
    }
)
"""Without these an answer is as good, or they are the proxy's to see to."""
_MEANINGLESS: Final[Mapping[str, tuple[Any, ...]]] = {
    "n": (1,),
    "stop": ([],),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "functions": ([],),
}
"""Values that say what is so anyway."""


def meant(body: Mapping[str, Any]) -> JsonObject:
    """A request without what is so anyway."""
    return {name: value for name, value in body.items() if value not in _MEANINGLESS.get(name, ())}


def answer_message(text: str, *, refusal: str | None, reasoning: str, calls: Sequence[JsonObject]) -> JsonObject:
    """The message of an answer; one that makes calls need not have a text."""
    message: JsonObject = {"role": "assistant", "content": text or (None if calls else ""), "refusal": refusal}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = list(calls)
    return message


def answer(
    message: JsonObject, finish_reason: str, *, answer_id: str, model: str, created: int, counts: UsageCounts
) -> JsonObject:
    """A whole answer with one choice."""
    return {
        "id": answer_id,
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": finish_reason}],
        "usage": counts.as_chat(),
    }
