"""What OpenAI's responses are made of: the frame of an answer, its items, and how it counts tokens."""

from collections.abc import Mapping
from typing import Any, Final

from agentlightning.dialects import JsonObject
from agentlightning.llm_proxy.translation.chat_parts import UsageCounts

__all__ = [
    "call_item",
    "counts_of",
    "finish_reason_of",
    "frame",
    "incomplete_reason",
    "message_item",
    "reasoning_item",
    "reasoning_part",
    "refusal_part",
    "text_part",
    "usage_of",
]

_REPEATED: Final[Mapping[str, Any]] = {
    "background": False,
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "reasoning": {"effort": None, "summary": None},
    "safety_identifier": None,
    "service_tier": "default",
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": 1.0,
    "truncation": "disabled",
    "user": None,
}
"""Fields of a request that its answer repeats, and what it gives for those that were not set."""
_INCOMPLETE_REASONS: Final[Mapping[str, str]] = {
    "length": "max_output_tokens",
    "abort": "max_output_tokens",  # of the two reasons there are, the one that says that it was cut off
    "content_filter": "content_filter",
}


def frame(request: Mapping[str, Any], *, answer_id: str, model: str, created: float) -> JsonObject:
    """An answer that has only begun; nothing is stored, so none can be gone on from by its id."""
    told: JsonObject = {"id": answer_id, "object": "response", "created_at": created, "status": "in_progress"}
    told |= {"model": model, "error": None, "incomplete_details": None, "output": [], "usage": None, "store": False}
    for name, default in _REPEATED.items():
        value = request.get(name)
        told[name] = default if value is None else value
    return told


def incomplete_reason(finish_reason: str | None) -> str | None:
    """Why an answer is not whole, from a chat's finish reason; None, if it is."""
    return _INCOMPLETE_REASONS.get(finish_reason or "")


def text_part(text: str) -> JsonObject:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def refusal_part(text: str) -> JsonObject:
    return {"type": "refusal", "refusal": text}


def reasoning_part(text: str) -> JsonObject:
    return {"type": "reasoning_text", "text": text}


def message_item(answer_id: str, number: int, parts: list[JsonObject]) -> JsonObject:
    item: JsonObject = {"id": f"msg_{answer_id}_{number}", "type": "message", "role": "assistant"}
    return {**item, "status": "completed", "content": parts}


def reasoning_item(answer_id: str, number: int, parts: list[JsonObject]) -> JsonObject:
    item: JsonObject = {"id": f"rs_{answer_id}_{number}", "type": "reasoning"}
    return {**item, "status": "completed", "summary": [], "content": parts}


def call_item(answer_id: str, number: int, function: tuple[str, str, str]) -> JsonObject:
    """The item of a call: its id, its name, and its arguments."""
    call_id, name, arguments = function
    item: JsonObject = {"id": f"fc_{answer_id}_{number}", "type": "function_call", "status": "completed"}
    return {**item, "call_id": call_id, "name": name, "arguments": arguments}


def usage_of(counts: UsageCounts) -> JsonObject:
    return {
        "input_tokens": counts.prompt,
        "input_tokens_details": {"cached_tokens": counts.cached, "cache_write_tokens": counts.cache_written},
        "output_tokens": counts.completion,
        "output_tokens_details": {"reasoning_tokens": counts.reasoning},
        "total_tokens": counts.prompt + counts.completion,
    }


def counts_of(usage: Mapping[str, Any] | None) -> UsageCounts:
    usage = usage or {}
    given, generated = usage.get("input_tokens_details") or {}, usage.get("output_tokens_details") or {}
    return UsageCounts(
        prompt=usage.get("input_tokens") or 0,
        completion=usage.get("output_tokens") or 0,
        cached=given.get("cached_tokens") or 0,
        cache_written=given.get("cache_write_tokens") or 0,
        reasoning=generated.get("reasoning_tokens") or 0,
    )


def finish_reason_of(response: Mapping[str, Any], *, has_calls: bool) -> str:
    """A chat's finish reason for a response that has ended."""
    if response.get("status") == "incomplete":
        reason = (response.get("incomplete_details") or {}).get("reason")
        return "content_filter" if reason == "content_filter" else "length"
    return "tool_calls" if has_calls else "stop"
