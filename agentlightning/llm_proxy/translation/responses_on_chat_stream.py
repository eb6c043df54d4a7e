"""The stream of a chat as one of OpenAI's responses: every item is opened, filled and closed before the next."""

import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

from agentlightning.dialects import JsonObject
from agentlightning.dialects.sse import ServerSentEvent
from agentlightning.llm_proxy.translation.chat_parts import ToolCallDelta, reasoning_in
from agentlightning.llm_proxy.translation.chunk_translation import ChunkTranslation
from agentlightning.llm_proxy.translation.responses_terms import (
    call_item,
    frame,
    incomplete_reason,
    message_item,
    reasoning_item,
    reasoning_part,
    refusal_part,
    text_part,
    usage_of,
)
from agentlightning.llm_proxy.translation.terms import named_event

__all__ = ["ResponsesFromChat"]

_PARTS: Final = {"output_text": text_part, "refusal": refusal_part, "reasoning_text": reasoning_part}
_PART_TEXTS: Final = {"output_text": "text", "refusal": "refusal", "reasoning_text": "text"}


class ResponsesFromChat(ChunkTranslation):
    """Turns chunks into events of items."""

    def __init__(self, request: Mapping[str, Any]) -> None:
        super().__init__(request)
        self._frame: JsonObject | None = None
        self._sequence_number = 0
        self._output: list[JsonObject] = []
        self._item: JsonObject | None = None
        """The item that is open, as it will be when it is whole."""
        self._call: int | None = None
        """The number of the call that the open item is."""
        self._part: str | None = None
        """The kind of the part that is open."""
        self._texts: list[str] = []
        """What the open part, or the arguments of the open call, hold so far."""

    def _ended(self) -> Iterator[ServerSentEvent]:
        if all(item["type"] == "reasoning" for item in self._output):  # an answer without words is one all the same
            yield from self._part_opened("output_text")
            yield from self._closed()
        reason = incomplete_reason(self._choice.get("finish_reason"))
        status = "incomplete" if reason else "completed"
        whole = {**(self._frame or {}), "status": status, "output": self._output, "usage": usage_of(self._counts)}
        whole["incomplete_details"] = {"reason": reason} if reason else None
        yield self._event(f"response.{status}", response=whole)

    def _event(self, kind: str, **fields: Any) -> ServerSentEvent:
        number = self._sequence_number
        self._sequence_number += 1
        return named_event({"type": kind, "sequence_number": number, **fields})

    def _started(self, chunk: Mapping[str, Any]) -> Iterator[ServerSentEvent]:
        if self._frame is not None:
            return
        answer_id, model = chunk.get("id") or "", chunk.get("model") or self._request.get("model") or ""
        created = chunk.get("created") or int(time.time())
        self._calls.answer_id = answer_id
        self._frame = frame(self._request, answer_id=answer_id, model=model, created=created)
        yield self._event("response.created", response=self._frame)
        yield self._event("response.in_progress", response=self._frame)

    def _delta(self, delta: Mapping[str, Any]) -> Iterator[ServerSentEvent]:
        thought = reasoning_in(delta)
        if thought:
            yield from self._part_opened("reasoning_text")
            yield self._filled("response.reasoning_text.delta", thought[1])
        if delta.get("content"):
            yield from self._part_opened("output_text")
            yield self._filled("response.output_text.delta", delta["content"], logprobs=[])
        if delta.get("refusal"):
            yield from self._part_opened("refusal")
            yield self._filled("response.refusal.delta", delta["refusal"])
        for call in self._calls.deltas(delta.get("tool_calls")):
            yield from self._called(call)

    def _called(self, call: ToolCallDelta) -> Iterator[ServerSentEvent]:
        if call.is_new:
            yield from self._closed()
            self._call = call.number
            item = call_item(self._answer_id, len(self._output), (call.call_id, call.name, ""))
            yield self._item_opened(item)
        elif self._call != call.number or self._item is None:
            raise ValueError(f"it goes on with tool call {call.number}, which has ended")
        if call.arguments:
            yield self._filled("response.function_call_arguments.delta", call.arguments)

    @property
    def _answer_id(self) -> str:
        return str((self._frame or {}).get("id", ""))

    def _place(self) -> JsonObject:
        item = self._item or {}
        place: JsonObject = {"item_id": item.get("id"), "output_index": len(self._output)}
        return place if self._part is None else {**place, "content_index": len(item["content"])}

    def _filled(self, kind: str, text: str, **fields: Any) -> ServerSentEvent:
        self._texts.append(text)
        return self._event(kind, **self._place(), delta=text, **fields)

    def _item_opened(self, item: JsonObject) -> ServerSentEvent:
        self._item = item
        opened = {**item, "status": "in_progress"}
        if "content" in item:
            opened["content"] = []
        return self._event("response.output_item.added", output_index=len(self._output), item=opened)

    def _part_opened(self, part: str) -> Iterator[ServerSentEvent]:
        """The part, within the open item if that can hold it, or within one of its own."""
        if self._part == part:
            return
        kind = "reasoning" if part == "reasoning_text" else "message"
        if self._item is not None and self._item["type"] == kind:
            yield from self._part_closed()
        else:
            yield from self._closed()
            made = reasoning_item if kind == "reasoning" else message_item
            yield self._item_opened(made(self._answer_id, len(self._output), []))
        self._part = part
        yield self._event("response.content_part.added", **self._place(), part=_PARTS[part](""))

    def _part_closed(self) -> Iterator[ServerSentEvent]:
        if self._part is None or self._item is None:
            return
        text = "".join(self._texts)
        whole = _PARTS[self._part](text)
        said: JsonObject = {_PART_TEXTS[self._part]: text}
        if self._part == "output_text":
            said["logprobs"] = []
        yield self._event(f"response.{self._part}.done", **self._place(), **said)
        yield self._event("response.content_part.done", **self._place(), part=whole)
        self._item["content"].append(whole)
        self._part = None
        self._texts.clear()

    def _closed(self) -> Iterator[ServerSentEvent]:
        if self._item is None:
            return
        yield from self._part_closed()
        if self._item["type"] == "function_call":
            self._item["arguments"] = "".join(self._texts)
            self._texts.clear()
            said = {"name": self._item["name"], "arguments": self._item["arguments"]}
            yield self._event("response.function_call_arguments.done", **self._place(), **said)
        yield self._event("response.output_item.done", output_index=len(self._output), item=self._item)
        self._output.append(self._item)
        self._item = self._call = None
