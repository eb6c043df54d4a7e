"""The SDKs of OpenAI and Anthropic, seen in the one method through which every request of theirs goes.

Both are generated from one template, in every version since the first with a base client: `request(cast_to, options)`
takes the path and the body, makes all retries, and returns an object, a stream or a raw response.
"""

import importlib
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType
from typing import Any, ClassVar, Final, Literal

from opentelemetry import trace
from pydantic import BaseModel

from agentlightning.dialects import ANTHROPIC_DIALECTS, COUNT_TOKENS_PATH, OPENAI_DIALECTS, Dialect, dialect_of
from agentlightning.dialects.attributes import plain_text
from agentlightning.errors import ConfigurationError
from agentlightning.instrumentation.model_calls import CallRecording, read_along
from agentlightning.instrumentation.patch import Original, Patch, PatchedCall, Step, is_suppressed
from agentlightning.instrumentation.redirect import (
    PLACEHOLDER_KEY,
    ModelRequest,
    Target,
    current_router,
    excluded,
    is_secret,
    parent_header,
    rewritten,
    target_of,
)

__all__ = ["AnthropicPatch", "OpenAIPatch"]

logger = logging.getLogger(__name__)


_CALL: ContextVar[CallRecording | None] = ContextVar("agentlightning_sdk_call", default=None)
"""The call that an SDK is making here."""
_ATTEMPT: Final = "/rollout/"
"""In the addresses at which an LLM proxy serves attempts."""
_SIGNS: Final = (
    "The calls of a {client} cannot be sent to the model of the rollout, because it signs each with its own keys; "
    "make the client with {instead}, or have it left alone with exclude_from_redirect(client)."
)


