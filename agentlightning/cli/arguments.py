"""Types of command-line arguments that commands share.

What does not fit is refused by the parser, before a command has opened, imported or started anything.
"""

import argparse
from pathlib import Path
from typing import Final

__all__ = ["named_path", "port_number", "positive_number"]

LAST_PORT: Final = 65535


def port_number(text: str) -> int:
    """A port; 0 stands for a free one."""
    number = _whole_number(text)
    if not 0 <= number <= LAST_PORT:
        raise argparse.ArgumentTypeError(f"{text} is no port; they go from 0, a free one, to {LAST_PORT}")
    return number


def positive_number(text: str) -> int:
    """A count of at least one."""
    number = _whole_number(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is too few; give at least 1")
    return number


def named_path(text: str) -> Path:
    """A path that names something; `Path("")` would be the current folder, and a shell's unset variable is empty."""
    if not text:
        raise argparse.ArgumentTypeError("the path is empty; name a file or a folder")
    return Path(text)


def _whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from error
