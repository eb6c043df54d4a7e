"""The stream of a chat in the terms of a dialect that opens, fills and closes the pieces of an answer one by one."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

from agentlightning.dialects import JsonObject
from agentlightning.dialects.sse import ServerSentEvent
from agentlightning.llm_proxy.translation.chat_parts import CallPieces, UsageCounts, usage_counts
from agentlightning.llm_proxy.translation.terms import EventTranslation

__all__ = ["ChunkTranslation"]


class ChunkTranslation(EventTranslation):
    """Reads chunks. What is open ends when the next begins or the chat gives its finish reason."""

    def __init__(self, request: Mapping[str, Any]) -> None:
        super().__init__("chat")
        self._request = request
        self._is_finished = False
        self._calls = CallPieces()
        self._choice: JsonObject = {}
        """What was said of the end."""
        self._counts = UsageCounts(0, 0)

    def finish(self) -> list[ServerSentEvent]:
        if self._is_finished:
            return []
        self._is_finished = True
        return [*self._started({}), *self._closed(), *self._ended()]

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

    @abstractmethod
    def _started(self, chunk: Mapping[str, Any]) -> Iterator[ServerSentEvent]:
        """Begin the answer, with the first chunk; nothing with later ones."""

    @abstractmethod
    def _delta(self, delta: Mapping[str, Any]) -> Iterator[ServerSentEvent]:
        """What a chunk adds."""

    @abstractmethod
    def _closed(self) -> Iterator[ServerSentEvent]:
        """Close what is open; nothing if nothing is."""

    @abstractmethod
    def _ended(self) -> Iterator[ServerSentEvent]:
        """End the answer, which is closed."""
