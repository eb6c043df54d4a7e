"""Where log records go: the console, files, and handlers the application brings; and text that is safe to print there.

Nothing here runs at import: a library that is merely imported leaves logging to the application, and every module of
this package just logs to the logger of its own name. A function below changes the loggers it is told to change and no
others. It *replaces* their handlers, which is why calling it again never doubles a line; files that an earlier call
opened are closed, handlers that the application made are only let go.
"""

import logging
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, TypeAlias

from agentlightning.errors import ConfigurationError

__all__ = ["DATE_FORMAT", "DEFAULT_FORMAT", "configure_logger", "setup", "setup_module"]

_ROOT_NAME: Final = "agentlightning"
DEFAULT_FORMAT: Final = "%(asctime)s [%(levelname)s] (Process-%(process)d %(name)s)   %(message)s"
"""Of the plain console and of files; the time is written with its date."""
DATE_FORMAT: Final = "%H:%M:%S"
"""For formatters of your own that need no date."""
_LEVEL_NAMES: Final = ("CRITICAL", "ERROR", "WARNING", "INFO", "DEBUG", "NOTSET")

_Path: TypeAlias = str | os.PathLike[str]


def printable(text: str, kept: str = "") -> str:
    """The text with spaces for what a terminal could take for a command, but for the characters that are `kept`."""
    return "".join(one if one.isprintable() or one in kept else " " for one in text)


def printable_lines(text: str) -> str:
    """The text as `printable`, with its lines; all but the first are indented, so that they show as part of it."""
    first, *rest = printable(text, kept="\n\t").split("\n")
    return "\n".join([first, *(line if line.startswith((" ", "\t")) or not line else f"    {line}" for line in rest)])


class _PrintableFormatter(logging.Formatter):
    """Writes spaces for commands to a terminal, and indents all lines but the first: none passes for a record."""

    def format(self, record: logging.LogRecord) -> str:
        return printable_lines(super().format(record))


class _LogFile(logging.FileHandler):
    """A file opened by this module, which the next setup may therefore close."""


def configure_logger(level: int | str = logging.INFO, name: str = _ROOT_NAME) -> logging.Logger:
    """Give a logger one plain console handler and stop it from propagating."""
    return setup_module(level, name=name, color=False)


def setup(
    level: int | str = "INFO",
    *,
    console: bool = True,
    color: bool = True,
    propagate: bool = False,
    disable_existing_loggers: bool = False,
    capture_warnings: bool = False,
    submodule_levels: Mapping[str, int | str] | None = None,
    extra_handlers: Sequence[logging.Handler] | None = None,
    formatter: logging.Formatter | None = None,
    apply_to: Iterable[str] | None = None,
    files: _Path | Mapping[str, _Path] | None = None,
) -> None:
    """Decide where the records of the whole package go.

    Args:
        console: Write to standard error.
        color: Use rich for the console when it is a terminal.
        propagate: Hand records on to the application's root logger as well.
        disable_existing_loggers: Silence every other logger that exists now.
        capture_warnings: Log what `warnings.warn` reports, with the same handlers.
        submodule_levels: Levels of single loggers, by full name (`agentlightning.store`).
        extra_handlers: Handlers to add; they keep their own level and format.
        formatter: Replaces the format of console and files.
        apply_to: Names of further loggers that get the same level and handlers.
        files: One file for everything, or a file for each of some loggers by full name, which do not change otherwise.
    """
    number = _level_number(level)
    number_by_name = {name: _level_number(one) for name, one in (submodule_levels or {}).items()}
    names = {_ROOT_NAME, *(apply_to or ()), *(["py.warnings"] if capture_warnings else [])}
    handlers = [_console_handler(color=color, formatter=formatter)] if console else []
    file_by_name: dict[str, _LogFile] = {}
    if isinstance(files, Mapping):
        file_by_name = {name: _file_handler(path, formatter) for name, path in files.items()}
    elif files is not None:
        handlers.append(_file_handler(files, formatter))
    handlers.extend(extra_handlers or ())

    for name in names:
        _install(logging.getLogger(name), handlers, number, propagate=propagate)
    for name, file in file_by_name.items():
        logger = logging.getLogger(name)
        for handler in list(logger.handlers):
            if isinstance(handler, _LogFile):  # of an earlier call
                _detach(logger, handler)
        logger.addHandler(file)
    for name, one in number_by_name.items():
        logging.getLogger(name).setLevel(one)
    if disable_existing_loggers:
        _disable_others({*names, *file_by_name, *number_by_name})
    if capture_warnings:
        logging.captureWarnings(capture=True)


def setup_module(
    level: int | str = "INFO",
    *,
    name: str = _ROOT_NAME,
    console: bool = True,
    color: bool = True,
    propagate: bool = False,
    disable_existing_loggers: bool = False,
) -> logging.Logger:
    """Decide where the records of one logger go; an application may use it for its own modules."""
    logger = logging.getLogger(name)
    number = _level_number(level)
    handlers = [_console_handler(color=color, formatter=None)] if console else []
    _install(logger, handlers, number, propagate=propagate)
    if disable_existing_loggers:
        _disable_others({name})
    return logger


def _level_number(level: int | str) -> int:
    if isinstance(level, int):
        return level
    # Not a fixed table, so that levels the application added are known too.
    number = logging.getLevelName(level.strip().upper())
    if not isinstance(number, int):
        raise ConfigurationError(
            f"Log level {level!r} is unknown; use one of {', '.join(_LEVEL_NAMES)}, in any case, or a number."
        )
    return number


def _console_handler(*, color: bool, formatter: logging.Formatter | None) -> logging.Handler:
    if color and sys.stderr is not None and sys.stderr.isatty():
        from rich.console import Console
        from rich.logging import RichHandler

        handler = RichHandler(console=Console(stderr=True), show_path=False, omit_repeated_times=False)
        handler.setFormatter(formatter or _PrintableFormatter("(Process-%(process)d %(name)s)   %(message)s"))
        return handler
    plain = logging.StreamHandler()
    plain.setFormatter(formatter or _PrintableFormatter(DEFAULT_FORMAT))
    return plain


def _file_handler(path: _Path, formatter: logging.Formatter | None) -> _LogFile:
    handler = _LogFile(path, encoding="utf-8")
    handler.setFormatter(formatter or _PrintableFormatter(DEFAULT_FORMAT))
    return handler


def _install(logger: logging.Logger, handlers: Sequence[logging.Handler], level: int, *, propagate: bool) -> None:
    """Make these the logger's only handlers; with none it is silent rather than left to Python's last resort."""
    for handler in list(logger.handlers):
        _detach(logger, handler)
    for handler in handlers or [logging.NullHandler()]:
        logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = propagate
    logger.disabled = False


def _detach(logger: logging.Logger, handler: logging.Handler) -> None:
    logger.removeHandler(handler)
    if isinstance(handler, _LogFile):
        handler.close()


def _disable_others(kept_names: set[str]) -> None:
    """Silence all loggers except these and those below them."""
    prefixes = tuple(f"{name}." for name in kept_names)
    for name, logger in logging.root.manager.loggerDict.items():
        if isinstance(logger, logging.Logger) and name not in kept_names and not name.startswith(prefixes):
            logger.disabled = True
