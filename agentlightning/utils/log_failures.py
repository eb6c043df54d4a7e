"""The boundary at which a failure is logged and not raised, because something else matters more than it; and lines for
whoever watches a training, which a view shows unless the log does already.

A training sets `ANNOUNCE`; code below it, in any thread of that context, announces what a user should see once and by
default, such as how much memory learning needs.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import NoReturn


class log_failures:  # noqa: N801 # used as `with log_failures(...):`
    """Log what is raised inside, whatever it is, and go on behind the block.

    Args:
        level: Of an error the traceback is logged; of anything less the message alone.
        exits: Log SystemExit too: a callback of the user's does not end the program.
    """

    def __init__(
        self, logger: logging.Logger, message: str, *args: object, level: int = logging.ERROR, exits: bool = False
    ) -> None:
        self._logger, self._level, self._exits = logger, level, exits
        self._message, self._args = message, args

    def __enter__(self) -> None:
        return None

    def __exit__(self, _: object, error: BaseException | None, traceback: object) -> bool:
        if not (isinstance(error, Exception) or (self._exits and isinstance(error, SystemExit))):
            return False
        if self._level >= logging.ERROR:
            self._logger.log(self._level, self._message, *self._args, exc_info=error)
        else:
            self._logger.log(self._level, "%s: %s", self._message % self._args, str(error) or type(error).__name__)
        return True


async def repeat(
    work: Callable[[], Awaitable[object]],
    pause_seconds: Callable[[], float],
    logger: logging.Logger,
    message: str,
    *args: object,
) -> NoReturn:
    """Do something again and again; of failures in a row the first is logged as a warning, with the error behind it."""
    has_failed = False
    while True:
        try:
            await work()
            has_failed = False
        except Exception as error:  # noqa: BLE001 # the next time may succeed
            if not has_failed:
                logger.warning("%s: %s", message % args, error)
            has_failed = True
        await asyncio.sleep(pause_seconds())


ANNOUNCE: ContextVar[Callable[[str], None] | None] = ContextVar("agentlightning_announce", default=None)
"""Shows a text to the user; None where nobody watches."""


def announce(logger: logging.Logger, text: str) -> None:
    """Log a text at INFO or, where that goes nowhere, have the view of the training show it."""
    show = ANNOUNCE.get()
    if show is None or (logger.isEnabledFor(logging.INFO) and logger.hasHandlers()):
        logger.info("%s", text)
    else:
        show(text)
