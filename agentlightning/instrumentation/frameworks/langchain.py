"""LangChain and LangGraph, observed through LangChain's own callbacks.

Whenever something begins to run, LangChain asks its configure hooks for handlers, so ours needs no place in the user's
code. The other changes see to it that a handler's change to the context reaches the work it is meant for, and only
that: asynchronous runs tell of their end in tasks of their own, and of several model calls that begin at once each is
made in its turn.

Which run lies beneath which, their ids say. What is done without LangChain inside a run finds its parent in the
context, which a run therefore changes: a node, a tool, a retriever and a model call from their beginning to their end,
other chains only in the copies of the context that LangChain makes for their work. A model call is a plain step above
the call that the model's SDK makes. Where none is seen, the step says itself what was asked and answered.
"""

import copy
import functools
import importlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, ClassVar, Final
from uuid import UUID

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.util.types import AttributeValue
from typing_extensions import Self

from agentlightning.dialects import langchain as dialect
from agentlightning.instrumentation.model_calls import WATCHES, CallWatch
from agentlightning.instrumentation.patch import (
    Original,
    Patch,
    PatchedCall,
    Step,
    as_json,
    guarded,
    is_suppressed,
    tool_step,
)
from agentlightning.semconv import TIME_TO_FIRST_TOKEN

_LANGCHAIN: Final = "LangChain"
_AGENT: Final = "langchain.chain.type"


# ---------------------------------------------------------------------- runs, and where they are worked on


@dataclass
class _Call:
    """The request of a run that is a model call."""

    prompt: Sequence[Any]
    params: Mapping[str, Any]
    watch: CallWatch = field(default_factory=CallWatch)
    began: float = field(default_factory=time.perf_counter)
    first_token_seconds: float | None = None


@dataclass(frozen=True)
class _Beginning:
    """What LangChain says of a run when it begins."""

    name: str
    kind: str = "chain"
    tags: Sequence[str] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    parent_run_id: UUID | None = None

    @classmethod
    def of(cls, serialized: Any, kwargs: Mapping[str, Any]) -> Self:
        """Named as the program or, if it did not, as the class."""
        given = serialized or {}
        name = kwargs.get("name") or given.get("name") or (given.get("id") or ["unnamed"])[-1]
        kind, tags, metadata = kwargs.get("run_type") or "chain", kwargs.get("tags") or (), kwargs.get("metadata") or {}
        return cls(str(name), kind, tags, metadata, kwargs.get("parent_run_id"))

    @property
    def agent(self) -> str | None:
        """The name that `create_agent` was given; what lies beneath the agent's graph inherits it."""
        agent = self.metadata.get("lc_agent_name")
        return agent if isinstance(agent, str) else None

    @property
    def node(self) -> Any:
        """Which node of a graph is at work, and for which time; what lies beneath the node inherits it."""
        return self.metadata.get("langgraph_node"), self.metadata.get("langgraph_checkpoint_ns")

    @property
    def is_hidden(self) -> bool:
        return "langsmith:hidden" in self.tags or self.kind in ("prompt", "parser")

    @property
    def is_part(self) -> bool:
        """Whether it only joins other things together."""
        # How tags begin of runs that are parts of another.
        return self.name.startswith("Runnable") or any(
            tag.startswith(("seq:step:", "map:key:", "branch:", "condition:")) for tag in self.tags
        )


@dataclass(eq=False)
class Run:
    """A run that has a step of its own."""

    id: UUID
    step: Step
    beginning: _Beginning
    is_agent: bool = False
    """Whether it is the graph of an agent that has a name."""
    call: _Call | None = None
    is_over: bool = False


@dataclass(frozen=True)
class _Place:
    """A run that is worked on in a context, and what that context held before."""

    run: Run
    before: otel_context.Context
    outer: "_Place | None"


_here: ContextVar[_Place | None] = ContextVar("agentlightning_langchain_place", default=None)


