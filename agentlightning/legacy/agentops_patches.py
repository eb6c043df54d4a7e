"""AgentOps beside us: its decorators write to the provider of this process, and its service is not contacted.

`agentops.init` would fetch a token, install a provider that exports to AgentOps' service, and apply instrumentors for
libraries that we record ourselves. All that its decorators and its other instrumentors need is a tracing core with a
provider, so the core is given ours. A program that has started AgentOps itself keeps what it has set up; only what
would reach the service is withheld. A model call that AgentOps' own instrumentor has begun a span for is left to it,
and that span gets the token ids and log-probabilities that training needs, so that a call is one span either way.
"""

import functools
import importlib
import logging
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Final

from opentelemetry import trace

from agentlightning.dialects import OPENAI_DIALECTS, Assembler
from agentlightning.dialects.attributes import LOGPROBS, PROMPT_IDS, REFUSAL_LOGPROBS, RESPONSE_IDS
from agentlightning.instrumentation.imports import is_installed
from agentlightning.instrumentation.patch import Foreign, Original, Patch
from agentlightning.instrumentation.registry import Instrumentation
from agentlightning.instrumentation.steps import guarded
from agentlightning.utils.json_values import JsonMapping

logger = logging.getLogger(__name__)

RECORDED_BY_US: Final = frozenset({"openai", "anthropic", "crewai", "autogen", "agents", "smolagents", "langgraph"})
"""Libraries, by the names AgentOps knows them, whose calls would become two spans each."""
_TABLES: Final = ("PROVIDERS", "AGENTIC_LIBRARIES", "TARGET_PACKAGES")
_CONFIG: Final = {"service_name": "agentlightning", "api_key": None, "project_id": None}
_TOKEN: Final = {"token": "dummy", "project_id": "dummy"}

_CHAT: Final = OPENAI_DIALECTS["/chat/completions"]
_ADDED: Final = (PROMPT_IDS, RESPONSE_IDS, LOGPROBS, REFUSAL_LOGPROBS)
_ASSEMBLER: Final = "_agentlightning_assembler"
"""Under which name a stream of AgentOps' keeps what was read of it."""
_HANDLER: Final = "agentops.integration.callbacks.langchain"
_NATIVE: Final = "langgraph"


@functools.cache
def _service() -> threading.Event:
    """Set while AgentOps' hosted service may be contacted though AgentOps is managed."""
    return threading.Event()


@functools.cache
def agentops_management() -> Instrumentation:
    """AgentOps adopted, and its service out of reach, for as long as a tracer of this process wants it."""
    return Instrumentation((_Offline(), _Adoption()))


@functools.cache
def agentops_instrumentors() -> Instrumentation:
    """AgentOps' instrumentors for the libraries that only it knows, for as long as a tracer wants them."""
    return Instrumentation((_ForeignInstrumentors(),))


class _BorrowedProvider(trace.TracerProvider):
    """A provider that AgentOps may use, but not shut down, which it does when the process ends."""

    def __init__(self, provider: Foreign) -> None:
        self._provider = provider

    def get_tracer(self, *args: object, **kwargs: object) -> trace.Tracer:
        tracer: trace.Tracer = self._provider.get_tracer(*args, **kwargs)
        return tracer

    def shutdown(self) -> None:
        """Nothing: it is not AgentOps' to end."""

    def __getattr__(self, name: str) -> Foreign:
        return getattr(self._provider, name)


class _StatePatch(Patch):
    """A patch of what AgentOps keeps in attributes."""

    name = "AgentOps"
    module = "agentops"

    def set(self, owner: Foreign, **values: Foreign) -> None:
        """Give attributes values until the patch is undone; those that the program sets meanwhile stay."""
        befores = {attribute: getattr(owner, attribute) for attribute in values}

        def put_back() -> None:
            for attribute, value in values.items():
                if getattr(owner, attribute) is value:
                    setattr(owner, attribute, befores[attribute])

        for attribute, value in values.items():
            setattr(owner, attribute, value)
        self.when_undone(put_back)