class _BaseClientPatch(Patch):
    """Records the requests of one SDK, and sends them where the router of their context says."""

    sdk: ClassVar[Literal["openai", "anthropic"]]
    dialects: ClassVar[dict[str, Dialect]]

    def __init__(self, *, records: bool = True) -> None:
        """Nothing is changed yet.

        Args:
            records: False only sends requests where they are to go.
        """
        super().__init__()
        self._records = records
        self._last_address: tuple[object, str] = (None, "")

    def change(self, module: ModuleType) -> None:
        for client in (module.SyncAPIClient, module.AsyncAPIClient):
            self.surround(client, "request", self._request)
            if hasattr(client, "_process_response"):  # where the answer still has its headers
                self.replace(client, "_process_response", self._process_response)

    @contextmanager
    def _request(
        self, _original: object, client: object, cast_to: object, options: object, **kwargs: object
    ) -> Iterator[PatchedCall]:
        options, call = self._begun(client, options)
        made = PatchedCall((client, cast_to, options), kwargs)
        token = _CALL.set(call)
        try:
            yield made
            _follow(call, made.result)
        except BaseException as error:
            if call is not None:
                call.finish(error=error)
            raise
        finally:
            _CALL.reset(token)

    @staticmethod
    def _process_response(original: Original, client: object, **kwargs: object) -> object:
        call, response = _CALL.get(), kwargs.get("response")
        if call is not None and isinstance(getattr(response, "headers", None), Mapping):
            call.note_response(response)
        return original(client, **kwargs)

    def _begun(self, client: Any, options: Any) -> tuple[object, CallRecording | None]:
        """The options to call with, and the call that was begun; None where there is none to record."""
        if options.method.lower() != "post":
            return options, None
        path = str(options.url)
        dialect = dialect_of(path, self.dialects)
        if dialect is None:
            return self._unrecorded(client, options), None
        body = _body_of(options)
        attributes: dict[str, object] = {"server.address": self._address_of(client)}
        router, target = current_router(), None
        if router is not None:
            request = self._requested(client, path, body.get("model"))
            target = target_of(router, request)
            attributes |= excluded(router, request) if target is None else {}
        if target is not None:
            attributes |= {
                "server.address": target.base_url,
                "agentlightning.requested_model": plain_text(body.get("model")),
            }
            options = self._redirected(client, options, target)
            body = _body_of(options)
        if not self._records or is_suppressed():
            return options, None
        options = self._without_own_span(options)
        step = _begun_by_agentops(dialect.span_name)
        is_proxied = step is None and _ATTEMPT in str(attributes["server.address"])
        call = CallRecording(dialect, body, attributes=attributes, step=step, is_proxied=is_proxied)
        if target is not None:
            options.headers |= parent_header(call.step.span)  # a copy, which nobody has seen yet
        return options, call

    def _unrecorded(self, client: object, options: Any) -> object:
        """The options of a request that is no model call; one that has tokens counted goes where the call would."""
        path, router = str(options.url), current_router()
        if not _ending(path).endswith(COUNT_TOKENS_PATH):
            return options
        request = self._requested(client, path, _body_of(options).get("model"))
        target = None if router is None else target_of(router, request)
        if target is not None:
            options = self._redirected(client, options, target)
        return self._without_own_span(options) if self._records else options

    @staticmethod
    def _without_own_span(options: Any) -> object:
        """Newer SDKs would write a span of their own, which says less and looks like a model call."""
        if vars(options).get("span_name"):
            options = _copy_of(options)
            options.span_name = None
        return options

    def _address_of(self, client: object) -> str:
        """Where the client sends its calls; kept for the last one, because an agent rarely has more than one."""
        url, (last_url, address) = vars(client).get("_base_url"), self._last_address
        if url is None or url is not last_url:
            address = str(getattr(client, "base_url", ""))
            self._last_address = (url, address)
        return address

    def _requested(self, client: Any, path: str, model: Any) -> ModelRequest:
        url = path if "://" in path else f"{self._address_of(client).rstrip('/')}/{path.lstrip('/')}"
        return ModelRequest(self.sdk, client, path, model, url)

    def _redirected(self, client: Any, options: Any, target: Target) -> object:
        options, path = _copy_of(options), str(options.url)
        if "://" in path:  # a program may give a whole address
            address = _ending(path)
            path = next(ending for ending in (*self.dialects, COUNT_TOKENS_PATH) if address.endswith(ending))
        options.url = target.base_url.rstrip("/") + "/" + path.lstrip("/")
        if isinstance(options.json_data, Mapping):
            options.json_data = rewritten(options.json_data, target)
        if isinstance(options.extra_json, Mapping):  # which is written over the other
            ours = {*target.parameters, *(() if target.model is None else ("model",))}
            options.extra_json = {name: value for name, value in options.extra_json.items() if name not in ours}
        headers = dict(options.headers) if isinstance(options.headers, Mapping) else {}
        if target.api_key is not None:
            headers = self._signed(client, headers, target.api_key)
            given = {**_mapping(vars(client).get("_custom_query")), **_mapping(options.params)}
            if secret := [name for name in given if is_secret(name)]:
                options.params = {**_mapping(options.params), **dict.fromkeys(secret, _omit_of(client))}
        options.headers = headers | dict(target.headers)
        return options

    def _signed(self, client: object, headers: dict[str, object], api_key: str) -> dict[str, object]:
        """The headers of a request with this key, and with nothing else that says who sends it."""
        keys, omit = self._key_headers(client, api_key), _omit_of(client)
        taken = {name.lower() for name in keys}
        beneath = _mapping(getattr(getattr(client, "_client", None), "headers", None))
        given = (*_mapping(vars(client).get("_custom_headers")), *headers, "OpenAI-Organization", "OpenAI-Project")
        # Where receivers look for a key besides `Authorization`.
        return {
            **{name: value for name, value in headers.items() if not is_secret(name)},
            **{name: omit for name in given if is_secret(name) and name not in keys},
            # Headers of the HTTP client beneath cannot be taken out, only written over.
            **{
                name: api_key if name in ("x-api-key", "api-key") else PLACEHOLDER_KEY
                for name in map(str.lower, beneath)
                if is_secret(name) and name not in taken
            },
            **keys,  # last, because newer SDKs take the last of those that are spelled differently
        }

    def _key_headers(self, client: object, api_key: str) -> dict[str, str]:
        raise NotImplementedError


