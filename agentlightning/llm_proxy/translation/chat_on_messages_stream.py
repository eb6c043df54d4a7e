"""The stream of one of Anthropic's messages as that of a chat."""

from collections.abc import Iterator, Mapping
from typing import Any

from agentlightning.dialects import JsonObject
from agentlightning.dialects.sse import ServerSentEvent
from agentlightning.llm_proxy.translation.chat_chunks import ChatChunks
from agentlightning.llm_proxy.translation.chat_parts import arguments_text
from agentlightning.llm_proxy.translation.messages_terms import counts_of, finish_reason_of
from agentlightning.llm_proxy.translation.terms import EventTranslation

__all__ = ["ChatFromMessages"]


class ChatFromMessages(EventTranslation):
    """Turns events of blocks into chunks."""

    def __init__(self, request: Mapping[str, Any]) -> None:
        super().__init__("messages")
        self._chunks = ChatChunks(request)
        self._calls = 0
        self._inputs: dict[int, Any] = {}
        """By block, the input that its opening told and no delta has replaced yet."""
        self._usage: JsonObject = {}
        self._stop_reason: str | None = None

    def finish(self) -> list[ServerSentEvent]:
        return self._chunks.ended(finish_reason_of(self._stop_reason), counts_of(self._usage))

    def _translated(self, event: JsonObject) -> Iterator[ServerSentEvent]:
        kind = event["type"]
        if kind == "message_start":
            message = event["message"]
            self._usage = dict(message.get("usage") or {})
            yield self._chunks.started(message.get("id"), message.get("model"))
        elif kind == "content_block_start":
            yield from self._opened(event["index"], event["content_block"])
        elif kind == "content_block_delta":
            yield from self._filled(event["index"], event["delta"])
        elif kind == "content_block_stop":
            if event["index"] in self._inputs:  # no arguments came: they stood in the opening, or there are none
                arguments = arguments_text(self._inputs.pop(event["index"]))
                yield self._chunks.call_arguments(self._calls - 1, arguments)
        elif kind == "message_delta":
            yield from self._ending(event)
        elif kind == "message_stop":
            self._is_complete = True
            yield from self.finish()

    def _opened(self, index: int, block: JsonObject) -> Iterator[ServerSentEvent]:
        kind = block["type"]
        if kind == "tool_use":
            self._inputs[index] = block.get("input")
            yield self._chunks.call(self._calls, block["id"], block["name"])
            self._calls += 1
        elif kind == "text" and block.get("text"):
            yield self._chunks.delta({"content": block["text"]})
        elif kind == "thinking" and block.get("thinking"):
            yield self._chunks.delta({"reasoning_content": block["thinking"]})

    def _filled(self, index: int, delta: JsonObject) -> Iterator[ServerSentEvent]:
        kind = delta["type"]
        if kind == "text_delta":
            yield self._chunks.delta({"content": delta["text"]})
        elif kind == "thinking_delta":
            yield self._chunks.delta({"reasoning_content": delta["thinking"]})
        elif kind == "input_json_delta" and delta["partial_json"]:
            self._inputs.pop(index, None)
            yield self._chunks.call_arguments(self._calls - 1, delta["partial_json"])

    def _ending(self, event: JsonObject) -> Iterator[ServerSentEvent]:
        delta = event.get("delta") or {}
        self._usage |= {name: value for name, value in (event.get("usage") or {}).items() if value is not None}
        self._stop_reason = delta.get("stop_reason") or self._stop_reason
        told = (delta.get("stop_details") or {}).get("explanation")
        if told:
            yield self._chunks.delta({"refusal": told})
        if self._stop_reason:
            yield from self._chunks.closed(finish_reason_of(self._stop_reason))
