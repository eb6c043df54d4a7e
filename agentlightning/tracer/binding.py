"""The rollout to which a span belongs: the one that is being observed where the span begins.

`observe` opens a *binding* in a context variable; a span that begins inside belongs to it, whichever task, thread or
provider finishes it, and so do the spans beneath it. Tasks inherit context variables, and so do threads and what is
handed to thread pools, while `instrumentation.threads` is applied. In a thread that inherited nothing a span belongs to
the one rollout that is running in the process, and if several are, to none, because a span on the wrong rollout is
worse than one that is missing.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from agentlightning.errors import ConfigurationError
from agentlightning.utils.once import fork_handlers, once
from agentlightning.utils.otel import get_tracer

if TYPE_CHECKING:
    from opentelemetry import trace
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace import Span as LiveSpan

    from agentlightning.tracer.base import Tracer
    from agentlightning.tracer.trace_shipper import TraceShipper

__all__ = [
    "CARRIED",
    "Binding",
    "Losses",
    "Recorder",
    "binding_here",
    "clear_active_tracer",
    "current_binding",
    "get_active_tracer",
    "is_unobserved",
    "observations",
    "observe",
    "set_active_tracer",
    "unobserved",
]

_T = TypeVar("_T")


@dataclass
class Losses:
    """Spans of one trace that could not be brought to the store."""

    count: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    """How many were lost, by reason."""

    def add(self, reason: str) -> None:
        self.count += 1
        self.reasons[reason] = self.reasons.get(reason, 0) + 1


class Recorder:
    """The finished spans of one trace, in the order they ended, and how many of them were lost on the way.

    It also begins spans as a tracer of OpenTelemetry does.
    """

    def __init__(self, name: str | None = None, otel_tracer: "Callable[[], trace.Tracer]" = get_tracer) -> None:
        self.name = name
        self._otel_tracer = otel_tracer
        self.losses = Losses()
        self.numbers: dict[int, int] = {}
        """Sequence ids in the store by span id, as far as they are known."""
        self.open_spans: dict[int, LiveSpan] = {}
        """Spans by id that have begun, and are neither ended nor shown to the store."""
        self.is_given_up = False  # from the deadline of its last flush on
        self._spans: list[ReadableSpan] = []

    def record(self, span: "ReadableSpan") -> None:
        if (context := span.get_span_context()) is not None:
            self.open_spans.pop(context.span_id, None)
        self._spans.append(span)

    def spans(self) -> "list[ReadableSpan]":
        """A copy; spans that end later are not in it."""
        return list(self._spans)

    @property
    def start_span(self) -> "Callable[..., trace.Span]":
        """OpenTelemetry's method of this name; its spans are recorded here when they end."""
        return self._otel_tracer().start_span

    @property
    def start_as_current_span(self) -> "Callable[..., AbstractContextManager[trace.Span]]":
        """As `start_span`, around a block or a function; spans that begin inside are its children."""
        return self._otel_tracer().start_as_current_span


@dataclass(frozen=True, eq=False)
class Binding:
    """One trace that is being recorded, and the attempt it belongs to."""

    tracer: "Tracer"
    recorder: Recorder
    shipper: "TraceShipper | None" = None
    """None if the trace is only recorded."""
    rollout_id: str = ""
    attempt_id: str = ""

    def finish(self, span: "ReadableSpan") -> None:
        """Record a span that has ended, and ship it."""
        self.recorder.record(span)
        if self.shipper is not None:
            self.shipper.put(self, span)


_BINDING: ContextVar["Binding | None"] = ContextVar("agentlightning_binding", default=None)
_TRACER: ContextVar["Tracer | None"] = ContextVar("agentlightning_tracer", default=None)
_IS_UNOBSERVED: ContextVar[bool] = ContextVar("agentlightning_unobserved", default=False)