def _place_of(run: Run) -> _Place | None:
    """Where a run is worked on, if that is here."""
    place = _here.get()
    while place is not None and place.run is not run:
        place = place.outer
    return place


def enter(run: Run) -> None:
    """What begins in this context from now on lies beneath this run; harmless where it does already."""
    if _place_of(run) is not None:
        return
    _here.set(_Place(run, otel_context.get_current(), _here.get()))
    otel_context.attach(trace.set_span_in_context(run.step.span))
    if run.call is not None:
        run.call.watch.open()


def leave(run: Run) -> None:
    """Make current what was current before; harmless where the run is not worked on."""
    place = _place_of(run)
    if place is not None:
        _here.set(place.outer)
        otel_context.attach(place.before)
    if run.call is not None:
        run.call.watch.close()


def _leave_what_is_over() -> None:
    """Leave runs that ended in another context than they began in."""
    place = _here.get()
    while place is not None and place.run.is_over and trace.get_current_span() is place.run.step.span:
        leave(place.run)
        place = place.outer


@contextmanager
def place_kept() -> Iterator[None]:
    """Leave whatever is entered inside: callbacks that tell of an end may be called in other tasks."""
    place, before, watches = _here.get(), otel_context.get_current(), WATCHES.get()
    try:
        yield
    finally:
        if _here.get() is not place:
            _here.set(place)
            otel_context.attach(before)
            WATCHES.set(watches)


# ---------------------------------------------------------------------- callbacks become steps


def _callback(method: Callable[..., None]) -> Callable[..., None]:
    """A method that LangChain calls: a mistake of ours in it is logged."""

    @functools.wraps(method)
    def call(*args: object, **kwargs: object) -> None:
        with guarded(_LANGCHAIN):
            method(*args, **kwargs)

    return call


