"""Lines for whoever watches a training: a view shows them, unless the log does already.

A training sets `ANNOUNCE`; code below it, in any thread of that context, announces what a user should see once and by
default, such as how much memory learning needs.
"""

import logging
from collections.abc import Callable
from contextvars import ContextVar

ANNOUNCE: ContextVar[Callable[[str], None] | None] = ContextVar("agentlightning_announce", default=None)
"""Shows a text to the user; None where nobody watches."""


def announce(logger: logging.Logger, text: str) -> None:
    """Log a text at INFO or, where that goes nowhere, have the view of the training show it."""
    show = ANNOUNCE.get()
    if show is None or (logger.isEnabledFor(logging.INFO) and logger.hasHandlers()):
        logger.info("%s", text)
    else:
        show(text)
