"""The stream of one of OpenAI's responses as that of a chat."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from agentlightning.dialects import JsonObject
from agentlightning.dialects.sse import ServerSentEvent
from agentlightning.llm_proxy.translation.chat_chunks import ChatChunks
from agentlightning.llm_proxy.translation.chat_parts import UsageCounts
from agentlightning.llm_proxy.translation.responses_terms import counts_of, finish_reason_of
from agentlightning.llm_proxy.translation.terms import EventTranslation

__all__ = ["ChatFromResponses"]

_DELTAS: Final = {"response.output_text.delta": "content", "response.refusal.delta": "refusal"}
_REASONING: Final = {
    "response.reasoning_text.delta": "content_index",
    "response.reasoning_summary_text.delta": "summary_index",
}
_ENDS: Final = ("response.completed", "response.incomplete")


class ChatFromResponses(EventTranslation):
    """Turns events of items into chunks."""

    def __init__(self, request: Mapping[str, Any]) -> None:
        super().__init__("responses")
        self._chunks = ChatChunks(request)
        self._calls: dict[int, int] = {}
        """The number of a call in the chat, by its place in the output."""
        self._has_arguments: set[int] = set()
        self._thoughts: dict[int, tuple[str, int]] = {}
        """By place in the output, the kind of reasoning that came first and the part that it is in."""
        self._counts = UsageCounts(0, 0)
        self._finish_reason = "stop"

    def finish(self) -> list[ServerSentEvent]:
        return self._chunks.ended(self._finish_reason, self._counts)

    def _translated(self, event: JsonObject) -> Iterator[ServerSentEvent]:
        kind = event["type"]
        if kind in _DELTAS:
            yield self._chunks.delta({_DELTAS[kind]: event["delta"]})
        elif kind == "response.function_call_arguments.delta":
            if event["delta"]:
                yield self._arguments(event["output_index"], event["delta"])
        elif kind in _REASONING:
            yield from self._thought(event, kind)
        elif kind == "response.created":
            response = event["response"]
            yield self._chunks.started(response.get("id"), response.get("model"), response.get("created_at"))
        elif kind in ("response.output_item.added", "response.output_item.done"):
            yield from self._item(event["output_index"], event["item"], is_done=kind.endswith("done"))
        elif kind in _ENDS:
            self._is_complete = True
            self._counts = counts_of(event["response"].get("usage"))
            self._finish_reason = finish_reason_of(event["response"], has_calls=bool(self._calls))
            yield from self.finish()

    def _item(self, place: int, item: JsonObject, *, is_done: bool) -> Iterator[ServerSentEvent]:
        if item["type"] != "function_call":
            return
        if place not in self._calls:
            self._calls[place] = len(self._calls)
            yield self._chunks.call(self._calls[place], item["call_id"], item["name"])
        if is_done and place not in self._has_arguments:  # none came in pieces
            yield self._arguments(place, item.get("arguments") or "{}")

    def _arguments(self, place: int, text: str) -> ServerSentEvent:
        self._has_arguments.add(place)
        return self._chunks.call_arguments(self._calls[place], text)

    def _thought(self, event: JsonObject, kind: str) -> Iterator[ServerSentEvent]:
        """What the model thinks: the text or its summary, whichever comes, but not both."""
        place, part = event["output_index"], event.get(_REASONING[kind]) or 0
        first, last = self._thoughts.setdefault(place, (kind, part))
        if first != kind:
            return
        self._thoughts[place] = (kind, part)
        gap = "\n\n" if part != last else ""
        yield self._chunks.delta({"reasoning_content": gap + event["delta"]})
