"""AgentOps beside us: what its decorators and its handler for LangChain write is recorded, and goes to no service.

`agentops.init` would fetch a token, export to AgentOps' service and apply instrumentors for libraries that we record
ourselves. Its decorators write to the provider of this process as soon as they are told that AgentOps was started, so
that is all they are told. A program that has started AgentOps itself keeps what it has set up; only its spans and logs
are withheld from the service, unless it wants them there.
"""

import functools
import importlib
import logging
import threading
from types import ModuleType

from opentelemetry.sdk.trace.export import SpanExportResult

from agentlightning.instrumentation.patch import Foreign, Original, Patch, Wrapper
from agentlightning.instrumentation.registry import Instrumentation

logger = logging.getLogger(__name__)


class AgentOpsPatch(Patch):
    """Has AgentOps take itself for started, unless the program has started it, and send nothing."""

    name = "AgentOps"
    module = "agentops"

    def change(self, module: ModuleType) -> None:
        exporters = importlib.import_module("agentops.sdk.exporters")
        uploads = importlib.import_module("agentops.client.api.versions.v4")
        self.replace(exporters.AuthenticatedOTLPExporter, "export", _withheld(SpanExportResult.SUCCESS))
        self.replace(uploads.V4Client, "upload_logfile", _withheld({}))
        core, client = importlib.import_module("agentops.sdk.core").tracer, module.get_client()
        if core.initialized:
            logger.info("The program has started AgentOps itself; it is left as it is.")
            return

        def mark(*, started: bool) -> None:
            core._initialized = client.initialized = started
            client.config.log_session_replay_url = not started  # there will be nothing to see at that address

        mark(started=True)
        self.when_undone(functools.partial(mark, started=False))


@functools.cache
def _service() -> threading.Event:
    """Set while AgentOps' hosted service may get what a program of its own exports."""
    return threading.Event()


def _withheld(result: Foreign) -> Wrapper:
    """A wrapper that gives a result without making the call, while the service may not be contacted."""

    def wrapper(original: Original, *args: object) -> Foreign:
        return original(*args) if _service().is_set() else result

    return wrapper


@functools.cache
def agentops_management() -> Instrumentation:
    """AgentOps started without its service, for as long as a tracer of this process wants it."""
    return Instrumentation((AgentOpsPatch(),))


@functools.cache
def _by_hand() -> AgentOpsPatch:
    """One for the process, as the package is."""
    return AgentOpsPatch()


def instrument_agentops() -> bool:
    """Have what AgentOps' decorators write recorded, without its service, as `AgentOpsTracer` does.

    True if the package is installed; a second call warns and changes nothing.
    """
    return _by_hand().turn_on()


def uninstrument_agentops() -> None:
    """Undo `instrument_agentops`; harmless if it was not called."""
    _by_hand().undo()


def enable_agentops_service(enabled: bool = True) -> None:
    """Say whether AgentOps' hosted service may get what is exported while `AgentOpsTracer` manages AgentOps; it may
    not, at first.

    It matters to a program that starts AgentOps itself, with a key of its own, before its tracer.
    """
    (_service().set if enabled else _service().clear)()


def langchain_handler(tags: list[str], *, is_quiet: bool) -> Foreign:
    """A handler of AgentOps'; ImportError where AgentOps or LangChain is missing.

    Args:
        is_quiet: It records nothing, because LangChain is recorded without it.
    """
    kind = importlib.import_module("agentops.integration.callbacks.langchain").LangchainCallbackHandler
    api_key = importlib.import_module("agentops").get_client().config.api_key or "dummy"
    if is_quiet:
        ignored = ("llm", "chain", "agent", "retriever", "chat_model", "retry", "custom_event")
        kind = type(kind.__name__, (kind,), {f"ignore_{what}": True for what in ignored})
    return kind(api_key=api_key, tags=tags, auto_session=False)  # a session would start AgentOps with its service
