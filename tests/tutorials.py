"""The programs of the tutorials as a reader saves them, and how a training in them is made short enough for a test."""

import re
from pathlib import Path

TUTORIALS = Path(__file__).parents[1] / "docs" / "tutorials"
LAST_LINE = re.compile(r"even numbers: [\d.]+ \[.*\(n=2\) -> [\d.]+ \[.*\(n=2\)$", re.MULTILINE)
"""What a training prints at its end, once it is shortened."""
ROLLOUTS = 2 * 8 + 2 * 2 * 2
"""Of such a training: a step with two groups of eight; before and after, two tasks greedily and as they are sampled."""
_SAVED = re.compile(
    r"Save this as `(?P<name>[\w.]+)`[^\n]*:\n\n(?:<!-- [^\n]+ -->\n)?```\w+\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_SHORT = {"steps=12": "steps=1, tasks_per_step=2, group_size=8", "n_runners=4": "n_runners=1", "[:32]": "[:2]"}


def programs_of(page: str) -> dict[str, str]:
    """The code of every file that a page tells to save, by name."""
    text = (TUTORIALS / page).read_text(encoding="utf-8")
    return {found["name"]: found["code"] for found in _SAVED.finditer(text)}


def shortened(code: str) -> str:
    """A program whose training takes one small step; AssertionError if it is none of the usual ones."""
    for long, short in _SHORT.items():
        assert long in code, f"'{long}' is not in the program any more"
        code = code.replace(long, short)
    return code
