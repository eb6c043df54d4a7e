"""Text of any length in bounded memory: its beginning and its end are kept, and how much is missing between them."""

from typing import Final

__all__ = ["ClippedText", "redacted"]

HEAD_BYTES: Final = 32 * 1024
TAIL_BYTES: Final = 32 * 1024
_REDACTED: Final = "***"
_CONTINUES: Final = (0x80, 0xC0)
"""What a byte inside a UTF-8 character looks like, and the bits that show it."""
_LONGEST_CHARACTER: Final = 4


class ClippedText:
    """Takes UTF-8 in pieces; bytes that are not UTF-8 become replacement characters."""

    def __init__(self, head_bytes: int = HEAD_BYTES, tail_bytes: int = TAIL_BYTES) -> None:
        self.byte_count = 0
        """Of everything that was added."""
        self._head_bytes = head_bytes
        self._tail_bytes = tail_bytes
        self._head = bytearray()
        self._tail = bytearray()

    def add(self, piece: bytes) -> None:
        self.byte_count += len(piece)
        room = self._head_bytes - len(self._head)
        if room > 0:
            self._head += piece[:room]
            piece = piece[room:]
        self._tail += piece[-self._tail_bytes :]
        if len(self._tail) > 2 * self._tail_bytes:  # not at every piece, or small ones would cost as much as large ones
            del self._tail[: -self._tail_bytes]

    @property
    def cut_bytes(self) -> int:
        """How much is missing in the middle."""
        return max(0, self.byte_count - self._head_bytes - self._tail_bytes)

    def text(self, secrets: tuple[str, ...] = ()) -> str:
        """All of it, or the beginning, a note and the end; secrets are blacked out, also those the cut went through."""
        if not self.cut_bytes:
            return redacted(bytes(self._head + self._tail).decode(errors="replace"), secrets)
        head = bytes(self._head[: _character_start(self._head)]).decode(errors="replace")
        for secret in secrets:
            head = _without_beginning_of(secret, head)
        note = f"\n[… {self.cut_bytes} bytes are left out here …]\n"
        return redacted(head, secrets) + note + self.end(secrets)

    def end(self, secrets: tuple[str, ...] = ()) -> str:
        """The end alone; of text that was not cut, all."""
        if not self.cut_bytes:
            return self.text(secrets)
        tail = self._tail[-self._tail_bytes :]
        skipped = 0
        while skipped < _LONGEST_CHARACTER - 1 and _is_inside(tail[skipped]):
            skipped += 1
        text = bytes(tail[skipped:]).decode(errors="replace")
        for secret in secrets:
            text = _without_end_of(secret, text)
        return redacted(text, secrets)


def _is_inside(byte: int) -> bool:
    pattern, bits = _CONTINUES
    return byte & bits == pattern


def _character_start(head: bytearray) -> int:
    """Where the last character begins, which the cut may have gone through."""
    start = len(head) - 1
    while start > max(0, len(head) - _LONGEST_CHARACTER) and _is_inside(head[start]):
        start -= 1
    return start


def redacted(text: str, secrets: tuple[str, ...]) -> str:
    """The text with every secret blacked out."""
    for secret in sorted(secrets, key=len, reverse=True):  # one may be part of another
        text = text.replace(secret, _REDACTED)
    return text


def _without_beginning_of(secret: str, text: str) -> str:
    for length in range(len(secret) - 1, 0, -1):
        if text.endswith(secret[:length]):
            return text[:-length] + _REDACTED
    return text


def _without_end_of(secret: str, text: str) -> str:
    for length in range(len(secret) - 1, 0, -1):
        if text.startswith(secret[-length:]):
            return _REDACTED + text[length:]
    return text
