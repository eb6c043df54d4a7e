"""The boundary at which a failure is logged and not raised, because something else matters more than it."""

import logging

__all__ = ["log_failures"]


class log_failures:  # noqa: N801 # used as `with log_failures(...):`
    """Log what is raised inside, whatever it is, and go on behind the block.

    Args:
        level: Of an error the traceback is logged; of anything less the message alone.
    """

    def __init__(self, logger: logging.Logger, message: str, *args: object, level: int = logging.ERROR) -> None:
        self._logger, self._level = logger, level
        self._message, self._args = message, args

    def __enter__(self) -> None:
        return None

    def __exit__(self, _: object, error: BaseException | None, traceback: object) -> bool:
        if not isinstance(error, Exception):
            return False
        if self._level >= logging.ERROR:
            self._logger.log(self._level, self._message, *self._args, exc_info=error)
        else:
            self._logger.log(self._level, "%s: %s", self._message % self._args, error)
        return True