class Recorder:
    """Follows the runs of the process; to be mixed with LangChain's class of handlers."""

    run_inline = True  # asynchronous code calls others in threads or tasks, where no context can be changed
    raise_error = False

    def __init__(self) -> None:
        self.is_on = True
        """Runs that began before it was switched off are followed to their end."""
        self._runs: dict[UUID, Run | None] = {}
        """Open runs by id; the run above, for those that have no step of their own."""

    def run_of(self, run_id: UUID | None) -> Run | None:
        return None if run_id is None else self._runs.get(run_id)

    def _above(self, beginning: _Beginning) -> tuple[Run | None, Step | None]:
        """The run above a new one, and its step where the context does not say it already."""
        _leave_what_is_over()
        run, place = self.run_of(beginning.parent_run_id), _here.get()
        if run is None or _place_of(run) is not None:
            return None if place is None else place.run, None
        return run, run.step

    def _begin(self, run: Run, *, is_current: bool = True) -> None:
        self._runs[run.id] = run
        if is_current:
            enter(run)

    def _end(
        self,
        run_id: UUID,
        error: BaseException | str | None = None,
        describe: Callable[[Run], Mapping[str, AttributeValue]] | None = None,
    ) -> None:
        """End a run, with what is known of it now."""
        run = self._runs.pop(run_id, None)
        if run is None or run.id != run_id:
            return
        if describe is not None:
            with guarded(_LANGCHAIN):
                run.step.set(describe(run))
        run.is_over = True
        leave(run)
        # A reader who leaves a stream, and how LangGraph passes interrupts and commands upwards.
        is_harmless = isinstance(error, BaseException) and any(
            k.__name__ in {"GeneratorExit", "GraphBubbleUp"} for k in type(error).__mro__
        )
        run.step.end(error=None if is_harmless else error)

    @_callback
    def _fail(self, error: BaseException, *, run_id: UUID, **kwargs: object) -> None:
        self._end(run_id, error)

    on_chain_error = on_tool_error = on_retriever_error = _fail

    @_callback
    def on_chain_start(self, serialized: object, inputs: object, *, run_id: UUID, **kwargs: object) -> None:
        if not self.is_on:
            return
        chain = _Beginning.of(serialized, kwargs)
        above, parent = self._above(chain)
        is_root = chain.parent_run_id not in self._runs
        is_agent = chain.agent is not None and (above is None or above.beginning.agent != chain.agent)
        is_node = chain.node[0] == chain.name and (above is None or above.beginning.node != chain.node)
        is_unit = is_root or is_agent or is_node or not chain.is_part
        if chain.is_hidden or not is_unit or is_suppressed():
            self._runs[run_id] = above
            return
        is_graph = chain.metadata.get("ls_integration") in ("langgraph", "langchain_create_agent")
        is_named_graph = is_graph and chain.name != "LangGraph"
        attributes: dict[str, AttributeValue] = {"langchain.chain.name": chain.name}
        if is_agent:
            attributes[_AGENT] = str(chain.agent)
        elif (is_node and not (above is not None and above.is_agent)) or (is_root and is_named_graph):
            attributes[_AGENT] = chain.name
        step = Step(f"{chain.name}.chain", attributes, parent=parent)
        self._begin(Run(run_id, step, chain, is_agent), is_current=is_node)

    @_callback
    def on_chain_end(self, outputs: object, *, run_id: UUID, **kwargs: object) -> None:
        self._end(run_id)

    @_callback
    def on_agent_action(self, action: object, *, run_id: UUID, **kwargs: object) -> None:
        """Only an agent acts and finishes: the chain that does is one."""
        run = self.run_of(run_id)
        if run is not None and run.id == run_id:
            run.step.set({_AGENT: run.beginning.name})

    on_agent_finish = on_agent_action

    @_callback
    def on_chat_model_start(self, serialized: Any, messages: Any, **kwargs: Any) -> None:
        self.on_llm_start(serialized, messages[0], **kwargs)

    @_callback
    def on_llm_start(self, serialized: Any, prompts: Sequence[Any], *, run_id: UUID, **kwargs: Any) -> None:
        if not self.is_on or is_suppressed():
            return
        beginning = _Beginning.of(serialized, kwargs)
        above, parent = self._above(beginning)
        if above is not None and above.call is not None:  # a model made of another, which records the call
            above.call.watch.has_seen = True
        step = Step("chat_model.llm", {"langchain.llm.name": beginning.name}, parent=parent)
        run = Run(run_id, step, beginning, call=_Call(prompts, kwargs.get("invocation_params") or {}))
        # Of several that begin at once, each becomes current when its own turn comes.
        self._begin(run, is_current=kwargs.get("batch_size", 1) == 1)

    @_callback
    def on_llm_new_token(self, token: object, *, run_id: UUID, **kwargs: object) -> None:
        run = self._runs.get(run_id)
        if run is not None and run.call is not None and run.call.first_token_seconds is None:
            run.call.first_token_seconds = time.perf_counter() - run.call.began
            leave(run)  # before the first part of the answer is handed to its reader

    on_stream_event = on_llm_new_token

    @_callback
    def on_llm_end(self, response: object, *, run_id: UUID, **kwargs: object) -> None:
        self._end(run_id, None, functools.partial(_call_attributes, response))

    @_callback
    def on_llm_error(self, error: BaseException, *, run_id: UUID, **kwargs: object) -> None:
        self._end(run_id, error, functools.partial(_call_attributes, kwargs.get("response")))

    @_callback
    def on_tool_start(self, serialized: Any, input_str: str, *, run_id: UUID, **kwargs: Any) -> None:
        if not self.is_on or is_suppressed():
            return
        beginning = _Beginning.of(serialized, kwargs)
        _, parent = self._above(beginning)
        name = (serialized or {}).get("name") or beginning.name
        arguments = input_str if kwargs.get("inputs") is None else kwargs["inputs"]
        step = tool_step(name, arguments, call_id=kwargs.get("tool_call_id"), name="tool.tool", parent=parent)
        self._begin(Run(run_id, step, beginning))

    @_callback
    def on_tool_end(self, output: object, *, run_id: UUID, **kwargs: object) -> None:
        result = as_json(getattr(output, "content", output))
        # A tool may say in its answer to the model that it failed.
        error = result if getattr(output, "status", None) == "error" else None
        self._end(run_id, error, lambda _: {"tool.result": result})

    @_callback
    def on_retriever_start(self, serialized: object, query: str, *, run_id: UUID, **kwargs: object) -> None:
        if not self.is_on or is_suppressed():
            return
        beginning = _Beginning.of(serialized, kwargs)
        _, parent = self._above(beginning)
        attributes = {"langchain.retriever.name": beginning.name, "langchain.retriever.query": query}
        self._begin(Run(run_id, Step("retriever.retriever", attributes, parent=parent), beginning))

    @_callback
    def on_retriever_end(self, documents: object, *, run_id: UUID, **kwargs: object) -> None:
        self._end(run_id, None, lambda _: {"langchain.retriever.documents": as_json(documents)})


