"""The boundary at which a failure is logged and not raised, because something else matters more than it."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["logged_failure"]


@contextmanager
def logged_failure(logger: logging.Logger, message: str, *args: object, level: int = logging.ERROR) -> Iterator[None]:
    """Log what is raised inside, whatever it is, and go on behind the block.

    Args:
        level: Of an error the traceback is logged; of anything less the message alone.
    """
    try:
        yield
    except Exception as error:  # it may run code of users and stores of others
        if level >= logging.ERROR:
            logger.log(level, message, *args, exc_info=error)
        else:
            logger.log(level, "%s: %s", message % args, error)
