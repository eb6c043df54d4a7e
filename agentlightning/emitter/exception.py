"""Exceptions: what went wrong, with its stack trace."""

import logging
from collections.abc import Mapping
from typing import Any

from agentlightning.emitter.emission import EmittedSpan, emit, user_attributes
from agentlightning.emitter.utils import get_tracer
from agentlightning.semconv import AGL_EXCEPTION
from agentlightning.utils.otel import format_exception_attributes, showable

__all__ = ["emit_exception"]

logger = logging.getLogger(__name__)


def emit_exception(
    exception: BaseException, attributes: Mapping[str, Any] | None = None, propagate: bool = True
) -> EmittedSpan | None:
    """Record an exception; anything else is logged as an error and not recorded.

    Args:
        attributes: More to note on the span.
        propagate: False makes the span without sending it anywhere.
    """
    given: object = exception
    if not isinstance(given, BaseException):
        logger.error("Expected an BaseException instance, not a %s; it is not recorded.", type(given).__name__)
        return None
    noted = {**user_attributes(attributes), **format_exception_attributes(exception)}
    return emit(AGL_EXCEPTION, noted, get_tracer, propagate=propagate, exception=showable(exception))