class _Adoption(_StatePatch):
    """Gives AgentOps' tracing core the provider of this process, unless the program has started AgentOps."""

    def change(self, module: ModuleType) -> None:
        core = importlib.import_module("agentops.sdk.core").tracer
        client = module.get_client()
        if core.initialized:
            logger.info("The program has started AgentOps itself; it is left as it is.")
            return
        provider, config = _BorrowedProvider(trace.get_tracer_provider()), core._config or dict(_CONFIG)
        self.set(core, provider=provider, _config=config, _initialized=True)
        self.set(client, _initialized=True)
        self.set(client.config, log_session_replay_url=False)  # there will be nothing to see at that address


class _ForeignInstrumentors(_StatePatch):
    """Applies AgentOps' instrumentors where it was adopted, except for libraries that we record."""

    def change(self, module: ModuleType) -> None:
        core = importlib.import_module("agentops.sdk.core").tracer
        if not isinstance(core.provider, _BorrowedProvider):
            return
        instrumentation = importlib.import_module("agentops.instrumentation")
        for table in _TABLES:
            self.set(instrumentation, **{table: _without_ours(getattr(instrumentation, table))})
        # Its hook costs something at every import, so it is not set for nothing.
        if any(is_installed(package) for package in instrumentation.TARGET_PACKAGES):
            instrumentation.instrument_all()
            self.when_undone(instrumentation.uninstrument_all)


def _without_ours(table: Foreign) -> Foreign:
    if isinstance(table, dict):
        return {name: value for name, value in table.items() if name not in RECORDED_BY_US}
    return set(table) - RECORDED_BY_US


class _Offline(_StatePatch):
    """Withholds what AgentOps would send to its service, while that is not enabled."""

    def change(self, module: ModuleType) -> None:
        exporters = importlib.import_module("agentops.sdk.exporters")
        versions = importlib.import_module("agentops.client.api.versions.v3")
        uploads = importlib.import_module("agentops.client.api.versions.v4")
        core = importlib.import_module("agentops.sdk.core")
        export_result = importlib.import_module("opentelemetry.sdk.trace.export").SpanExportResult
        metric_result = importlib.import_module("opentelemetry.sdk.metrics.export").MetricExportResult

        def is_agentops(exporter: Foreign) -> bool:
            endpoint = (core.tracer._config or {}).get("metrics_endpoint")
            return endpoint is not None and getattr(exporter, "_endpoint", None) == endpoint

        self.replace(exporters.AuthenticatedOTLPExporter, "export", _withheld(export_result.SUCCESS))
        self.replace(core.OTLPMetricExporter, "export", _withheld(metric_result.SUCCESS, is_agentops))
        self.replace(versions.V3Client, "fetch_auth_token", _fetch_no_token)
        self.replace(uploads.V4Client, "upload_object", _withheld({}))
        self.replace(uploads.V4Client, "upload_logfile", _withheld({}))


def _withheld(result: Foreign, concerns: Callable[[Foreign], bool] = lambda owner: True) -> Callable[..., Foreign]:
    """A wrapper that gives a result without making the call."""

    def wrapper(original: Original, owner: Foreign, *args: object, **kwargs: object) -> Foreign:
        if _service().is_set() or not concerns(owner):
            return original(owner, *args, **kwargs)
        return result

    return wrapper


async def _fetch_no_token(original: Original, client: Foreign, api_key: str) -> Foreign:
    return await original(client, api_key) if _service().is_set() else dict(_TOKEN)


# ---------------------------------------------------------------------- spans of OpenAI's chats


class AgentOpsPatch(Patch):
    """Adds `prompt_token_ids`, `response_token_ids`, `logprobs.content` and `logprobs.refusal` to AgentOps' spans."""

    name = "AgentOps"
    module = "agentops.instrumentation.providers.openai.stream_wrapper"
    distribution = "agentops"

    def change(self, module: ModuleType) -> None:
        wrappers = importlib.import_module("agentops.instrumentation.providers.openai.wrappers.chat")
        for place in (wrappers, module):
            self.replace(place, "handle_chat_attributes", _with_tokens)
        for stream in (module.OpenaiStreamWrapper, module.OpenAIAsyncStreamWrapper):
            self.replace(stream, "_process_chunk", _note_chunk)
            self.replace(stream, "_finalize_stream", _finish_stream)


