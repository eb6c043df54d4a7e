"""The border between our code and the agent's: a mistake of ours is logged, and the agent goes on."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from agentlightning.instrumentation.spans import Step, is_suppressed, set_tool_result

__all__ = ["guarded", "recorded", "record_result"]

logger = logging.getLogger(__name__)


@contextmanager
def guarded(library: str) -> Iterator[None]:
    """Around code of ours that runs inside a library; never around the library's own, whose errors are its own."""
    try:
        yield
    except Exception:
        logger.exception("A step of %s could not be recorded.", library)


@contextmanager
def recorded(
    library: str, open_step: Callable[[], Step], *, harmless: tuple[type[BaseException], ...] = ()
) -> Iterator[Step | None]:
    """Do a library's work as a step, which fails if the work does; without one where it cannot or must not be.

    Args:
        harmless: Exceptions by which the library says something else than that the work failed.
    """
    step: Step | None = None
    with guarded(library):
        step = None if is_suppressed() else open_step().enter()
    failure: BaseException | None = None
    try:
        yield step
    except BaseException as error:
        failure = None if isinstance(error, harmless) else error
        raise
    finally:
        if step is not None:
            with guarded(library):
                step.end(error=failure)


def record_result(library: str, step: Step | None, result: Any) -> None:
    """What the tool of a recorded step gave back."""
    if step is not None:
        with guarded(library):
            set_tool_result(step, result)
