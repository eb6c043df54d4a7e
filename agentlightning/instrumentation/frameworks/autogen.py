"""AutoGen and ag2: AutoGen's native spans, made whole, and the chats and turns of its continuation.

AutoGen (`autogen_core`, `autogen_agentchat`, `autogen_ext`) writes OpenTelemetry spans itself, with the provider of the
process: messages, the work of an agent (`invoke_agent`), the work of a tool (`execute_tool`). We add a span around each
run of a team, which would be as many traces as messages otherwise; the arguments and the result of tools; the agent's
span where the agent is asked directly; hand-offs. The current span of a stream is kept from the code that reads it.

ag2 below 1.0 continues AutoGen 0.2 (`import autogen`): a chat is a step, and so is each reply, with the agent's name
above the model calls and tools that make it. A call outside of a reply, as for the summary of a chat, gets a step of
its own; what ag2 answers from its cache leaves none. From 1.0 on (`import ag2`) a turn of an agent is a step.
"""

import importlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    ExitStack,
    aclosing,
    asynccontextmanager,
    contextmanager,
    nullcontext,
)
from contextvars import ContextVar
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.trace import Span, StatusCode
from typing_extensions import Self

from agentlightning.instrumentation.patch import (
    Original,
    Patch,
    Step,
    agent_step,
    as_json,
    guarded,
    record_calls,
    recorded,
    set_tool_result,
    tool_step,
)
from agentlightning.semconv import AGENT_NAME, TOOL_NAME

_AUTOGEN: Final = "AutoGen"
_Stream = AsyncGenerator[Any, None]


class AutoGenPatch(Patch):
    """Tools here, and what else of AutoGen the program uses in the parts, which wait for modules of their own."""

    name = _AUTOGEN
    module = "autogen_core.tools"
    distribution = "autogen-core"

    def __init__(self) -> None:
        super().__init__()
        self.parts = (_RuntimePatch(), _AgentsPatch(), _TeamsPatch(), _McpPatch())

    def change(self, module: ModuleType) -> None:
        self.replace(_home_of(module.BaseTool), "trace_tool_span", _tool_span)
        self.replace(module.BaseTool, "run_json", _run_tool)
        self.replace(module.BaseStreamTool, "run_json_stream", _apart(_stream_tool))


class _RuntimePatch(Patch):
    name, module, distribution = _AUTOGEN, "autogen_core", "autogen-core"

    def change(self, module: ModuleType) -> None:
        runtime = _home_of(module.SingleThreadedAgentRuntime)
        self.replace(runtime.TraceHelper, "trace_block", _trace_message)
        self.replace(runtime, "get_telemetry_envelope_metadata", _address)


class _McpPatch(Patch):
    name, module, distribution = _AUTOGEN, "autogen_ext.tools.mcp", "autogen-ext"

    def change(self, module: ModuleType) -> None:
        self.replace(_home_of(module.McpWorkbench), "trace_tool_span", _tool_span)
        self.replace(module.McpWorkbench, "call_tool", _call_mcp_tool)


class _AgentsPatch(Patch):
    name, module, distribution = _AUTOGEN, "autogen_agentchat.agents", "autogen-agentchat"

    def change(self, module: ModuleType) -> None:
        invoke = importlib.import_module("autogen_core").trace_invoke_agent_span
        self.replace(module.BaseChatAgent, "run_stream", _apart(_unchanged))
        for kind in (module.BaseChatAgent, module.AssistantAgent, module.CodeExecutorAgent, module.SocietyOfMindAgent):
            self.replace(kind, "on_messages_stream", _apart(_invoked(invoke)))


class _TeamsPatch(Patch):
    name, module, distribution = _AUTOGEN, "autogen_agentchat.teams", "autogen-agentchat"

    def change(self, module: ModuleType) -> None:
        self.replace(module.BaseGroupChat, "run_stream", _apart(_run_team))


def _home_of(kind: type) -> Any:
    """The module in which a class is defined, which looks up its functions there."""
    return importlib.import_module(kind.__module__)


