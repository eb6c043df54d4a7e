"""The picture of the live view: a training of `agl demo`, recorded as it draws on a terminal, as an animated SVG.

The view draws on a terminal of its own kind. A dozen of the moments that it drew, evenly spread, and what it printed at
the end become frames, which rich exports and a style sheet shows one after the other. Where nothing is animated, the
end is seen. The picture loads nothing, and names no machine, no user and no path of this one.
"""

import getpass
import io
import re
import socket
import tempfile
from pathlib import Path
from typing import Final
from unittest import mock

from rich.console import Console
from rich.text import Text

from agentlightning.cli import demo
from agentlightning.trainer import roles
from agentlightning.trainer.views import ProgressMode, TerminalView

__all__ = ["write_live_picture"]

WIDTH, HEIGHT = 100, 24
FRAMES: Final = 12
FRAME_SECONDS, END_SECONDS = 0.8, 8.0
ROW: Final = re.compile(r"\x1b\[\d+;1H\x1b\[2K(.*?)(?=\x1b\[\d+;1H|\x1b8)")
"""A row that the view draws at its place on the screen."""
FOLDER: Final = "calc"
COMMAND: Final = f"[bold green]$[/] agl demo --folder {FOLDER}"
FRAME: Final = '<g class="{unique_id}"><style>{styles}</style>{backgrounds}{matrix}</g>'
PICTURE: Final = """\
<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<!-- Written by `make screenshots` from a training. -->
<style>text {{ font: 20px ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; white-space: pre }}
ANIMATION</style>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})">
CONTENT
</g>
</svg>
"""


class RecordedView(TerminalView):
    """Keeps what the live view draws, and what it prints at the end."""

    def __init__(self, name: str) -> None:
        terminal = Console(file=io.StringIO(), force_terminal=True, color_system="256", width=WIDTH, height=HEIGHT)
        super().__init__(terminal, name)
        self.moments: list[str] = []
        self.end = ""

    def _write(self, text: str) -> None:
        rows = ROW.findall(text)
        if rows:
            self.moments.append("\n".join(rows))
        elif "\x1b7" not in text:  # it only moves the cursor
            self.end += text


def write_live_picture(target: Path) -> None:
    """Train as `agl demo` does, and write how that looked."""
    views: list[RecordedView] = []

    def recorded(_mode: ProgressMode | None, name: str) -> RecordedView:
        views.append(RecordedView(name))
        return views[-1]

    with tempfile.TemporaryDirectory() as place, mock.patch.object(roles, "view_for", recorded):
        folder = Path(place) / FOLDER
        if demo.main(["--folder", str(folder)]) != 0:
            raise SystemExit("The demo did not come to its end; there is no picture of it.")
        end = views[0].end.replace(str(folder), FOLDER)
    picture = picture_of([*spread(views[0].moments, FRAMES), end])
    for private in (getpass.getuser(), socket.gethostname(), str(Path.home()), tempfile.gettempdir()):
        if private in picture:
            raise SystemExit(f"The picture names '{private}'; see what the view has printed:\n{end}")
    target.write_text(picture, encoding="utf-8")


def spread(moments: list[str], count: int) -> list[str]:
    """So many of the moments, from the first one to the last one."""
    if len(moments) <= count:
        return moments
    return [moments[round(n * (len(moments) - 1) / (count - 1))] for n in range(count)]


def picture_of(texts: list[str]) -> str:
    """Frames with these texts, in a picture that shows one after the other and the last one longest."""
    rows = max(text.rstrip().count("\n") for text in texts) + 1
    total = FRAME_SECONDS * (len(texts) - 1) + END_SECONDS
    content, styles = [], []
    for number, text in enumerate(texts):
        is_last = number == len(texts) - 1
        console = Console(record=True, file=io.StringIO(), width=WIDTH, force_terminal=True)
        console.print(COMMAND, highlight=False)
        text = text.rstrip()
        console.print(Text.from_ansi(text + "\n" * (rows - text.count("\n"))), no_wrap=True, crop=True)
        content.append(console.export_svg(code_format=FRAME, unique_id=f"f{number}", clear=False))
        begin = 100 * FRAME_SECONDS * number / total
        end = 100.0 if is_last else 100 * FRAME_SECONDS * (number + 1) / total
        first, last = int(number == 0), int(is_last)
        steps = f"0% {{ opacity: {first} }} {begin:.2f}% {{ opacity: 1 }} {end:.2f}% {{ opacity: {last} }}"
        styles.append(f".f{number} {{ opacity: {last}; animation: f{number} {total:g}s step-end infinite }}")
        styles.append(f"@keyframes f{number} {{ {steps} }}")
    styles.append("@media (prefers-reduced-motion) { g { animation: none !important } }")
    frame = console.export_svg(title="agl demo", code_format=PICTURE, unique_id="picture")
    picture = frame.replace("ANIMATION", "\n".join(styles)).replace("CONTENT", "\n".join(content))
    return re.sub(r' clip-path="[^"]*"', "", picture).replace("&#160;", " ")