def _call_attributes(response: object, run: Run) -> dict[str, AttributeValue]:
    """The content of a call, if no layer below has recorded it."""
    call = run.call
    if call is None or call.watch.has_seen:
        return {}
    attributes = dialect.request_attributes(call.prompt, call.params, run.beginning.metadata)
    attributes |= dialect.response_attributes(response)
    if call.first_token_seconds is not None:
        attributes[TIME_TO_FIRST_TOKEN] = call.first_token_seconds
    return attributes


class LangChainPatch(Patch):
    """Records what LangChain and LangGraph run."""

    name = _LANGCHAIN
    module = "langchain_core.tracers.context"  # imported before the first run begins
    distribution = "langchain-core"

    def __init__(self) -> None:
        super().__init__()
        self.parts = (_ChatModelsPatch(self), _TextModelsPatch(self))
        self.recorder: Any = None
        """The handler; None until LangChain is imported."""

    def change(self, module: ModuleType) -> None:
        base = importlib.import_module("langchain_core.callbacks.base")
        # A config that is copied, or sent to another process, takes a handler along that does nothing.
        as_nothing = {"__reduce__": lambda _: (base.BaseCallbackHandler, ())}
        self.recorder = type("AgentLightningHandler", (Recorder, base.BaseCallbackHandler), as_nothing)()
        self.when_undone(lambda: setattr(self.recorder, "is_on", False))
        manager = importlib.import_module("langchain_core.callbacks.manager")
        self.replace(manager.AsyncCallbackManager, "on_llm_start", self._llm_starts)
        for kind in ("LLM", "Chain", "Tool", "Retriever"):
            owner = getattr(manager, f"AsyncCallbackManagerFor{kind}Run")
            self.replace(owner, f"on_{kind.lower()}_end", self._ends)
            self.replace(owner, f"on_{kind.lower()}_error", self._ends)
        config = importlib.import_module("langchain_core.runnables.config")
        if hasattr(config, "_set_config_context"):  # else what a lone function does lies beside it, not beneath
            self.replace(config, "_set_config_context", self._work_begins)
        everywhere = ContextVar("agentlightning_langchain", default=self.recorder)
        module.register_configure_hook(everywhere, inheritable=True)
        hook = next(hook for hook in module._configure_hooks if hook[0] is everywhere)
        self.when_undone(lambda: module._configure_hooks.remove(hook))

    async def _llm_starts(
        self, original: Original, manager: Any, serialized: Any, prompts: Any, *args: object, **kwargs: object
    ) -> Any:
        """LangChain tells only inline handlers, such as ours, if there is one: so the others are told without it."""
        others = [handler for handler in manager.handlers if handler is not self.recorder]
        if len(others) == len(manager.handlers) or any(handler.run_inline for handler in others):
            return await original(manager, serialized, prompts, *args, **kwargs)
        of_others = copy.copy(manager)
        of_others.handlers = others
        started = await original(of_others, serialized, prompts, *args, **kwargs)
        told = {"tags": manager.tags, "metadata": manager.metadata, "parent_run_id": manager.parent_run_id, **kwargs}
        with guarded(_LANGCHAIN):
            for run_manager, prompt in zip(started, prompts, strict=True):
                run_manager.handlers = manager.handlers
                self.recorder.on_llm_start(serialized, [prompt], **{**told, "run_id": run_manager.run_id})
        return started

    async def _ends(self, original: Original, manager: Any, *args: object, **kwargs: object) -> Any:
        """Some callbacks are called in a task of their own, which cannot leave the context of the run."""
        run = self.recorder.run_of(manager.run_id)
        try:
            return await original(manager, *args, **kwargs)
        finally:
            if run is not None and run.id == manager.run_id:
                leave(run)

    def _work_begins(self, original: Original, config: Any, *args: object) -> Any:
        """Called in the copy of the context in which a chain's work is done."""
        result = original(config, *args)
        with guarded(_LANGCHAIN):
            run = self.recorder.run_of(getattr(config.get("callbacks"), "parent_run_id", None))
            if run is not None:
                enter(run)
        return result


