"""The stream of a chat as one of Anthropic's messages: every block is opened, filled and closed before the next."""

from collections.abc import Iterator, Mapping
from typing import Any

from agentlightning.llm_proxy.dialects.chat_parts import (
    CallPieces,
    ToolCallDelta,
    UsageCounts,
    reasoning_in,
    usage_counts,
)
from agentlightning.llm_proxy.dialects.messages_terms import ending, usage_of
from agentlightning.llm_proxy.dialects.sse import ServerSentEvent
from agentlightning.llm_proxy.dialects.terms import EventTranslation, JsonObject, named_event

__all__ = ["MessagesFromChat"]


class MessagesFromChat(EventTranslation):
    """Turns chunks into events of blocks. A block ends when the next begins or the chat gives its finish reason."""

    def __init__(self, request: Mapping[str, Any]) -> None:
        super().__init__("chat")
        self._model = request.get("model") or ""
        self._is_started = self._is_finished = False
        self._blocks = 0
        self._open: str | int | None = None
        """The block that is open: its kind, or the number of its tool call."""
        self._signature = ""
        self._calls = CallPieces()
        self._choice: JsonObject = {}
        """What was said of the end."""
        self._message: JsonObject = {}
        """Which kinds of content there were, as far as the end depends on them."""
        self._counts = UsageCounts(0, 0)

    def finish(self) -> list[ServerSentEvent]:
        if self._is_finished:
            return []
        self._is_finished = True
        events = [*self._started({}), *self._closed()]
        delta = ending(self._choice, self._message)
        events.append(named_event({"type": "message_delta", "delta": delta, "usage": usage_of(self._counts)}))
        events.append(named_event({"type": "message_stop"}))
        return events

    def _translated(self, event: JsonObject) -> Iterator[ServerSentEvent]:
        yield from self._started(event)
        if event.get("usage"):
            self._counts = usage_counts(event["usage"])
        for choice in event.get("choices") or ():
            if choice.get("index"):
                continue  # translated requests ask for one
            yield from self._delta(choice.get("delta") or {})
            if choice.get("finish_reason"):
                self._choice = choice
                self._is_complete = True
                yield from self._closed()
        if self._is_complete and event.get("usage") and not event.get("choices"):
            yield from self.finish()

    def _started(self, chunk: Mapping[str, Any]) -> Iterator[ServerSentEvent]:
        if self._is_started:
            return
        self._is_started = True
        self._calls.answer_id = chunk.get("id") or ""
        message = {"id": chunk.get("id") or "", "type": "message", "role": "assistant"}
        message |= {"model": chunk.get("model") or self._model, "content": []}
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
