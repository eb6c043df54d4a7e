"""The last rows of a terminal, set apart: everything else that is written scrolls above them.

The terminal itself keeps the two apart (its scrolling region), so nobody else needs to know: log lines, the user's
prints, other threads, and runner processes that share the terminal write as always and nothing is garbled. Each drawing
is one write. `close` gives the rows back; a program that is killed before leaves them behind, which `reset` in the
shell undoes.
"""

import atexit
from collections.abc import Sequence
from typing import IO, Final

__all__ = ["BottomRows", "write_at_once"]

LEAST_ROWS: Final = 12
"""A terminal with fewer rows has none to spare, and nothing is drawn."""

_SAVE, _RESTORE = "\x1b7", "\x1b8"
_WHOLE_SCREEN: Final = "\x1b[r"
_DOWN: Final = "\x1bD"
_ERASE_LINE, _ERASE_BELOW = "\x1b[2K", "\x1b[J"
_GIVE_BACK: Final = _SAVE + _WHOLE_SCREEN + _RESTORE + _ERASE_BELOW
"""Setting the region moves the cursor, hence the saving; below the cursor there is nothing but the rows."""


class BottomRows:
    """Rows at the bottom of one terminal; it takes as many as it is given lines, and never fewer than before."""

    def __init__(self, output: IO[str]) -> None:
        self._output = output
        self._count = 0
        self._screen_rows = 0

    def draw(self, lines: Sequence[str], screen_rows: int) -> None:
        """Write the lines, which must fit the width of the screen; `screen_rows` is its height now."""
        if screen_rows < LEAST_ROWS:
            self.close()
            return
        taken = self._take(max(len(lines), self._count), screen_rows)
        first = self._screen_rows - self._count + 1
        rows = [_at(first + number) + _ERASE_LINE + line for number, line in enumerate(lines)]
        write_at_once(self._output, taken + _SAVE + "".join(rows) + _RESTORE)

    def close(self) -> None:
        """Give the rows back, empty; the cursor stays where it is."""
        if self._count:
            self._count = 0
            write_at_once(self._output, _GIVE_BACK)
            atexit.unregister(self.close)

    def _take(self, count: int, screen_rows: int) -> str:
        """What to write to have so many rows; nothing, if it has them."""
        if count == self._count and screen_rows == self._screen_rows:
            return ""
        if not self._count:
            atexit.register(self.close)
        undone = _GIVE_BACK if self._count else ""
        self._count, self._screen_rows = count, screen_rows
        # Going down scrolls what is in the way; going up again leaves the cursor above the rows, in its column.
        room = _DOWN * count + f"\x1b[{count}A"
        return undone + room + _SAVE + f"\x1b[1;{screen_rows - count}r" + _RESTORE


def write_at_once(output: IO[str], text: str) -> None:
    """Write and flush; characters that the output cannot encode become question marks."""
    encoding = getattr(output, "encoding", None) or "utf-8"
    output.write(text.encode(encoding, "replace").decode(encoding))
    output.flush()


def _at(row: int) -> str:
    return f"\x1b[{row};1H"
