"""Failures of others that go no further: what a callback or a listener raises is logged."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["log_failures"]


@contextmanager
def log_failures(logger: logging.Logger, message: str, *arguments: object) -> Iterator[None]:
    """Log what the block raises, with its traceback, and go on; for code whose fault is not that of its caller."""
    try:
        yield
    except Exception:
        logger.exception(message, *arguments)
