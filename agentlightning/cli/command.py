"""A command of `agl`: its parser, the types of arguments that commands share, and how commands answer.

What does not fit is refused by the parser in one line, before a command has opened, imported or started anything. A
word that is nearly right is answered with the right one.
"""

import argparse
import json
import math
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn, TypeAlias

from agentlightning.logging import setup
from agentlightning.utils.spelling import similar_word

LAST_PORT: Final = 65535
_WRONG_USE: Final = 2
_END_OF_OPTIONS: Final = "--"


@dataclass(frozen=True)
class Command:
    """One command: what it takes, and what it does."""

    name: str
    run: Callable[[argparse.Namespace], int | None]
    """Carries the command out; returns the exit code, or the signal that ended a server. None is success."""
    arguments: "Sequence[Argument]"
    description: str
    examples: str
    """Shown at the end of the help, as they are written."""
    log_level: str = "WARNING"
    quiet_loggers: Sequence[str] = ()
    """Loggers of what the command itself reports."""
    usage: str | None = None
    has_rest: bool = False
    """Whether words from `--` on are not its own; they become `arguments.rest`."""
    passed_on: Callable[[Sequence[str]], int | None] | None = None
    """Carries out words that are another program's, and returns its exit code; None leaves them to the parser."""

    def parser(self) -> "CommandParser":
        parser = CommandParser(
            prog=f"agl {self.name}", usage=self.usage, description=self.description, examples=self.examples
        )
        for add in self.arguments:
            add(parser)
        parser.add_argument("--log-level", default=self.log_level, help="DEBUG, INFO, WARNING or ERROR")
        return parser

    def __call__(self, argv: Sequence[str] | None = None) -> int:
        """Parse the arguments, set up logging, and run; returns the exit code. KeyboardInterrupt if Ctrl-C ended it."""
        words = list(sys.argv[1:] if argv is None else argv)
        code = None if self.passed_on is None else self.passed_on(words)
        if code is not None:
            return code
        end = words.index(_END_OF_OPTIONS) if self.has_rest and _END_OF_OPTIONS in words else len(words)
        arguments = self.parser().parse_args(words[:end])
        arguments.rest = words[end:]
        setup(arguments.log_level.upper(), submodule_levels=dict.fromkeys(self.quiet_loggers, "CRITICAL"))
        code = self.run(arguments)
        if isinstance(code, signal.Signals):
            if code is signal.SIGINT:
                raise KeyboardInterrupt
            return 0
        return code or 0


def cli_command(name: str, **options: Any) -> Callable[[Callable[[argparse.Namespace], int | None]], Command]:
    """Make the function of a module, its `main`, a command.

    Args:
        options: The other fields of `Command`.
    """
    return lambda run: Command(name, run, **options)


# ---------------------------------------------------------------------- arguments


Argument: TypeAlias = Callable[[Any], object]
"""Adds itself to a parser, or to a group of one."""


def argument(*names: str, **options: Any) -> Argument:
    """An argument as `argparse` describes it."""
    return lambda parser: parser.add_argument(*names, **options)


def one_of(*arguments: Argument) -> Argument:
    """Arguments of which one at most may be given."""

    def add(parser: argparse.ArgumentParser) -> None:
        group = parser.add_mutually_exclusive_group()
        for each in arguments:
            each(group)

    return add


def verbs(*every: tuple[str, str, Sequence[Argument]], required: bool = False) -> Argument:
    """Verbs of a command: the name of each, what it does, and its own arguments."""

    def add(parser: argparse.ArgumentParser) -> None:
        listed = ",".join(verb for verb, _, _ in every)
        subparsers = parser.add_subparsers(dest="verb", required=required, metavar=f"{{{listed}}}")
        for verb, meaning, arguments in every:
            own = subparsers.add_parser(
                verb, help=meaning, description=f"{meaning.capitalize()}.", examples=parser.epilog
            )
            for each in arguments:
                each(own)

    return add


# ---------------------------------------------------------------------- answers


def say(command: str, text: str) -> None:
    """Write a line of a command's own to standard error."""
    print(f"agl {command}: {text}", file=sys.stderr, flush=True)  # noqa: T201 # the command's own output


def print_json(value: Mapping[str, object]) -> None:
    """Write what a command answers as one line of JSON."""
    print(json.dumps(value, default=str), flush=True)  # noqa: T201 # the command's own output


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Tells the defaults of options whose help does not."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        is_plain = action.default in (None, False, argparse.SUPPRESS) or isinstance(action.default, list)
        return text if is_plain or "default" in text else f"{text} (default: %(default)s)"


class CommandParser(argparse.ArgumentParser):
    """Shows examples as they are written, and says what is wrong in one line.

    Args:
        examples: Shown at the end of the help.
        options: Those of `argparse.ArgumentParser`.
    """

    def __init__(self, *, examples: str, **options: Any) -> None:
        super().__init__(epilog=examples, formatter_class=_HelpFormatter, **options)
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

    def _check_value(self, action: argparse.Action, value: object) -> None:
        if action.choices is not None and value not in action.choices:
            choices = [str(choice) for choice in action.choices]
            message = f"invalid choice: {value!r} (choose from {', '.join(choices)})"
            raise argparse.ArgumentError(action, message + _suggested(similar_word(str(value), choices)))


def _suggested(word: str | None) -> str:
    return "" if word is None else f"; did you mean {word}?"


# ---------------------------------------------------------------------- types of arguments


def whole_number(text: str, least: int = 0) -> int:
    """A count, or none."""
    try:
        number = int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from error
    if number < least:
        way_out = f"is too few; give at least {least}" if least else "is negative; give 0 or more"
        raise argparse.ArgumentTypeError(f"{text} {way_out}")
    return number


def positive_number(text: str) -> int:
    """A count of at least one."""
    return whole_number(text, least=1)


def port_number(text: str) -> int:
    """A port; 0 stands for a free one."""
    number = whole_number(text, least=-LAST_PORT)
    if not 0 <= number <= LAST_PORT:
        raise argparse.ArgumentTypeError(f"{text} is no port; they go from 0, a free one, to {LAST_PORT}")
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
