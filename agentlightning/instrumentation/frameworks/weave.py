"""W&B Weave: the calls of a program's `@weave.op` functions become spans.

A call's inputs are written as `agentlightning.operation.input.*`, its output as `agentlightning.operation.output.*`,
and what the program says of it with `weave.attributes` under its own names. Calls that Weave's integrations see in
libraries which we record ourselves are left out, so that a call is one span.

`WeavePatch` records what a program sends to Weave's service; `weave_management` lets ops be recorded without a login,
a service or a network.
"""

import functools
import importlib
import uuid
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from types import ModuleType
from typing import Any, Final

from agentlightning.errors import TracingError
from agentlightning.instrumentation.patch import Original, Patch
from agentlightning.instrumentation.registry import Instrumentation
from agentlightning.instrumentation.steps import Step, guarded, is_suppressed
from agentlightning.semconv import LightningSpanAttributes
from agentlightning.utils.otel import flatten_attributes, sanitize_attributes

_NAME: Final = LightningSpanAttributes.OPERATION_NAME.value
_INPUT: Final = LightningSpanAttributes.OPERATION_INPUT.value
_OUTPUT: Final = LightningSpanAttributes.OPERATION_OUTPUT.value
_RECORDED_BY_US: Final = (
    "openai.",
    "anthropic.",
    "litellm.",
    "langchain.",
    "langgraph.",
    "crewai.",
    "autogen_agentchat.",
    "autogen_core.",
    "smolagents.",
    "openai_agents.",
)
"""How the names of ops begin that Weave's integrations make of calls to libraries we know."""


class _Calls:
    """The calls that are running, by Weave's id of each."""

    def __init__(self) -> None:
        self._steps: dict[str, Step] = {}

    def begin(self, call: Any, name: str, inputs: Mapping[str, Any]) -> None:
        if call.id is None or is_suppressed() or name.startswith(_RECORDED_BY_US):
            return
        with guarded("Weave"):
            given = {key: value for key, value in inputs.items() if key != "self"}
            said = {key: value for key, value in dict(call.attributes or {}).items() if key != "weave"}
            attributes = {_NAME: name, **_flat(said), **_flat({_INPUT: given})}
            self._steps[call.id] = Step(name, attributes)

    def enter(self, call_id: str | None) -> None:
        """What begins from now on is beneath the call."""
        step = self._steps.get(call_id or "")
        if step is not None:
            step.enter()

    def leave(self, call_id: str | None) -> None:
        step = self._steps.get(call_id or "")
        if step is not None:
            step.leave()

    def end(self, call: Any, output: Any, error: BaseException | None) -> None:
        step = self._steps.pop(call.id or "", None)
        if step is None:
            return
        with guarded("Weave"):
            if output is not None:
                step.set(_flat({_OUTPUT: output}))
        step.end(error=error)


def _flat(values: Mapping[str, object]) -> dict[str, Any]:
    return sanitize_attributes(flatten_attributes({name: _plain(value) for name, value in values.items()}))


def _plain(value: object) -> Any:
    """A value of which the parts can be named."""
    dump = getattr(value, "model_dump", None)
    if callable(dump) and not isinstance(value, type):
        return dump(mode="json")
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if isinstance(value, (str, bool, int, float)) else str(value)


class WeavePatch(Patch):
    """Records the calls of ops in a program that has started Weave."""

    name = "Weave"
    module = "weave.trace.weave_client"
    distribution = "weave"

    def __init__(self) -> None:
        super().__init__()
        self._calls = _Calls()

    def change(self, module: ModuleType) -> None:
        self.replace(module.WeaveClient, "create_call", self._create_call)
        self.replace(module.WeaveClient, "finish_call", self._finish_call)
        _follow_stack(self, self._calls)

    def _create_call(
        self, original: Original, client: object, op: Any, inputs: Any, *args: object, **kwargs: object
    ) -> Any:
        call = original(client, op, inputs, *args, **kwargs)
        self._calls.begin(call, _name_of(op), inputs)
        if kwargs.get("use_stack", True):
            self._calls.enter(call.id)
        return call

    def _finish_call(
        self, original: Original, client: object, call: Any, output: Any = None, exception: Any = None, **kwargs: object
    ) -> Any:
        try:
            return original(client, call, output, exception, **kwargs)
        finally:
            self._calls.end(call, output, exception)


def _name_of(op: Any) -> str:
    return op if isinstance(op, str) else str(op.name)


