"""LiteLLM as a library: model calls that do not go through a model's SDK.

Calls of many providers leave through LiteLLM's own HTTP handlers. There they are recorded as they were sent and
answered, in the dialects we know: what LiteLLM makes of an answer lacks some token ids. Other dialects are recorded
one layer above, from what LiteLLM translated: the functions behind `completion`, `embedding` and `responses`, which its
public functions look up in their closures, so that it does not matter who imported them, and when. LiteLLM's callbacks
would come too late, and on other threads.

Whatever the provider, a chat is one span `openai.chat.completion`, with the provider as `gen_ai.system`. A call that a
layer below has recorded, an SDK or the HTTP handlers, is not recorded again.

Where a router says where calls go, what carries a prompt goes there, or fails. Calls in OpenAI's or Anthropic's shape
are sent elsewhere where they leave, in the SDKs or in `_redirected_post`. Chats of other providers become calls of
OpenAI's SDK before LiteLLM translates them (`_redirected_arguments`). Images, speech and embeddings of another model
cannot be answered by the model of a rollout: they raise, unless the model is excluded.

`instrument_litellm` is for the spans that LiteLLM itself exports: it adds token ids to them.
"""

import dataclasses
import functools
import importlib
import inspect
import sys
import time
import weakref
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from types import CellType, ModuleType
from typing import Any, Final, Literal

import orjson

from agentlightning.dialects import ANTHROPIC_DIALECTS, COUNT_TOKENS_PATH, OPENAI_DIALECTS, Dialect, dialect_of
from agentlightning.dialects.attributes import field, items, plain_text, response_ids
from agentlightning.errors import ConfigurationError
from agentlightning.instrumentation.model_calls import WATCHES, CallRecording, CallWatch, read_along
from agentlightning.instrumentation.patch import Original, Patch, PatchedCall, guarded, is_suppressed
from agentlightning.instrumentation.redirect import (
    PLACEHOLDER_KEY,
    ModelRequest,
    Router,
    Target,
    current_router,
    excluded,
    is_secret,
    parent_header,
    rewritten,
    target_of,
)

_CHAT_PATH: Final = "/chat/completions"
_EMBEDDINGS_PATH: Final = "/embeddings"
_IN_SHAPE: Final = frozenset({"openai", "azure", "anthropic", "hosted_vllm", "custom_openai", "text-completion-openai"})
"""Providers whose calls leave in OpenAI's or Anthropic's shape, so that the layers below send them elsewhere."""
_OF_PROVIDER: Final = frozenset(
    {"api_base", "base_url", "api_version", "azure", "client", "deployment_id", "organization", "shared_session"}
)
"""Arguments that lead to the provider of a call."""
_NOT_SENT: Final = ("mock_response", "mock_tool_calls", "mock_timeout")
"""Arguments with which LiteLLM answers by itself."""
_CHAT: Final = OPENAI_DIALECTS[_CHAT_PATH]
_FUNCTIONS: Final = (
    ("litellm.main", "completion", _CHAT_PATH),
    ("litellm.main", "embedding", _EMBEDDINGS_PATH),
    ("litellm.responses.main", "responses", "/responses"),
)
"""Through which all calls go, also those of asynchronous functions and of routers, and what they speak."""
_OTHER_FUNCTIONS: Final = (
    ("litellm.main", "speech"),
    ("litellm.main", "transcription"),
    ("litellm.images.main", "image_generation"),
    ("litellm.images.main", "image_edit"),
    ("litellm.images.main", "image_variation"),
    ("litellm.rerank_api.main", "rerank"),
    ("litellm.videos.main", "video_generation"),
    ("litellm.google_genai.main", "generate_content"),
    ("litellm.google_genai.main", "generate_content_stream"),
)
"""Which also carry what a user wrote; not every release has them all."""
_SENT_DIALECTS: Final = OPENAI_DIALECTS | {
    path: dialect.recorded_as(_CHAT.span_name) for path, dialect in ANTHROPIC_DIALECTS.items()
}
_CALL: Final = "_agentlightning_call"
"""Under which name a stream keeps its call."""


