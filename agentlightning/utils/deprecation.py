"""The one way to say that something is on its way out, and the table of the public names that went."""

import warnings
from typing import Final

_CALLER_OF_CALLER: Final = 3
"""Stack level, seen from `deprecated`, of whoever called the function that calls it."""

_OTEL_HELPERS: Final = (
    *("unflatten_attributes", "filter_attributes", "filter_and_unflatten_attributes", "make_tag_attributes"),
    *("extract_tags_from_attributes", "make_link_attributes", "extract_links_from_attributes", "query_linked_spans"),
    "get_span_processors",
)
REMOVED: Final = {
    **{name: f"{name} is gone; read the attributes of a span, which are a dictionary." for name in _OTEL_HELPERS},
    "ConsoleMetricsBackend": "ConsoleMetricsBackend is gone; a store server has its figures at /metrics.",
    "HttpTracer": "HttpTracer is gone; use OtelTracer, or the LLM proxy.",
    "LightningOpenTelemetry": "LightningOpenTelemetry is gone; the LLM proxy records calls itself.",
    "LightningSpanExporter": "LightningSpanExporter is gone; the LLM proxy records calls itself.",
    "MultiMetricsBackend": "MultiMetricsBackend is gone; a tracker of your own can hand its figures on to several.",
    "noop_context": "noop_context is gone; use contextlib.nullcontext.",
    "StreamConversionMiddleware": "StreamConversionMiddleware is gone; the LLM proxy streams in every dialect itself.",
    "WeaveTracer": "WeaveTracer is gone; use OtelTracer, with agl.operation in place of weave.op.",
    "WEAVE_INSTALLED": "WEAVE_INSTALLED is gone, because Weave is not instrumented; use OtelTracer.",
}
"""What to use in place of a public name that was removed; `docs/how-to/migrate.md` has the same rows."""


def missing_name(module: str, name: str) -> AttributeError | ImportError:
    """The error for a name that a module does not have.

    A removed name gets an ImportError, because `from module import name` drops the text of an AttributeError.
    """
    if name in REMOVED:
        return ImportError(REMOVED[name], name=module)
    return AttributeError(f"module {module!r} has no attribute {name!r}")


def deprecated(message: str, *, stacklevel: int = _CALLER_OF_CALLER) -> None:
    """Issue a DeprecationWarning that points at the caller of the function which calls this."""
    warnings.warn(message, DeprecationWarning, stacklevel=stacklevel)
