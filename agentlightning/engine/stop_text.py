"""Text while it is sampled: decoded token by token, and cut where a stop string begins.

Runs in the thread of the engine, so that a stop string ends the sampling with the token that completes it. The token
ids keep all that was sampled; only the text is cut.
"""

from collections.abc import Sequence

from agentlightning.engine.codec import ChatCodec, ContentDelta, Delta, IncrementalParser


class IncrementalDecoder:
    """Decodes token by token; a character that several tokens make up comes whole."""

    def __init__(self, codec: ChatCodec) -> None:
        self.token_ids: list[int] = []
        self._codec = codec
        self._decoded = 0
        self._context = 0
        """The tokens from here to `_decoded` are decoded again with what follows, as some tokenizers need."""

    def add(self, token_id: int) -> str:
        self.token_ids.append(token_id)
        text = self._rest()
        if not text or text.endswith("\ufffd"):  # what the bytes of an incomplete character decode to
            return ""
        self._context, self._decoded = self._decoded, len(self.token_ids)
        return text

    def finish(self) -> str:
        """What is left, incomplete characters included."""
        text, self._decoded = self._rest(), len(self.token_ids)
        return text

    def _rest(self) -> str:
        before = self._codec.decode(self.token_ids[self._context : self._decoded])
        return self._codec.decode(self.token_ids[self._context :])[len(before) :]


class TextParser:
    """An `IncrementalParser` for text without a chat format."""

    def __init__(self, codec: ChatCodec) -> None:
        self._decoder = IncrementalDecoder(codec)

    def add(self, token_id: int) -> list[Delta]:
        text = self._decoder.add(token_id)
        return [ContentDelta(text)] if text else []

    def finish(self) -> list[Delta]:
        text = self._decoder.finish()
        return [ContentDelta(text)] if text else []


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
        certain = len(text) - max((_overlap(text, stop) for stop in self._stops), default=0)
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


class StoppedParser:
    """A parser whose text ends before the first stop string."""

    def __init__(self, parser: IncrementalParser, stops: Sequence[str] = ()) -> None:
        self._parser = parser
        self._stop = StopText(stops)

    @property
    def is_stopped(self) -> bool:
        return self._stop.is_hit

    def add(self, token_id: int) -> list[Delta]:
        return self._cut(self._parser.add(token_id))

    def finish(self) -> list[Delta]:
        deltas = [] if self.is_stopped else self._cut(self._parser.finish())
        if not self.is_stopped and (rest := self._stop.finish()):
            deltas.append(ContentDelta(rest))
        return deltas

    def _cut(self, deltas: list[Delta]) -> list[Delta]:
        kept: list[Delta] = []
        for delta in deltas:
            if self._stop.is_hit:
                break
            if not isinstance(delta, ContentDelta):
                kept.append(delta)
            elif text := self._stop.add(delta.text):
                kept.append(ContentDelta(text))
        return kept