# ---------------------------------------------------------------------- messages


@dataclass(frozen=True)
class _Origin:
    """Where the conversation began that a message is part of: outside of the runtime that delivers it.

    The runtime works in the context it was started in, which may be that of another team, or of none.
    """

    runtime: Any
    """Known by what traces for it, of which each runtime has one."""
    context: otel_context.Context


_ORIGIN: Final = otel_context.create_key("agentlightning-autogen-origin")


@contextmanager
def _trace_message(
    original: Callable[..., AbstractContextManager[Span]],
    runtime: object,
    /,
    operation: str,
    destination: object,
    parent: object,
    **kwargs: object,
) -> Iterator[Span]:
    """Trace a step of a message: sent where the sender is, delivered where the conversation began."""
    outside = otel_context.get_current()
    with guarded(_AUTOGEN):
        otel_context.attach(_context_of(runtime, operation, parent))
    try:
        with original(runtime, operation, destination, parent, **kwargs) as span:
            yield span
    finally:
        otel_context.attach(outside)


def _context_of(runtime: object, operation: str, metadata: object) -> otel_context.Context:
    here = otel_context.get_current()
    origin: Any = here.get(_ORIGIN)
    if operation == "create":
        is_within = isinstance(origin, _Origin) and origin.runtime is runtime
        return here if is_within else otel_context.set_value(_ORIGIN, _Origin(runtime, here), here)
    origin = vars(metadata).get(_ORIGIN) if hasattr(metadata, "__dict__") else None
    if operation == "process" or origin is None:  # the first is within the delivery, which is where it belongs
        return here
    return otel_context.set_value(_ORIGIN, origin, origin.context)


def _address(original: Callable[[], object], /) -> Any:
    """Note on the envelope of a message what conversation it is part of."""
    metadata = original()
    with guarded(_AUTOGEN):
        vars(metadata)[_ORIGIN] = otel_context.get_value(_ORIGIN)
    return metadata


# ---------------------------------------------------------------------- streams


def _apart(wrapper: Callable[..., _Stream]) -> Callable[..., _Stream]:
    """Let what a stream makes current be so while the stream works, and not while its reader does."""

    def streaming(original: Callable[..., _Stream], owner: object, /, *args: object, **kwargs: object) -> _Stream:
        return _kept_apart(wrapper(original(owner, *args, **kwargs), owner, *args, **kwargs))

    return streaming


async def _kept_apart(stream: _Stream) -> _Stream:
    inside = otel_context.get_current()
    try:
        while True:
            outside = otel_context.get_current()
            otel_context.attach(inside)
            try:
                item = await anext(stream)
            except StopAsyncIteration:
                return
            finally:
                inside = otel_context.get_current()
                otel_context.attach(outside)
            yield item
    finally:
        outside = otel_context.get_current()
        otel_context.attach(inside)
        try:
            await stream.aclose()
        finally:
            otel_context.attach(outside)


def _unchanged(stream: _Stream, /, *_args: object, **_kwargs: object) -> _Stream:
    return stream


# ---------------------------------------------------------------------- teams and agents


async def _run_team(messages: _Stream, team: Any, /, *_args: object, **_kwargs: object) -> _Stream:
    def open_step() -> Step:
        otel_context.attach(otel_context.set_value(_ORIGIN, None))  # a team within a team has its own conversation
        return Step(f"{team.name}.team", {"autogen.team.name": team.name})

    # A reader who has seen enough is no failure.
    with recorded(_AUTOGEN, open_step, harmless=(GeneratorExit,)):
        async with aclosing(messages):
            async for message in messages:
                yield message


