"""What a choice says while it is sampled: text, thoughts and tool calls, cut where a stop string begins.

Runs in the thread of the engine, token by token, so that a stop string ends the sampling with the token that completes
it. The token ids keep all that was sampled; only the text is cut.
"""

from collections.abc import Sequence
from typing import Final

from agentlightning.engine.codec import ChatCodec, ContentDelta, Delta, IncrementalParser

__all__ = ["PlainText", "Speech", "StopText"]

_UNFINISHED: Final = "\ufffd"
"""What the bytes of a character that is not complete yet are decoded to."""


class StopText:
    """Text that arrives in pieces, up to the first stop string; what could be the beginning of one is held back."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.is_hit = False
        self._stops = stops
        self._held = ""

    def add(self, piece: str) -> str:
        """The text that is certain now."""
        if self.is_hit:
            return ""
        text = self._held + piece
        places = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if places:
            self.is_hit, self._held = True, ""
            return text[: min(places)]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        certain = len(text) - keep
        self._held = text[certain:]
        return text[:certain]

    def finish(self) -> str:
        """What was held back, when no stop string came of it."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of a text that begins a stop string."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)


class PlainText:
    """A parser for text without a chat format; characters that several tokens make up come whole."""

    def __init__(self, codec: ChatCodec) -> None:
        self._codec = codec
        self._token_ids: list[int] = []
        self._said = 0
        """Tokens whose text was told; the last of them are decoded again with what follows, as some tokens need."""
        self._context = 0

    def add(self, token_id: int) -> list[Delta]:
        self._token_ids.append(token_id)
        before = self._codec.decode(self._token_ids[self._context : self._said])
        now = self._codec.decode(self._token_ids[self._context :])
        if len(now) <= len(before) or now.endswith(_UNFINISHED):
            return []
        self._context, self._said = self._said, len(self._token_ids)
        return [ContentDelta(now[len(before) :])]

    def finish(self) -> list[Delta]:
        before = self._codec.decode(self._token_ids[self._context : self._said])
        rest = self._codec.decode(self._token_ids[self._context :])[len(before) :]
        self._said = len(self._token_ids)
        return [ContentDelta(rest)] if rest else []


class Speech:
    """Everything one choice says."""

    def __init__(self, parser: IncrementalParser, stops: Sequence[str] = ()) -> None:
        self._parser = parser
        self._stop = StopText(stops) if stops else None

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string was said."""
        return self._stop is not None and self._stop.is_hit

    def add(self, token_id: int) -> list[Delta]:
        """What a token adds, as far as it is certain."""
        return self._cut(self._parser.add(token_id))

    def finish(self) -> list[Delta]:
        """What was held back until the end."""
        deltas = [] if self.is_stopped else self._cut(self._parser.finish())
        if self._stop is not None and not self._stop.is_hit and (rest := self._stop.finish()):
            deltas.append(ContentDelta(rest))
        return deltas

    def _cut(self, deltas: list[Delta]) -> list[Delta]:
        if self._stop is None:
            return deltas
        kept: list[Delta] = []
        for delta in deltas:
            if self._stop.is_hit:
                break
            if not isinstance(delta, ContentDelta):
                kept.append(delta)
            elif text := self._stop.add(delta.text):
                kept.append(ContentDelta(text))
        return kept
