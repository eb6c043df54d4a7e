"""LangChain and LangGraph, observed through LangChain's own callbacks.

Whenever something begins to run, LangChain asks its configure hooks for handlers, so ours needs no place in the user's
code. The other changes see to it that a handler's change to the context reaches the work it is meant for, and only
that: asynchronous runs tell of their end in tasks of their own, and of several model calls that begin at once each is
made in its turn.
"""

import copy
import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType
from typing import Any, ClassVar

from agentlightning.instrumentation.frameworks.langchain_runs import LANGCHAIN, Recorder, Run, enter, leave, place_kept
from agentlightning.instrumentation.patch import Original, Patch, PatchedCall, guarded


class LangChainPatch(Patch):
    """Records what LangChain and LangGraph run."""

    name = LANGCHAIN
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
        with guarded(LANGCHAIN):
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
        with guarded(LANGCHAIN):
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
        with guarded(LANGCHAIN):
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
