"""The chunks of a chat's stream, as translations into chat write them."""

import time
from collections.abc import Iterator, Mapping
from typing import Any

from agentlightning.dialects import JsonObject
from agentlightning.dialects.sse import ServerSentEvent
from agentlightning.llm_proxy.translation.chat_parts import UsageCounts, function_call
from agentlightning.llm_proxy.translation.terms import DONE, data_event

__all__ = ["ChatChunks"]


class ChatChunks:
    """Writes one stream: the chunk that opens it, those that fill it, and the end."""

    def __init__(self, request: Mapping[str, Any]) -> None:
        self._frame: JsonObject = {"id": "", "object": "chat.completion.chunk", "created": int(time.time())}
        self._frame["model"] = request.get("model") or ""
        self._tells_usage = bool((request.get("stream_options") or {}).get("include_usage"))
        if self._tells_usage:
            self._frame["usage"] = None
        self._is_closed = self._is_ended = False

    def started(self, answer_id: str | None, model: str | None, created: float | None = None) -> ServerSentEvent:
        self._frame["id"] = answer_id or ""
        self._frame["model"] = model or self._frame["model"]
        self._frame["created"] = int(created or self._frame["created"])
        return self.delta({"role": "assistant", "content": ""})

    def delta(self, delta: JsonObject, finish_reason: str | None = None) -> ServerSentEvent:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return data_event({**self._frame, "choices": [choice]})

    def call(self, number: int, call_id: str, name: str) -> ServerSentEvent:
        return self.delta({"tool_calls": [{"index": number, **function_call(call_id, name, "")}]})

    def call_arguments(self, number: int, arguments: str) -> ServerSentEvent:
        return self.delta({"tool_calls": [{"index": number, "function": {"arguments": arguments}}]})

    def closed(self, finish_reason: str) -> Iterator[ServerSentEvent]:
        """The chunk that gives the reason of the end, once."""
        if not self._is_closed:
            self._is_closed = True
            yield self.delta({}, finish_reason)

    def ended(self, finish_reason: str, counts: UsageCounts) -> list[ServerSentEvent]:
        """The end: the reason if it was not given yet, the usage if the client asked for it, and the last event."""
        if self._is_ended:
            return []
        self._is_ended = True
        events = list(self.closed(finish_reason))
        if self._tells_usage:
            events.append(data_event({**self._frame, "choices": [], "usage": counts.as_chat()}))
        return [*events, DONE]
