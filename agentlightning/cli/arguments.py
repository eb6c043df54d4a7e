"""The parser of commands, and the types of arguments that they share.

What does not fit is refused by the parser in one line, before a command has opened, imported or started anything. A
word that is nearly right is answered with the right one.
"""

import argparse
import difflib
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final, NoReturn

__all__ = [
    "CommandParser",
    "amount",
    "finite_number",
    "named_path",
    "port_number",
    "positive_number",
    "seconds",
    "similar_word",
    "whole_number",
]

LAST_PORT: Final = 65535
_WRONG_USE: Final = 2
_END_OF_OPTIONS: Final = "--"
_LEAST_SIMILARITY: Final = 0.7


class CommandParser(argparse.ArgumentParser):
    """Shows examples as they are written, and says what is wrong in one line.

    Args:
        examples: Shown at the end of the help.
        options: Those of `argparse.ArgumentParser`.
    """

    def __init__(self, *, examples: str, **options: Any) -> None:
        super().__init__(epilog=examples, formatter_class=argparse.RawDescriptionHelpFormatter, **options)
        self._words: list[str] = []  # what is being parsed

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._words = list(args or ())
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Leave; where no option has a wrong value, a misspelt one is the likeliest cause of what seems to be wrong."""
        unknown = None if message.startswith("argument -") else self._unknown_option()
        if unknown is not None:
            message = f"there is no option {unknown}{_suggested(similar_word(unknown, self._known_options()))}"
        end = "" if message.endswith("?") else "."
        self.exit(_WRONG_USE, f"{self.prog}: {message}{end} See `{self.prog} --help`.\n")

    def _unknown_option(self) -> str | None:
        known = list(self._known_options())
        for word in self._words:
            option = word.partition("=")[0]
            if option == _END_OF_OPTIONS:
                break
            if option.startswith("--") and not any(name.startswith(option) for name in known):
                return option
        return None

    def _known_options(self) -> Iterator[str]:
        """The options of the command and of its verbs."""
        for action in self._actions:
            yield from action.option_strings
            if isinstance(action, argparse._SubParsersAction):  # argparse has no other way to the verbs
                for verb in action.choices.values():
                    yield from verb._known_options()

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            choices = [str(choice) for choice in action.choices]
            told = f"invalid choice: {value!r} (choose from {', '.join(choices)})"
            raise argparse.ArgumentError(action, told + _suggested(similar_word(str(value), choices)))


def similar_word(word: str, known: Iterable[str]) -> str | None:
    """The word that was probably meant; None if none is similar."""
    found = difflib.get_close_matches(word, sorted(known), n=1, cutoff=_LEAST_SIMILARITY)
    return found[0] if found else None


def _suggested(word: str | None) -> str:
    return "" if word is None else f"; did you mean {word}?"


# ---------------------------------------------------------------------- types of arguments


def port_number(text: str) -> int:
    """A port; 0 stands for a free one."""
    number = _whole(text)
    if not 0 <= number <= LAST_PORT:
        raise argparse.ArgumentTypeError(f"{text} is no port; they go from 0, a free one, to {LAST_PORT}")
    return number


def positive_number(text: str) -> int:
    """A count of at least one."""
    number = _whole(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is too few; give at least 1")
    return number


def whole_number(text: str) -> int:
    """A count, or none."""
    number = _whole(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative; give 0 or more")
    return number


def finite_number(text: str) -> float:
    try:
        number = float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from error
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"{text} is no finite number")
    return number


def amount(text: str) -> float:
    """A finite number of at least zero."""
    number = finite_number(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative; give 0 or more")
    return number


def seconds(text: str) -> float:
    """A time that is longer than none."""
    number = finite_number(text)
    if number <= 0:
        raise argparse.ArgumentTypeError(f"{text} is no time; give seconds above 0")
    return number


def named_path(text: str) -> Path:
    """A path that names something; `Path("")` would be the current folder, and a shell's unset variable is empty."""
    if not text:
        raise argparse.ArgumentTypeError("the path is empty; name a file or a folder")
    return Path(text)


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from error