class OpenAIPatch(_BaseClientPatch):
    """OpenAI's SDK."""

    name = "openai"
    module = "openai._base_client"
    sdk = "openai"
    dialects = OPENAI_DIALECTS

    def _key_headers(self, client: object, api_key: str) -> dict[str, str]:
        if vars(client).get("_provider_runtime") is not None:
            raise ConfigurationError(_SIGNS.format(client=type(client).__name__, instead="openai.OpenAI"))
        headers = {"Authorization": f"Bearer {api_key}"}
        if hasattr(client, "_azure_ad_token"):  # a client of Azure, which would send its own key besides
            headers["api-key"] = api_key
        return headers


class AnthropicPatch(_BaseClientPatch):
    """Anthropic's SDK."""

    name = "anthropic"
    module = "anthropic._base_client"
    sdk = "anthropic"
    dialects = ANTHROPIC_DIALECTS

    def _key_headers(self, client: object, api_key: str) -> dict[str, str]:
        if hasattr(client, "aws_region"):
            raise ConfigurationError(_SIGNS.format(client=type(client).__name__, instead="anthropic.Anthropic"))
        # Both, because a client that has a token sends that where there is no such header yet.
        return {"X-Api-Key": api_key, "Authorization": f"Bearer {api_key}"}


def _ending(path: str) -> str:
    """A path, or an address, without its query."""
    return path.partition("?")[0].rstrip("/")


def _omit_of(client: object) -> object:
    """What stands, in the client's SDK, for a value that is not to be sent."""
    base = next(kind for kind in type(client).__mro__ if kind.__name__ == "BaseClient")
    return importlib.import_module(f"{base.__module__.partition('.')[0]}._types").Omit()


def _mapping(value: object) -> dict[str, object]:
    return dict(value) if isinstance(value, Mapping) else {}


def _copy_of(options: Any) -> object:
    """Because whoever made the options may use them again."""
    return options.model_copy() if hasattr(options, "model_copy") else options.copy()


def _body_of(options: Any) -> dict[str, object]:
    """The request as it will be sent."""
    body = dict(options.json_data) if isinstance(options.json_data, Mapping) else {}
    return body | dict(options.extra_json) if isinstance(options.extra_json, Mapping) else body


def _follow(call: CallRecording | None, answer: Any) -> None:
    """Finish a call with its answer: now, or when that has been read."""
    if call is None:
        return
    if isinstance(answer, BaseModel):  # as most; to ask it for what it has not takes long
        call.finish(answer)
        return
    try:
        response = getattr(answer, "http_response", None)  # of a raw response
        if response is None and hasattr(answer, "__stream__"):
            response = answer.response
        elif response is None and hasattr(answer, "iter_bytes"):
            response = answer
        if response is None:
            call.finish(answer)
        else:
            read_along(call, response)
    except Exception as error:  # the caller gets its answer all the same
        logger.exception("The answer of a model could not be followed.")
        call.finish(error=f"not recorded: {error}")


class _BorrowedStep(Step):
    """A span that somebody else has begun, and ends."""

    def __init__(self, span: trace.Span) -> None:
        self.span = span

    def end(self, *, error: BaseException | str | None = None, end_time: int | None = None) -> None:
        """Nothing: it is not ours to end."""


def _begun_by_agentops(span_name: str) -> Step | None:
    """The span, of a name like ours, that AgentOps has begun for the model call made here: so the call is one span."""
    span: Any = trace.get_current_span()
    scope = getattr(span, "instrumentation_scope", None)
    is_theirs = scope is not None and scope.name in ("openai", "anthropic") and span.is_recording()
    return _BorrowedStep(span) if is_theirs and str(span.name).startswith(span_name) else None