class _ModelsPatch(Patch):
    """Has each model call of one kind of models made in the context of its own run."""

    distribution = "langchain-core"
    model: ClassVar[str]
    """The class of the models."""
    maker: ClassVar[str]
    """The method that makes the calls of runs that have begun; it is not public, and without it several calls that
    begin at once lie beneath the last."""

    def __init__(self, langchain: LangChainPatch) -> None:
        super().__init__()
        self._langchain = langchain

    def change(self, module: ModuleType) -> None:
        model = getattr(module, self.model)
        for name in ("generate", "agenerate"):
            self.surround(model, name, _generate)
        makers = (f"_{self.maker}", f"_a{self.maker}")
        for name in makers if all(hasattr(model, maker) for maker in makers) else ():
            self.surround(model, name, self._make)

    @contextmanager
    def _make(self, _original: object, *args: object, **kwargs: object) -> Iterator[PatchedCall]:
        with place_kept():
            self._enter_first(args, kwargs)
            yield PatchedCall(args, kwargs)

    def _enter_first(self, args: Sequence[object], kwargs: dict[str, object]) -> None:
        """Several prompts of one call lie beneath the first run; what is seen there is seen for all."""
        recorder = self._langchain.recorder
        with guarded(_LANGCHAIN):
            managers = [manager for manager in self._managers(args, kwargs) if manager is not None and recorder]
            runs: list[Run] = [run for manager in managers if (run := recorder.run_of(manager.run_id)) is not None]
            for run in runs:
                if run.call is not None and runs[0].call is not None:
                    run.call.watch = runs[0].call.watch
            if runs:
                enter(runs[0])

    def _managers(self, args: Sequence[object], kwargs: dict[str, object]) -> Sequence[Any]:
        """Of the runs whose calls are made."""
        return [kwargs.get("run_manager")]


class _ChatModelsPatch(_ModelsPatch):
    name = "LangChain's chat models"
    module = "langchain_core.language_models.chat_models"
    model, maker = "BaseChatModel", "generate_with_cache"


class _TextModelsPatch(_ModelsPatch):
    name = "LangChain's text models"
    module = "langchain_core.language_models.llms"
    model, maker = "BaseLLM", "generate_helper"

    def _managers(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Sequence[Any]:
        _model, _prompts, _stop, managers, *_others = args
        return managers or ()


@contextmanager
def _generate(_original: object, *args: object, **kwargs: object) -> Iterator[PatchedCall]:
    with place_kept():
        yield PatchedCall(args, kwargs)