def _with_tokens(original: Original, *args: Foreign, **kwargs: Foreign) -> Foreign:
    """AgentOps' attributes of a chat, and ours of its answer."""
    response = kwargs.get("return_value", args[2] if len(args) > 2 else None)
    attributes = original(*args, **kwargs)
    if response is not None:
        with guarded("AgentOps"):
            parsed = response.parse() if hasattr(response, "http_response") else response  # of a raw response
            attributes |= _tokens_of(parsed)
    return attributes


def _tokens_of(response: Foreign) -> JsonMapping:
    attributes = _CHAT.response_attributes(response)
    return {name: attributes[name] for name in _ADDED if name in attributes}


def _note_chunk(original: Original, stream: Foreign, chunk: Foreign) -> Foreign:
    with guarded("AgentOps"):
        if _ASSEMBLER not in vars(stream):
            assert _CHAT.assembler is not None
            setattr(stream, _ASSEMBLER, _CHAT.assembler())
        getattr(stream, _ASSEMBLER).add(chunk.to_dict())
    return original(stream, chunk)


def _finish_stream(original: Original, stream: Foreign) -> Foreign:
    with guarded("AgentOps"):
        assembler: Assembler | None = vars(stream).get(_ASSEMBLER)
        if assembler is not None:
            stream._span.set_attributes(_tokens_of(assembler.response()))
    return original(stream)


@functools.cache
def _chat_patch() -> AgentOpsPatch:
    """One for the process, as the package is."""
    return AgentOpsPatch()


def instrument_agentops() -> bool:
    """Have AgentOps' spans of OpenAI's chats carry token ids and log-probabilities.

    True if the package is installed; a second call warns and changes nothing. Versions up to 0.4.13 are not known, and
    left as they are. `instrument_all` does this too.
    """
    return _chat_patch().turn_on()


def uninstrument_agentops() -> None:
    """Undo `instrument_agentops`; harmless if it was not called."""
    _chat_patch().undo()


def enable_agentops_service(enabled: bool = True) -> None:
    """Say whether AgentOps' hosted service may be contacted while `AgentOpsTracer` manages AgentOps; it may not, at
    first.

    It matters to a program that starts AgentOps itself, with a key of its own: what that exports is withheld unless
    this was called.
    """
    (_service().set if enabled else _service().clear)()


# ---------------------------------------------------------------------- the handler of LangChain's callbacks


class AgentOpsLangchainPatch(_StatePatch):
    """Takes away AgentOps' own instrumentor of LangGraph, and has its handler record chains by name."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = (_HandlerPatch(),)

    def change(self, module: ModuleType) -> None:
        instrumentation = importlib.import_module("agentops.instrumentation")
        known = instrumentation.AGENTIC_LIBRARIES
        self.set(instrumentation, AGENTIC_LIBRARIES={name: known[name] for name in known if name != _NATIVE})


class _HandlerPatch(Patch):
    name = "AgentOps' handler for LangChain"
    module = f"{_HANDLER}.callback"
    distribution = "agentops"

    def change(self, module: ModuleType) -> None:
        self.replace(module.LangchainCallbackHandler, "on_chain_start", _start_chain)


def _start_chain(
    original: Original, handler: Foreign, serialized: Foreign, inputs: Foreign, **kwargs: object
) -> Foreign:
    """LangChain says what a chain is called beside its serialized form, where AgentOps looks for the name."""
    name = kwargs.get("name")
    if name is not None:
        serialized = {**(serialized or {}), "name": name}
        if kwargs.get("run_id") is not None:
            serialized["id"] = str(kwargs["run_id"])
    return original(handler, serialized, inputs, **kwargs)


@functools.cache
def _langchain_patch() -> AgentOpsLangchainPatch:
    """One for the process, as the package is."""
    return AgentOpsLangchainPatch()


def instrument_agentops_langchain() -> bool:
    """Have AgentOps' handler record the names of chains, and LangGraph through it alone.

    True if AgentOps is installed; a second call warns and changes nothing. `instrument_all` does this too.
    """
    return _langchain_patch().turn_on()


def uninstrument_agentops_langchain() -> None:
    """Undo `instrument_agentops_langchain`; harmless if it was not called."""
    _langchain_patch().undo()


def langchain_handler(tags: list[str], *, is_quiet: bool) -> Foreign:
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