class LiteLLMPatch(Patch):
    """Records model calls made with LiteLLM, and sends them where the router of their context says."""

    name = "LiteLLM"
    module = "litellm"

    def __init__(self, *, records: bool = True) -> None:
        """Nothing is changed yet.

        Args:
            records: False only sends requests where they are to go.
        """
        super().__init__()
        self._records = records

    def change(self, module: ModuleType) -> None:
        handlers = importlib.import_module("litellm.llms.custom_httpx.http_handler")
        for name, function, path in _FUNCTIONS:
            called = functools.partial(_called, path, records=self._records)
            self._replace_within(getattr(importlib.import_module(name), function), called)
        for name, function in _OTHER_FUNCTIONS:
            decorated = getattr(sys.modules.get(name), function, None)
            if decorated is not None:
                self._replace_within(decorated, _called_other)
        for handler in (handlers.HTTPHandler, handlers.AsyncHTTPHandler):
            self.surround(handler, "post", functools.partial(_post, self._records))
        for name in ("__next__", "__anext__") if self._records else ():
            self.surround(module.CustomStreamWrapper, name, _next_chunk)

    def _replace_within(self, decorated: Any, called: Callable[..., Any]) -> None:
        """Have the function that a decorator of LiteLLM's holds on to called by us, with its arguments by name."""
        cell: CellType = decorated.__closure__[decorated.__code__.co_freevars.index("original_function")]
        original = cell.cell_contents
        names = tuple(inspect.signature(original).parameters)

        @functools.wraps(original)
        def replaced(*args: object, **kwargs: object) -> Any:
            return called(original, {**dict(zip(names, args, strict=False)), **kwargs})

        def undo() -> None:
            if cell.cell_contents is replaced:
                cell.cell_contents = original

        cell.cell_contents = replaced
        self.when_undone(undo)


def _called(path: str, original: Original, arguments: dict[str, object], *, records: bool) -> Any:
    """A call in one of OpenAI's dialects, recorded and sent where it is to go."""
    sent = _redirected_arguments(path, arguments) or arguments
    if not records or is_suppressed():
        return original(**sent)
    return _watched(original, _Request(OPENAI_DIALECTS[path], arguments), sent)


def _called_other(original: Original, arguments: dict[str, object]) -> Any:
    _refuse_redirect(arguments)
    return original(**arguments)


def _provider(logging: object) -> str:
    """The provider, as LiteLLM's own record of the call has it."""
    details = field(logging, "model_call_details")
    return str(field(details, "custom_llm_provider") or "litellm")


# ---------------------------------------------------------------------- requests as they are sent


@contextmanager
def _post(
    records: bool, original: Original, handler: object, url: str, *args: object, **kwargs: object
) -> Iterator[PatchedCall]:
    post = _redirected_post(original, handler, _Post(str(url), args, kwargs))
    call = _begun(post) if records else None
    made = PatchedCall((handler, post.url, *post.args), post.kwargs)
    try:
        yield made
    except BaseException as error:
        if call is not None:
            call.finish(error=error)
        raise
    if call is not None:
        with guarded(LiteLLMPatch.name):
            read_along(call, made.result)


def _begun(post: "_Post") -> CallRecording | None:
    """A call that is about to be sent; None if it is none, or none in a dialect we know."""
    dialect = dialect_of(post.url, _SENT_DIALECTS)
    if dialect is None or is_suppressed():
        return None
    with guarded(LiteLLMPatch.name):
        body = post.body()
        if body is not None:
            watch = next((watch for watch in reversed(WATCHES.get()) if isinstance(watch, _Watch)), None)
            logging = post.kwargs.get("logging_obj") or field(watch, "logging")
            attributes = {"gen_ai.system": _provider(logging), "server.address": post.url, **post.attributes}
            if post.requested_model is not None:
                attributes["agentlightning.requested_model"] = post.requested_model
            call = CallRecording(dialect, body, attributes=attributes)
            if watch is not None:
                watch.last_sent = call
            if post.requested_model is not None:
                post.kwargs["headers"] |= parent_header(call.step.span)
            return call
    return None


