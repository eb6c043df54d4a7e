"""How Anthropic's messages name the ends of answers and count tokens, beside the names of chat."""

from collections.abc import Mapping
from typing import Any, Final

from agentlightning.dialects import JsonObject
from agentlightning.llm_proxy.translation.chat_parts import UsageCounts

__all__ = ["counts_of", "ending", "finish_reason_of", "usage_of"]

_STOP_REASONS: Final[Mapping[str, str]] = {
    "length": "max_tokens",
    "abort": "max_tokens",  # vLLM's; the nearest word that says that it was cut off
    "tool_calls": "tool_use",
    "function_call": "tool_use",
    "content_filter": "refusal",
}
_FINISH_REASONS: Final[Mapping[str, str]] = {
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "tool_use": "tool_calls",
    "refusal": "content_filter",
}


def ending(choice: Mapping[str, Any], message: Mapping[str, Any]) -> JsonObject:
    """Why a message ended, from a chat's choice and what the message holds."""
    reason = _STOP_REASONS.get(choice.get("finish_reason") or "", "end_turn")
    stop_text = choice.get("stop_reason")  # vLLM says which of the texts it was
    if reason == "end_turn" and message.get("tool_calls"):  # as OpenAI ends a call that was asked for by name
        reason = "tool_use"
    elif reason == "end_turn" and message.get("refusal"):
        reason = "refusal"
    elif reason == "end_turn" and isinstance(stop_text, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stop_text}
    return {"stop_reason": reason, "stop_sequence": None}


def finish_reason_of(stop_reason: str | None) -> str:
    return _FINISH_REASONS.get(stop_reason or "", "stop")


def usage_of(counts: UsageCounts) -> JsonObject:
    """Tokens as messages count them: those from the cache and for it stand apart from the input."""
    usage: JsonObject = {
        "input_tokens": max(counts.prompt - counts.cached - counts.cache_written, 0),
        "cache_creation_input_tokens": counts.cache_written,
        "cache_read_input_tokens": counts.cached,
        "output_tokens": counts.completion,
    }
    if counts.reasoning:
        usage["output_tokens_details"] = {"thinking_tokens": counts.reasoning}
    return usage


def counts_of(usage: Mapping[str, Any]) -> UsageCounts:
    cached = usage.get("cache_read_input_tokens") or 0
    written = usage.get("cache_creation_input_tokens") or 0
    return UsageCounts(
        prompt=(usage.get("input_tokens") or 0) + cached + written,
        completion=usage.get("output_tokens") or 0,
        cached=cached,
        cache_written=written,
        reasoning=(usage.get("output_tokens_details") or {}).get("thinking_tokens") or 0,
    )