CARRIED: tuple[ContextVar[Any], ...] = (_BINDING, _TRACER, _IS_UNOBSERVED)
"""What a thread must inherit to belong to the rollout that started it."""


class Observations:
    """What is observed in this process, for threads that inherited no context."""

    def __init__(self) -> None:
        # Lists, because to append and to remove are each a single step for other threads.
        self.bindings: list[Binding] = []
        self.tracers: list[Tracer] = []
        # The threads that were observed are the parent's; the one that forked still has its context.
        fork_handlers().add(self, Observations.__init__)

    def sole_binding(self) -> Binding | None:
        """The trace that is being recorded, if it is the only one."""
        bindings = self.bindings.copy()
        return bindings[0] if len(bindings) == 1 else None

    def sole_tracer(self) -> "Tracer | None":
        tracers = set(self.tracers)
        return tracers.pop() if len(tracers) == 1 else None


@once
def observations() -> Observations:
    """One per process, as OpenTelemetry's provider is: a bare thread has nothing else to go by."""
    return Observations()


current_binding = _BINDING.get
"""The trace of this context; None outside of all, and in a bare thread."""
is_unobserved = _IS_UNOBSERVED.get


def binding_here() -> Binding | None:
    """The trace of this context or, in a bare thread, the only one of the process."""
    return current_binding() or observations().sole_binding()


class observe:  # noqa: N801 # read as a verb; a class, because a generator takes longer
    """Record what happens inside; the binding's tracer is the active one meanwhile."""

    def __init__(self, binding: Binding) -> None:
        self._binding = binding

    def __enter__(self) -> Binding:
        set_active_tracer(self._binding.tracer)
        self._token, self._bindings = _BINDING.set(self._binding), observations().bindings
        self._bindings.append(self._binding)
        return self._binding

    def __exit__(self, *exc_info: object) -> None:
        if self._binding in self._bindings:  # not in a forked child, which has forgotten it
            self._bindings.remove(self._binding)
        _leave(self._binding.tracer)
        _reset(_BINDING, self._token)


@contextmanager
def unobserved() -> Iterator[None]:
    """Spans that begin inside belong to no rollout, even in a bare thread beside the only one that is running.

    For code that shares the process with rollouts but is not part of one, such as an algorithm that calls a model.
    """
    binding, tracer, is_unobserved = _BINDING.set(None), _TRACER.set(None), _IS_UNOBSERVED.set(True)
    try:
        yield
    finally:
        _reset(_IS_UNOBSERVED, is_unobserved)
        _reset(_TRACER, tracer)
        _reset(_BINDING, binding)


def _reset(variable: ContextVar[_T], token: "Token[_T]") -> None:
    with suppress(ValueError):  # left in another context than it was entered in, as by a fixture that yields
        variable.reset(token)


# ---------------------------------------------------------------------- the active tracer


def set_active_tracer(tracer: "Tracer") -> None:
    """Make a tracer the one that emitters here use; ConfigurationError if there is one already."""
    active = _TRACER.get()
    if active is not None:
        raise ConfigurationError(
            f"{type(active).__name__} is already the active tracer; traces do not nest, "
            "so leave its trace_context (or call clear_active_tracer) first."
        )
    _TRACER.set(tracer)
    observations().tracers.append(tracer)


def clear_active_tracer() -> None:
    """Undo `set_active_tracer`; harmless if no tracer is active."""
    tracer = _TRACER.get()
    if tracer is not None:
        _leave(tracer)


def _leave(tracer: "Tracer") -> None:
    if _TRACER.get() is tracer:
        _TRACER.set(None)
    tracers = observations().tracers
    if tracer in tracers:
        tracers.remove(tracer)


def get_active_tracer() -> "Tracer | None":
    """The tracer of this context or, in a bare thread, the only one of the process."""
    tracer = _TRACER.get()
    if tracer is not None or _IS_UNOBSERVED.get():
        return tracer
    return observations().sole_tracer()