# ---------------------------------------------------------------------- calls as LiteLLM translates them


class _Request:
    """A call that has begun, of which it is not known yet whether a layer below will record it."""

    def __init__(self, dialect: Dialect, body: Mapping[str, Any]) -> None:
        self.dialect = dialect
        # Lists are copied because some providers take messages out of theirs.
        self.body = {name: list(value) if isinstance(value, list) else value for name, value in body.items()}
        self.start_time_ns = time.time_ns()

    def translated(self) -> CallRecording:
        """The span of a call that no layer below has recorded, made when it returns; a stream goes on from there."""
        provider = _provider(self.body.get("litellm_logging_obj"))
        attributes = {"gen_ai.system": provider, **_excluded_attributes(self.body)}
        return CallRecording(self.dialect, self.body, attributes=attributes, start_time_ns=self.start_time_ns)


class _Watch(CallWatch):
    """Also knows LiteLLM's own record of the call, and which of the calls it saw was sent last."""

    def __init__(self, request: _Request) -> None:
        super().__init__()
        self.logging = request.body.get("litellm_logging_obj")
        self.last_sent: CallRecording | None = None


@contextmanager
def _watching(request: _Request, *, has_seen: bool = False) -> Iterator[_Watch]:
    with _Watch(request) as watch:
        watch.has_seen = has_seen
        try:
            yield watch
        except BaseException as error:
            _record(watch, request, error=error)
            raise


def _watched(original: Original, request: _Request, arguments: dict[str, object]) -> Any:
    with _watching(request) as watch:
        result = original(**arguments)
    if inspect.iscoroutine(result):
        return _awaited(result, request, watch)
    _record(watch, request, result)
    return result


async def _awaited(pending: Coroutine[object, object, object], request: _Request, sent: CallWatch) -> Any:
    """What an asynchronous call returns; its request may have been recorded when it was prepared."""
    with _watching(request, has_seen=sent.has_seen) as watch:
        result = await pending
    _record(watch, request, result)
    return result


def _record(watch: _Watch, request: _Request, result: object = None, *, error: BaseException | None = None) -> None:
    with guarded(LiteLLMPatch.name):
        was_recorded = watch.has_seen  # read now: the watch sees a call that begins here too
        call = watch.last_sent if was_recorded else request.translated()
        if error is None and (hasattr(result, "__next__") or hasattr(result, "__anext__")):
            if call is not None:  # it is finished when its stream ends, or is thrown away
                vars(result)[_CALL] = _StreamedCall(call, takes_chunks=not was_recorded)
                weakref.finalize(result, call.finish, is_cut=True).atexit = False
        elif call is not None and not was_recorded:
            call.finish(result, error=error)


@dataclasses.dataclass(frozen=True)
class _StreamedCall:
    call: CallRecording
    takes_chunks: bool
    """False if the body is recorded as it is read, which LiteLLM does not always do to the end."""


@contextmanager
def _next_chunk(_original: object, stream: object) -> Iterator[PatchedCall]:
    streamed: _StreamedCall | None = vars(stream).get(_CALL)
    made = PatchedCall((stream,))
    try:
        yield made
    except BaseException as error:
        if streamed is not None:
            streamed.call.finish(error=None if isinstance(error, (StopIteration, StopAsyncIteration)) else error)
        raise
    if streamed is not None and streamed.takes_chunks:
        with guarded(LiteLLMPatch.name):
            streamed.call.add_event(_plain(made.result))


