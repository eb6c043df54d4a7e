"""Text that is shown: of any length in bounded memory, and without secrets; and counts."""

import codecs
from typing import Final

KEPT_BYTES: Final = 32 * 1024
"""Of the beginning, and of the end."""
_REDACTED: Final = "***"
_INSIDE_A_CHARACTER: Final = bytes(range(0x80, 0xC0))
_LONGEST_CHARACTER: Final = 4


class ClippedText:
    """Keeps the beginning and the end of a text, and how much is missing between them.

    Takes UTF-8 in pieces; bytes that are not UTF-8 become replacement characters."""

    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        self.byte_count = 0
        """Of everything that was added."""
        self._kept_bytes = kept_bytes
        self._head = bytearray()
        self._tail = bytearray()

    def add(self, piece: bytes) -> None:
        self.byte_count += len(piece)
        room = self._kept_bytes - len(self._head)
        self._head += piece[:room]
        self._tail += piece[room:][-self._kept_bytes :]
        if len(self._tail) > 2 * self._kept_bytes:  # not at every piece, or small ones would cost as much as large ones
            del self._tail[: -self._kept_bytes]

    @property
    def cut_bytes(self) -> int:
        """How much is missing in the middle."""
        return max(0, self.byte_count - 2 * self._kept_bytes)

    def text(self, secrets: tuple[str, ...] = ()) -> str:
        """All of it, or the beginning, a note and the end; secrets are blacked out, also those the cut went through."""
        if not self.cut_bytes:
            return redacted(bytes(self._head + self._tail).decode(errors="replace"), secrets)
        head = codecs.getincrementaldecoder("utf-8")("replace").decode(self._head)  # without half a character
        for secret in secrets:
            cut = next((n for n in range(len(secret) - 1, 0, -1) if head.endswith(secret[:n])), 0)
            head = head[:-cut] + _REDACTED if cut else head
        return f"{redacted(head, secrets)}\n[… {self.cut_bytes} bytes are left out here …]\n{self.end(secrets)}"

    def end(self, secrets: tuple[str, ...] = ()) -> str:
        """The end alone; of text that was not cut, all."""
        if not self.cut_bytes:
            return self.text(secrets)
        tail = self._tail[-self._kept_bytes :]
        first = tail[: _LONGEST_CHARACTER - 1].lstrip(_INSIDE_A_CHARACTER)
        text = bytes(first + tail[_LONGEST_CHARACTER - 1 :]).decode(errors="replace")
        for secret in secrets:
            cut = next((n for n in range(len(secret) - 1, 0, -1) if text.startswith(secret[-n:])), 0)
            text = _REDACTED + text[cut:] if cut else text
        return redacted(text, secrets)


def redacted(text: str, secrets: tuple[str, ...]) -> str:
    """The text with every secret blacked out."""
    for secret in sorted(secrets, key=len, reverse=True):  # one may be part of another
        text = text.replace(secret, _REDACTED)
    return text


def counted(number: int, noun: str) -> str:
    """So many of something: `1 pair`, `2 pairs`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
