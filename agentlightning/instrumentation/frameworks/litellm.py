"""LiteLLM as a library: model calls that do not go through a model's SDK.

Calls of many providers leave through LiteLLM's own HTTP handlers. There they are recorded as they were sent and
answered, in the dialects we know: what LiteLLM makes of an answer lacks some token ids. Other dialects are recorded
one layer above, from what LiteLLM translated: the functions behind `completion`, `embedding` and `responses`, which its
public functions look up in their closures, so that it does not matter who imported them, and when. LiteLLM's callbacks
would come too late, and on other threads.

Whatever the provider, a chat is one span `openai.chat.completion`, with the provider as `gen_ai.system`. A call that a
layer below has recorded, an SDK or the HTTP handlers, is not recorded again.

Where a router says where calls go, they go there, whatever the provider: see `litellm_redirect`.

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
from typing import Any, Final

from agentlightning.dialects import ANTHROPIC_DIALECTS, OPENAI_DIALECTS, Dialect, dialect_of
from agentlightning.dialects.attributes import field, items, response_ids
from agentlightning.instrumentation.frameworks.litellm_redirect import (
    CHAT_PATH,
    EMBEDDINGS_PATH,
    Post,
    excluded_attributes,
    redirected_arguments,
    redirected_post,
    refuse_redirect,
)
from agentlightning.instrumentation.model_calls import WATCHES, CallWatch, ModelCall, read_along, read_whole
from agentlightning.instrumentation.patch import Original, Patch, PatchedCall, guarded, is_suppressed
from agentlightning.instrumentation.redirect import parent_header

_CHAT: Final = OPENAI_DIALECTS[CHAT_PATH]
_FUNCTIONS: Final = (
    ("litellm.main", "completion", CHAT_PATH),
    ("litellm.main", "embedding", EMBEDDINGS_PATH),
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
    sent = redirected_arguments(path, arguments) or arguments
    if not records or is_suppressed():
        return original(**sent)
    return _watched(original, _Request(OPENAI_DIALECTS[path], arguments), sent)


def _called_other(original: Original, arguments: dict[str, object]) -> Any:
    refuse_redirect(arguments)
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
    post = redirected_post(original, handler, Post(str(url), args, kwargs))
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
            (read_whole if made.result.is_closed else read_along)(call, made.result)


def _begun(post: Post) -> ModelCall | None:
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
            call = ModelCall(dialect, body, attributes=attributes)
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

    def translated(self) -> ModelCall:
        """The span of a call that no layer below has recorded, made when it returns; a stream goes on from there."""
        provider = _provider(self.body.get("litellm_logging_obj"))
        attributes = {"gen_ai.system": provider, **excluded_attributes(self.body)}
        return ModelCall(self.dialect, self.body, attributes=attributes, start_time_ns=self.start_time_ns)


class _Watch(CallWatch):
    """Also knows LiteLLM's own record of the call, and which of the calls it saw was sent last."""

    def __init__(self, request: _Request) -> None:
        super().__init__()
        self.logging = request.body.get("litellm_logging_obj")
        self.last_sent: ModelCall | None = None


def _watched(original: Original, request: _Request, arguments: dict[str, object]) -> Any:
    with _Watch(request) as watch:
        try:
            result = original(**arguments)
        except BaseException as error:
            _record(watch, request, error=error)
            raise
    if inspect.iscoroutine(result):
        return _awaited(result, request, watch)
    _record(watch, request, result)
    return result


async def _awaited(pending: Coroutine[object, object, object], request: _Request, sent: CallWatch) -> Any:
    """What an asynchronous call returns; its request may have been recorded when it was prepared."""
    with _Watch(request) as watch:
        watch.has_seen = sent.has_seen
        try:
            result = await pending
        except BaseException as error:
            _record(watch, request, error=error)
            raise
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
    call: ModelCall
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