def _plain(value: Any) -> Any:
    """Objects of LiteLLM as JSON; their own `model_dump` fails on some chunks."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if hasattr(value, "model_fields_set"):
        return {name: _plain(item) for name, item in value}
    return value


# ---------------------------------------------------------------------- calls as LiteLLM is asked for them


def _redirected_arguments(path: str, arguments: Mapping[str, object]) -> dict[str, Any] | None:
    """The arguments with which OpenAI's SDK makes a call; None, if the call goes its way as it is.

    Args:
        path: Of OpenAI's API, that is to answer.

    Raises:
        ConfigurationError: It is no chat, and the router has no place for it.
    """
    router = current_router()
    # Arguments with which one call becomes others, each of which is redirected by itself.
    is_other = any(arguments.get(name) for name in (*_NOT_SENT, "fallbacks", "model_list"))
    # LiteLLM sends responses in OpenAI's shape, or as a chat.
    if router is None or is_other or path not in (_CHAT_PATH, _EMBEDDINGS_PATH):
        return None
    request = _request_of(path, arguments)
    if target_of(router, request) is None:
        if path != _CHAT_PATH:
            _refuse(router, arguments)
        return None
    return None if request.provider in _IN_SHAPE else _for_openai(str(request.model), arguments)


def _excluded_attributes(arguments: Mapping[str, object]) -> dict[str, bool]:
    """What the span of a call says that goes its way as it is: whether it is excluded."""
    router = current_router()
    return {} if router is None else excluded(router, _request_of(_CHAT_PATH, arguments))


def _refuse_redirect(arguments: Mapping[str, object]) -> None:
    """Raise ConfigurationError for a call that is no chat, where chats of its model go elsewhere."""
    router = current_router()
    if router is not None and not any(arguments.get(name) for name in _NOT_SENT):
        _refuse(router, arguments)


def _refuse(router: Router, arguments: Mapping[str, object]) -> None:
    request = _request_of(_CHAT_PATH, arguments)
    if target_of(router, request) is not None:
        name = f"{request.provider}/{request.model}"
        raise ConfigurationError(
            f"A call of the model '{name}' that is no chat would go to its own provider, for the model of the rollout "
            f"cannot answer it; if that is meant, give the rollout's LLM redirect_exclude=['{name}']."
        )


def _request_of(path: str, arguments: Mapping[str, object]) -> ModelRequest:
    litellm = importlib.import_module("litellm")
    given = plain_text(arguments.get("model") or "")
    asked = litellm.model_alias_map.get(given, given)
    address = arguments.get("base_url") or arguments.get("api_base")
    try:
        model, provider, _, _ = litellm.get_llm_provider(
            asked, arguments.get("custom_llm_provider"), address, arguments.get("api_key")
        )
    except Exception:  # noqa: BLE001 # LiteLLM says itself, and better, what it does not know
        model, provider = asked, "openai"
    url = f"{str(address).rstrip('/')}/" if address else ""
    return ModelRequest("openai", arguments.get("client"), path, model, url, provider)


def _for_openai(model: str, arguments: Mapping[str, object]) -> dict[str, object]:
    """Less what is for the provider alone: its credentials, its addresses and its own parameters."""
    of_chat = inspect.signature(importlib.import_module("litellm.main").completion).parameters
    of_litellm = importlib.import_module("litellm.types.utils").all_litellm_params
    known = {*of_chat, *of_litellm, "input", "dimensions", "encoding_format"}
    kept = {
        name: value
        for name, value in arguments.items()
        if name in known and name not in _OF_PROVIDER and not is_secret(name)
    }
    for name in ("headers", "extra_headers"):
        if kept.get(name):
            kept[name] = _without_secrets(kept[name])
    # The address of a call that OpenAI's SDK is about to send elsewhere; it never reaches anybody by itself.
    sent = {
        "model": model,
        "custom_llm_provider": "openai",
        "api_base": "http://redirected.invalid/v1",
        "api_key": PLACEHOLDER_KEY,
    }
    # Parameters that LiteLLM knows of the provider's models, and OpenAI's have not, are left out.
    return {**kept, **sent, "drop_params": True}


# ---------------------------------------------------------------------- requests as they are sent


@dataclasses.dataclass(frozen=True)
class _Post:
    """What a handler is asked to send."""

    url: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    requested_model: str | None = None
    """What was asked for, if it goes elsewhere."""
    attributes: Mapping[str, bool] = dataclasses.field(default_factory=dict)
    """What its span says besides."""

    def body(self) -> Any:
        """As JSON; None if it is something else."""
        body = self.kwargs.get("json") or self.kwargs.get("data") or (self.args[0] if self.args else None)
        if isinstance(body, (str, bytes)):
            body = orjson.loads(body)
        return body if isinstance(body, Mapping) else None


def _redirected_post(original: Callable[..., object], handler: object, post: _Post) -> _Post:
    """What is sent instead where a router wants a call elsewhere; what the router raises reaches the caller."""
    router = current_router()
    sdk: Literal["openai", "anthropic"] = "openai" if dialect_of(post.url, OPENAI_DIALECTS) is not None else "anthropic"
    paths = tuple(OPENAI_DIALECTS) if sdk == "openai" else (*ANTHROPIC_DIALECTS, COUNT_TOKENS_PATH)
    address = post.url.partition("?")[0].rstrip("/")
    if router is None or not address.endswith(paths):
        return post
    body = post.body()
    if body is None:
        return post
    path = next(ending for ending in paths if address.endswith(ending))
    request = ModelRequest(sdk, handler, path, body.get("model"), post.url)
    target = target_of(router, request)
    if target is None:
        return dataclasses.replace(post, attributes=excluded(router, request))
    named = dict(zip(tuple(inspect.signature(original).parameters)[2:], post.args, strict=False)) if post.args else {}
    kwargs = {**named, **post.kwargs, "data": orjson.dumps(rewritten(body, target)).decode(), "json": None}
    if target.api_key is not None:
        kwargs["params"] = _without_secrets(kwargs.get("params")) or None
    kwargs["headers"] = _headers(kwargs.get("headers"), target)
    return _Post(target.base_url.rstrip("/") + path, (), kwargs, str(body.get("model")))


def _headers(given: Any, target: Target) -> dict[str, object]:
    """Of a request whose body is JSON text."""
    kept = {name: value for name, value in (given or {}).items() if name.lower() != "content-type"}
    if target.api_key is not None:
        keys = {"Authorization": f"Bearer {target.api_key}", "X-Api-Key": target.api_key}
        kept = {**_without_secrets(kept), **keys}
    return {**kept, "Content-Type": "application/json", **target.headers}


def _without_secrets(values: Any) -> dict[str, object]:
    return {name: value for name, value in (values or {}).items() if not is_secret(name)}


# ---------------------------------------------------------------------- spans that LiteLLM exports


class _ExportPatch(Patch):
    """Token ids on the spans of LiteLLM's own OpenTelemetry integration."""

    name = "LiteLLM's OpenTelemetry integration"
    module = "litellm.integrations.opentelemetry"

    def change(self, module: ModuleType) -> None:
        self.replace(module.OpenTelemetry, "set_attributes", _set_attributes)


def _set_attributes(original: Original, integration: Any, span: Any, kwargs: Any, response_obj: Any) -> Any:
    result = original(integration, span, kwargs, response_obj)
    with guarded(_ExportPatch.name):
        first = next(iter(items(field(response_obj, "choices"))), None)
        prompt_ids = field(response_obj, "prompt_token_ids")
        for name, ids in (
            ("prompt_token_ids", prompt_ids),
            ("response_token_ids", response_ids(response_obj, first, 0)),
        ):
            if ids:
                span.set_attribute(name, list(ids))
    return result


@functools.cache
def _export_patch() -> _ExportPatch:
    """One for the process, as the integration is."""
    return _ExportPatch()


def instrument_litellm() -> None:
    """Have the spans that LiteLLM exports carry `prompt_token_ids` and `response_token_ids`, from its import on."""
    _export_patch().apply()


def uninstrument_litellm() -> None:
    """Undo `instrument_litellm`; harmless if it was not called."""
    _export_patch().undo()