def _invoked(invoke: Callable[..., AbstractContextManager[Span]]) -> Callable[..., _Stream]:
    """Give an agent its span where neither its `run` nor a team has, and note to whom it hands over."""

    async def on_messages_stream(messages: _Stream, agent: Any, /, *_args: object, **_kwargs: object) -> _Stream:
        is_invoked = getattr(trace.get_current_span(), "name", None) == f"invoke_agent {agent.name}"
        with ExitStack() as span:
            if not is_invoked:
                span.enter_context(invoke(agent_name=agent.name, agent_description=agent.description))
            async with aclosing(messages):
                async for message in messages:
                    if hasattr(message, "chat_message"):  # the response, after which most readers read no more
                        with guarded(_AUTOGEN):
                            _record_handoff(message.chat_message)
                        span.close()
                    yield message

    return on_messages_stream


def _record_handoff(message: Any) -> None:
    if getattr(message, "type", None) == "HandoffMessage":
        between = {"handoff.from_agent": message.source, "handoff.to_agent": message.target}
        Step(f"{message.source}.handoff", between).end()


# ---------------------------------------------------------------------- tools


class _ToolCall:
    """A call of a tool, whose native span is kept open until the result is known."""

    def __init__(self, tool: str, arguments: Any, call_id: str | None) -> None:
        self._tool, self._arguments, self._call_id = tool, arguments, call_id
        self._native: AbstractContextManager[Span] = nullcontext(trace.INVALID_SPAN)
        self._span: Span = trace.INVALID_SPAN

    def open(self, native: AbstractContextManager[Span]) -> AbstractContextManager[Span]:
        """Begin the span, and give AutoGen a context that does not end it."""
        self._span = native.__enter__()
        self._native = native
        with guarded(_AUTOGEN):
            self._span.set_attributes({TOOL_NAME: self._tool, "tool.call.type": "function"})
            self._span.set_attribute("tool.parameters", as_json(self._arguments))
            if self._call_id is not None:
                self._span.set_attribute("tool.call.id", self._call_id)
        return nullcontext(self._span)

    def record_result(self, text: Callable[[], str], *, is_error: bool = False) -> None:
        with guarded(_AUTOGEN):
            self._span.set_attribute("tool.result", text())
            if is_error:
                self._span.set_status(StatusCode.ERROR, text())

    def __enter__(self) -> Self:
        _BEGINNING.set(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        _BEGINNING.set(None)
        self._native.__exit__(kind, error, traceback)


_BEGINNING: ContextVar[_ToolCall | None] = ContextVar("agentlightning_autogen_tool", default=None)
"""The call whose native span AutoGen is about to open."""


def _tool_span(
    original: Callable[..., AbstractContextManager[Span]], /, *args: object, **kwargs: object
) -> AbstractContextManager[Span]:
    native, call = original(*args, **kwargs), _BEGINNING.get()
    if call is None:
        return native
    _BEGINNING.set(None)
    return call.open(native)


async def _run_tool(original: Original, tool: Any, /, args: Any, *rest: object, **kwargs: object) -> Any:
    with _ToolCall(tool.name, args, _call_id(rest, kwargs)) as call:
        result = await original(tool, args, *rest, **kwargs)
        call.record_result(lambda: tool.return_value_as_string(result))
        return result


async def _stream_tool(results: _Stream, tool: Any, /, args: Any, *rest: object, **kwargs: object) -> _Stream:
    result = None
    with _ToolCall(tool.name, args, _call_id(rest, kwargs)) as call:
        async with aclosing(results):
            async for result in results:
                yield result
        call.record_result(lambda: tool.return_value_as_string(result))


async def _call_mcp_tool(
    original: Original, workbench: object, /, name: str, arguments: object = None, *rest: object, **kwargs: object
) -> Any:
    with _ToolCall(name, arguments or {}, _call_id(rest, kwargs)) as call:
        result = await original(workbench, name, arguments, *rest, **kwargs)
        call.record_result(result.to_text, is_error=result.is_error)
        return result


def _call_id(rest: tuple[object, ...], kwargs: dict[str, Any]) -> str | None:
    """The id the model gave to a call, which follows the cancellation token."""
    call_id: str | None = kwargs.get("call_id", rest[1] if len(rest) > 1 else None)
    return call_id


# ---------------------------------------------------------------------- ag2


class AG2Patch(Patch):
    name = "ag2"
    module = "autogen.agentchat.conversable_agent"  # `autogen` alone may well be a module of the program
    distribution = "ag2"

    def change(self, module: ModuleType) -> None:
        agent = module.ConversableAgent
        for prefix in ("", "a_"):
            record_calls(self, agent, f"{prefix}initiate_chat", _chat)
            record_calls(self, agent, f"{prefix}generate_reply", _reply)
            record_calls(self, agent, f"{prefix}execute_function", _tool, on_result=_record_outcome)
        record_calls(self, module.OpenAIWrapper, "create", _model_call)


class NewerAG2Patch(Patch):
    """ag2 from 1.0 on."""

    name = "ag2"
    module = "ag2"

    def change(self, module: ModuleType) -> None:
        if self._version()[0] in "(0":
            return  # a module of the program that has the same name
        executor = importlib.import_module("ag2.tools.executor")
        self.replace(module.Agent, "_drive_scope", _turn_scope)
        record_calls(self, executor, "_execute_call", _newer_tool, on_result=_record_event)


def _chat(sender: Any, /, recipient: Any, *_args: object, **_kwargs: object) -> Step:
    between = {"ag2.chat.sender": sender.name, "ag2.chat.recipient": recipient.name}
    return Step(f"{sender.name}.chat", between)


def _reply(agent: Any, /, *_args: object, **_kwargs: object) -> Step:
    return agent_step(agent.name, attributes={"ag2.agent.name": agent.name})


def _model_call(_client: object, /, *, agent: Any = None, **_config: object) -> Step | None:
    """None within a reply of the agent, whose step is open."""
    attributes = getattr(trace.get_current_span(), "attributes", None) or {}
    is_replying = agent is not None and attributes.get(AGENT_NAME) == getattr(agent, "name", None)
    return None if agent is None or is_replying else agent_step(agent.name)


def _tool(_agent: object, /, func_call: Any, call_id: str | None = None, *_args: object, **_kwargs: object) -> Step:
    return tool_step(str(func_call.get("name", "")), func_call.get("arguments", "{}"), call_id=call_id)


def _record_outcome(step: Step, outcome: Any) -> None:
    """A tool that fails does not raise here: ag2 tells the model what went wrong."""
    is_done, message = outcome
    set_tool_result(step, message["content"])
    if not is_done:
        step.span.set_status(StatusCode.ERROR, str(message["content"]))


# ---------------------------------------------------------------------- from 1.0 on

_Turn = Callable[[], Awaitable[Any]]


def _turn_scope(
    original: Callable[..., AbstractAsyncContextManager[_Turn]], agent: object, /, *args: object, **kwargs: object
) -> AbstractAsyncContextManager[_Turn]:
    return _recorded_turn(agent, original(agent, *args, **kwargs))


@asynccontextmanager
async def _recorded_turn(agent: Any, scope: AbstractAsyncContextManager[_Turn]) -> AsyncIterator[_Turn]:
    """The scope of a turn, in which the program may subscribe to events before it has the turn taken."""
    async with scope as take_turn:

        async def recorded_turn() -> Any:
            attributes = {"ag2.agent.name": agent.name}
            with recorded(NewerAG2Patch.name, lambda: agent_step(agent.name, attributes=attributes)):
                return await take_turn()

        yield recorded_turn


def _newer_tool(_context: object, /, call: Any) -> Step:
    return tool_step(call.name, call.arguments, call_id=call.id)


def _record_event(step: Step, event: object) -> None:
    """A tool that fails does not raise here: ag2 tells the model. A tool that the client is to run has no result."""
    if (error := getattr(event, "error", None)) is not None:
        step.end(error=error)
    elif (result := getattr(event, "result", None)) is not None:
        parts = [getattr(part, "content", getattr(part, "data", None)) for part in result.parts]
        set_tool_result(step, parts[0] if len(parts) == 1 else parts)
