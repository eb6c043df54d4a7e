"""AgentOps' handler of LangChain's callbacks: chains get their names, and nothing is recorded twice."""

import functools
import importlib
from types import ModuleType
from typing import Any, Final

from agentlightning.instrumentation.agentops_adoption import AgentOpsStatePatch
from agentlightning.instrumentation.patch import Patch
from agentlightning.instrumentation.switch import Switch

__all__ = [
    "AgentOpsLangchainPatch",
    "instrument_agentops_langchain",
    "langchain_handler",
    "uninstrument_agentops_langchain",
]

_HANDLER: Final = "agentops.integration.callbacks.langchain"
_NATIVE: Final = "langgraph"


class AgentOpsLangchainPatch(AgentOpsStatePatch):
    """Takes away AgentOps' own instrumentor of LangGraph, and has its handler record chains by name."""

    def __init__(self) -> None:
        super().__init__()
        self._handler = _HandlerPatch()

    def change(self, module: ModuleType) -> None:
        instrumentation = importlib.import_module("agentops.instrumentation")
        known = instrumentation.AGENTIC_LIBRARIES
        self.set(instrumentation, AGENTIC_LIBRARIES={name: known[name] for name in known if name != _NATIVE})
        self.when_undone(self._handler.undo)
        self._handler.apply()


class _HandlerPatch(Patch):
    name = "AgentOps' handler for LangChain"
    module = f"{_HANDLER}.callback"
    distribution = "agentops"

    def change(self, module: ModuleType) -> None:
        self.replace(module.LangchainCallbackHandler, "on_chain_start", _start_chain)


def _start_chain(original: Any, handler: Any, serialized: Any, inputs: Any, **kwargs: Any) -> Any:
    """LangChain says what a chain is called beside its serialized form, where AgentOps looks for the name."""
    name = kwargs.get("name")
    if name is not None:
        serialized = {**(serialized or {}), "name": name}
        if kwargs.get("run_id") is not None:
            serialized["id"] = str(kwargs["run_id"])
    return original(handler, serialized, inputs, **kwargs)


@functools.cache
def _switch() -> Switch:
    """One for the process, as the package is."""
    return Switch(AgentOpsLangchainPatch())


def instrument_agentops_langchain() -> bool:
    """Have AgentOps' handler record the names of chains, and LangGraph through it alone.

    True if AgentOps is installed; a second call warns and changes nothing. `instrument_all` does this too.
    """
    return _switch().turn_on()


def uninstrument_agentops_langchain() -> None:
    """Undo `instrument_agentops_langchain`; harmless if it was not called."""
    _switch().turn_off()


def langchain_handler(tags: list[str], *, is_quiet: bool) -> Any:
    """A handler of AgentOps'; ImportError where AgentOps or LangChain is missing.

    Args:
        is_quiet: It records nothing, because LangChain is recorded without it.
    """
    kind = importlib.import_module(_HANDLER).LangchainCallbackHandler
    api_key = importlib.import_module("agentops").get_client().config.api_key or "dummy"
    if is_quiet:
        return _quiet(kind)(api_key=api_key, tags=tags, auto_session=False)
    is_started = importlib.import_module("agentops.sdk.core").tracer.initialized
    return kind(api_key=api_key, tags=tags, auto_session=is_started)  # otherwise it would start AgentOps' service


@functools.cache
def _quiet(kind: type) -> type:
    """A kind of handler to which LangChain tells nothing."""
    ignored = ("llm", "chain", "agent", "retriever", "chat_model", "retry", "custom_event")
    return type(kind.__name__, (kind,), {f"ignore_{what}": True for what in ignored})