def _follow_stack(patch: Patch, calls: _Calls) -> None:
    """Have a call be current where Weave says it is: a generator's is, while its own code runs."""
    stack = importlib.import_module("weave.trace.context.call_context")

    def push(original: Original, call: Any) -> None:
        original(call)
        calls.enter(call.id)

    def pop(original: Original, call_id: str | None) -> None:
        calls.leave(call_id)
        original(call_id)

    patch.replace(stack, "push_call", push)
    patch.replace(stack, "pop_call", pop)


# ---------------------------------------------------------------------- without a service


@functools.cache
def weave_management() -> Instrumentation:
    """Ops are recorded without Weave's service, for as long as a tracer of this process wants it."""
    return Instrumentation((_LocalPatch(),))


class _LocalPatch(Patch):
    """Gives Weave a client that keeps calls in this process, unless the program has started Weave before.

    `weave.init` gives the same client, and asks for no login.
    """

    name = "Weave"
    module = "weave"

    def change(self, module: ModuleType) -> None:
        context = importlib.import_module("weave.trace.context.weave_client_context")
        if context.get_weave_client() is not None:
            return
        self._silence()
        calls = _Calls()
        client = _local_client_kind()(calls)
        _follow_stack(self, calls)
        self.replace(importlib.import_module("weave.trace.weave_init"), "init_weave", client.take_over)
        context.set_weave_client_global(client)
        self.when_undone(lambda: _remove(context, client))

    def _silence(self) -> None:
        """Send W&B no report of errors and, when the process ends, none that it ran: that one began with the import
        and is dropped for good."""
        reports = importlib.import_module("weave.telemetry.trace_sentry").global_trace_sentry
        if reports.scope is not None:
            reports.scope._session = None
        self.when_undone(functools.partial(setattr, reports, "_disabled", reports._disabled))
        reports._disabled = True


def _remove(context: Any, client: Any) -> None:
    if context.get_weave_client() is client:
        context.set_weave_client_global(None)


class _NoServer:
    """What stands for Weave's service where it is not used."""

    def __getattr__(self, name: str) -> Any:
        raise TracingError(
            f"Weave's service was asked for '{name}', but WeaveTracer uses Weave without it; call weave.init before "
            "the tracer is initialised to use the service."
        )


@functools.cache
def _local_client_kind() -> Any:
    """A kind of Weave's clients, made when Weave is there."""
    return type("LocalClient", (_LocalCalls, importlib.import_module("weave.trace.weave_client").WeaveClient), {})


class _LocalCalls:
    """What a client does with calls, done in this process. What needs the service raises an error that says so."""

    def __init__(self, calls: _Calls) -> None:
        self.entity = self.project = "local"
        self.server = _NoServer()
        self.ensure_project_exists = True
        self.attributes: dict[str, Any] = {}
        self.postprocess_inputs = self.postprocess_output = None
        self._calls = calls
        self._stack = importlib.import_module("weave.trace.context.call_context")
        self._new_call: Any = importlib.import_module("weave.trace.call").Call

    def take_over(self, _original: object, project_name: str, *_: object, **options: Any) -> Any:
        """What `weave.init` does."""
        self.project = project_name
        self.attributes = options.get("attributes") or {}
        return self

    def create_call(
        self,
        op: Any,
        inputs: dict[str, Any],
        parent: Any = None,
        attributes: dict[str, Any] | None = None,
        display_name: Any = None,
        **options: object,
    ) -> Any:
        name, use_stack = _name_of(op), options.get("use_stack", True)
        parent = parent or (self._stack.get_current_call() if use_stack else None)
        call_id = options.get("_call_id_override") or str(uuid.uuid4())
        postprocess = getattr(op, "postprocess_inputs", None)
        call = self._new_call(
            _op_name=name,
            trace_id=parent.trace_id if parent else call_id,
            project_id=f"{self.entity}/{self.project}",
            parent_id=parent.id if parent else None,
            inputs=postprocess(inputs) if postprocess else inputs,
            id=call_id,
            attributes={**self.attributes, **(attributes or {})},
        )
        call.display_name = display_name(call) if callable(display_name) else display_name
        self._calls.begin(call, name, call.inputs)
        if use_stack:
            self._stack.push_call(call)
        return call

    def finish_call(
        self, call: Any, output: Any = None, exception: BaseException | None = None, *, op: Any = None, **_: object
    ) -> None:
        postprocess = getattr(op, "postprocess_output", None)
        call.output = postprocess(output) if postprocess else output
        call.exception = None if exception is None else str(exception)
        self._calls.end(call, call.output, exception)
        self._stack.pop_call(call.id)

    def finish(self, *_: object, **__: object) -> None:
        """Nothing is on its way anywhere."""

    flush = finish
