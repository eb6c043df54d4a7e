"""The stream of a chat as one of Anthropic's messages: every block is opened, filled and closed before the next."""

from collections.abc import Iterator, Mapping
from typing import Any

from agentlightning.dialects import JsonObject
from agentlightning.dialects.sse import ServerSentEvent
from agentlightning.llm_proxy.translation.chat_parts import ToolCallDelta, UsageCounts, reasoning_in
from agentlightning.llm_proxy.translation.chunk_translation import ChunkTranslation
from agentlightning.llm_proxy.translation.messages_terms import ending, usage_of
from agentlightning.llm_proxy.translation.terms import named_event

__all__ = ["MessagesFromChat"]


class MessagesFromChat(ChunkTranslation):
    """Turns chunks into events of blocks."""

    def __init__(self, request: Mapping[str, Any]) -> None:
        super().__init__(request)
        self._is_started = False
        self._blocks = 0
        self._open: str | int | None = None
        """The block that is open: its kind, or the number of its tool call."""
        self._signature = ""
        self._message: JsonObject = {}
        """Which kinds of content there were, as far as the end depends on them."""

    def _ended(self) -> Iterator[ServerSentEvent]:
        delta = ending(self._choice, self._message)
        yield named_event({"type": "message_delta", "delta": delta, "usage": usage_of(self._counts)})
        yield named_event({"type": "message_stop"})

    def _started(self, chunk: Mapping[str, Any]) -> Iterator[ServerSentEvent]:
        if self._is_started:
            return
        self._is_started = True
        self._calls.answer_id = chunk.get("id") or ""
        message = {"id": chunk.get("id") or "", "type": "message", "role": "assistant"}
        message |= {"model": chunk.get("model") or self._request.get("model") or "", "content": []}
        message |= {"stop_reason": None, "stop_sequence": None, "usage": usage_of(UsageCounts(0, 0))}
        yield named_event({"type": "message_start", "message": message})

    def _delta(self, delta: Mapping[str, Any]) -> Iterator[ServerSentEvent]:
        thought = reasoning_in(delta)
        if thought:
            yield from self._opened("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            self._signature = thought[0]
            yield self._filled({"type": "thinking_delta", "thinking": thought[1]})
        for kind in ("content", "refusal"):
            if delta.get(kind):
                self._message[kind] = True
                yield from self._opened(kind, {"type": "text", "text": ""})
                yield self._filled({"type": "text_delta", "text": delta[kind]})
        for call in self._calls.deltas(delta.get("tool_calls")):
            yield from self._call(call)

    def _call(self, call: ToolCallDelta) -> Iterator[ServerSentEvent]:
        self._message["tool_calls"] = True
        if call.is_new:
            block = {"type": "tool_use", "id": call.call_id, "name": call.name, "input": {}}
            yield from self._opened(call.number, block)
        elif self._open != call.number:
            raise ValueError(f"it goes on with tool call {call.number}, which has ended")
        if call.arguments:
            yield self._filled({"type": "input_json_delta", "partial_json": call.arguments})

    def _opened(self, kind: str | int, block: JsonObject) -> Iterator[ServerSentEvent]:
        if self._open == kind:
            return
        yield from self._closed()
        self._open = kind
        yield named_event({"type": "content_block_start", "index": self._blocks, "content_block": block})

    def _filled(self, delta: JsonObject) -> ServerSentEvent:
        return named_event({"type": "content_block_delta", "index": self._blocks, "delta": delta})

    def _closed(self) -> Iterator[ServerSentEvent]:
        if self._open is None:
            return
        if self._open == "thinking":
            yield self._filled({"type": "signature_delta", "signature": self._signature})
        yield named_event({"type": "content_block_stop", "index": self._blocks})
        self._open = None
        self._blocks += 1
