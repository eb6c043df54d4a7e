"""Running a piece of code under an instrumenting tracer, and looking at the trace it left."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from agentlightning.adapter import TracerTraceToTriplet, TraceTree
from agentlightning.tracer import OtelTracer
from agentlightning.types import Span, Triplet


@dataclass(frozen=True)
class Trace:
    """The spans of one run, and what the code gave back."""

    spans: list[Span]
    result: Any = None
    error: BaseException | None = None

    @property
    def tree(self) -> TraceTree:
        return TraceTree.from_spans(sorted(self.spans, key=lambda span: span.start_time or 0))

    @property
    def shape(self) -> Any:
        """The names of the spans as nested lists: `["a", ["b"], ["c", ["d"]]]`; agents as `name [agent]`."""
        return _shape(self.tree.names_tuple())

    @property
    def model_calls(self) -> list[Span]:
        """The spans of model calls, in the order they began."""
        names = ("openai.chat.completion", "openai.responses", "openai.completion", "anthropic.messages", "litellm.")
        calls = [span for span in self.spans if span.name.startswith(names)]
        return sorted(calls, key=lambda span: span.start_time or 0)

    @property
    def tools(self) -> list[Span]:
        """The spans of tools, in the order they began."""
        return sorted((s for s in self.spans if "tool.name" in s.attributes), key=lambda span: span.start_time or 0)

    def triplets(self, **options: Any) -> list[Triplet]:
        return TracerTraceToTriplet(**options).adapt(self.spans)

    def named(self, name: str) -> Span:
        """The only span of this name."""
        found = [span for span in self.spans if span.name == name]
        assert len(found) == 1, f"{len(found)} spans are named {name}: {[span.name for span in self.spans]}"
        return found[0]


def _shape(node: Any) -> Any:
    name, children = node
    return [name, *(_shape(child) for child in children)]


def observed(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Trace:
    """Call a function under a tracer that instruments, which is taken away again."""
    tracer, result, error = OtelTracer(), None, None
    with tracer.lifespan():
        try:
            with tracer._trace_context_sync():
                result = function(*args, **kwargs)
        except Exception as caught:
            error = caught
        return Trace(spans_of(tracer), result, error)


async def observed_async(function: Callable[..., Awaitable[Any]], *args: Any, **kwargs: Any) -> Trace:
    """As `observed`, for a coroutine function."""
    tracer, result, error = OtelTracer(), None, None
    with tracer.lifespan():
        try:
            async with tracer.trace_context():
                result = await function(*args, **kwargs)
        except Exception as caught:
            error = caught
        return Trace(spans_of(tracer), result, error)


def spans_of(tracer: OtelTracer) -> list[Span]:
    """What the tracer recorded last, as spans of a rollout."""
    return [
        Span.from_opentelemetry(span, "ro-test", "at-test", number)
        for number, span in enumerate(tracer.get_last_trace(), start=1)
    ]
