"""WeaveTracer: for programs that use W&B Weave."""

import importlib.util

from agentlightning.tracer.otel import OtelTracer

__all__ = ["WeaveTracer"]


class WeaveTracer(OtelTracer):
    """Records what is emitted and what is written with OpenTelemetry, in a program that uses Weave.

    Calls that only Weave sees become spans when `agentlightning.instrumentation` knows Weave.
    """

    def __init__(self, *, instrument: bool = True) -> None:
        """ImportError if the package weave is missing.

        Args:
            instrument: Apply `agentlightning.instrumentation.instrument_all` in each worker.
        """
        if importlib.util.find_spec("weave") is None:
            raise ImportError("WeaveTracer needs the package weave: pip install weave, or use OtelTracer.")
        super().__init__(instrument=instrument)
