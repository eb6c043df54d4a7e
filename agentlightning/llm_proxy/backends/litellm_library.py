"""Providers the proxy does not serve itself, reached through the litellm library.

The library is imported with the first such call and told to use the prices it brings along, so that the import does
not reach for the network. Its responses become bytes of OpenAI's dialect, its exceptions responses with the status and
the error shape of that dialect.

The library takes the fields of a request and its own settings as arguments of one call, so a field that a caller may
name freely could say where the call goes, with which key, or what the response is. It therefore gets the arguments of
the entry and, of the caller's request, an allow-list of fields; no header of the caller. Messages and tools are made
anew of known parts. Images, audio and files come within the request: some providers of the library download or open
what an address leads to, others read it with the credentials of the backend.
"""

import asyncio
import importlib
import logging
import os
import re
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Annotated, Any, Final, Literal

import orjson
from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, StringConstraints, ValidationError

from agentlightning.dialects import DialectName, JsonObject
from agentlightning.llm_proxy.backends.backend import Backend, BackendBroken
from agentlightning.llm_proxy.backends.call_state import PreparedRequest
from agentlightning.llm_proxy.backends.connection import ResponseHead
from agentlightning.llm_proxy.translation import UntranslatableRequest

logger = logging.getLogger(__name__)

_LOCAL_PRICES_VARIABLE: Final = "LITELLM_LOCAL_MODEL_COST_MAP"
_SERVER_ERROR: Final = 500
_PASSED_HEADERS: Final = ("retry-after", "retry-after-ms", "x-should-retry")
_MOST_WARNINGS: Final = 20
"""Callers choose the names of fields, and could fill the log with them."""
CHAT_FIELDS: Final = frozenset(
    {
        *("messages", "temperature", "top_p", "top_k", "n", "stop", "max_tokens", "max_completion_tokens", "seed"),
        *("presence_penalty", "frequency_penalty", "logit_bias", "logprobs", "top_logprobs", "response_format"),
        *("tools", "tool_choice", "parallel_tool_calls", "functions", "function_call", "reasoning_effort", "thinking"),
        *("verbosity", "modalities", "audio", "user", "stream_options", "service_tier", "prompt_cache_key"),
        *("safety_identifier", "return_token_ids"),
    }
)
EMBEDDINGS_FIELDS: Final = frozenset({"input", "dimensions", "encoding_format", "user"})
_OBJECT_ADDRESS: Final = re.compile(r"\s*(?!https?://)[a-z][a-z0-9+.-]*://", re.IGNORECASE)
"""A text that some providers take for the address of an object, such as `gs://bucket/file`, and not for a text."""
_WAY_OUT: Final = (
    "send its bytes as a 'data:' address, or reach the provider by its OpenAI endpoint (a model 'openai/...' with an "
    "api_base), which is sent requests unchanged"
)


# ---------------------------------------------------------------------- what a caller may send


def _data_address(address: str) -> str:
    if not address.startswith("data:"):
        raise ValueError(f"{address[:80]!r} is an address that the litellm library might fetch: {_WAY_OUT}")
    return address


def _embedded(text: str) -> str:
    if _OBJECT_ADDRESS.match(text) is not None:
        raise ValueError(f"the address {text[:80]!r} would be read in its place")
    return text


def _local_schema(schema: object) -> Any:
    """A JSON schema without remote references: a validator follows them, and may fetch them."""
    left = [schema]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            for name in ("$ref", "$dynamicRef"):
                reference = value.get(name)
                if isinstance(reference, str) and not reference.startswith("#"):
                    raise ValueError(f"the schema refers to {reference[:80]!r} outside of it")
            left.extend(value.values())
        elif isinstance(value, list):
            left.extend(value)
    return schema


def _text_part(part: object) -> Any:
    return {"type": "text", "text": part} if isinstance(part, str) else part


def _listed(value: object) -> Any:
    return [value] if isinstance(value, str) else value


_DataAddress = Annotated[str, AfterValidator(_data_address)]
_Schema = Annotated[Any, AfterValidator(_local_schema)]


class _Cached(BaseModel):
    cache_control: Any = None


class _TextPart(_Cached):
    type: Literal["text"]
    text: str


class _RefusalPart(_Cached):
    type: Literal["refusal"]
    refusal: str


class _ImageUrl(BaseModel):
    url: _DataAddress
    detail: Any = None


class _ImagePart(_Cached):
    type: Literal["image_url"]
    image_url: Annotated[_ImageUrl, BeforeValidator(lambda image: {"url": image} if isinstance(image, str) else image)]


class _File(BaseModel):
    file_data: _DataAddress
    filename: Any = None


class _FilePart(_Cached):
    type: Literal["file"]
    file: _File


class _Audio(BaseModel):
    data: Annotated[str, StringConstraints(pattern=r"^[^:]*$")]
    format: Any = None


class _AudioPart(_Cached):
    type: Literal["input_audio"]
    input_audio: _Audio


class _Signature(BaseModel):
    thought_signature: str | None = None
    """Gemini goes on only if it gets back what it signed."""


class _CalledFunction(BaseModel):
    name: Any = None
    arguments: Any = None
    provider_specific_fields: _Signature | None = None


class _ToolCall(BaseModel):
    id: Any = None
    type: Any = None
    index: Any = None
    function: _CalledFunction
    provider_specific_fields: _Signature | None = None


class _ThinkingBlock(_Cached):
    type: Literal["thinking", "redacted_thinking"]
    thinking: Any = None
    signature: Any = None
    data: Any = None


_Part = Annotated[_TextPart | _RefusalPart | _ImagePart | _FilePart | _AudioPart, Field(discriminator="type")]


class _Message(_Cached):
    role: Any = None
    name: Any = None
    tool_call_id: Any = None
    refusal: Any = None
    reasoning_content: Any = None
    content: str | list[Annotated[_Part, BeforeValidator(_text_part)]] | None = None
    tool_calls: list[_ToolCall] | None = None
    function_call: _CalledFunction | None = None
    thinking_blocks: list[_ThinkingBlock] | None = None


class _Function(BaseModel):
    name: Any = None
    description: Any = None
    parameters: _Schema = None
    strict: Any = None


class _Tool(_Cached):
    """A function; the library and some providers run other tools themselves."""

    type: Literal["function"]
    function: _Function


class _CheckedFields(BaseModel):
    """The fields of a request whose content is checked."""

    messages: list[_Message] | None = None
    tools: list[_Tool] | None = None
    functions: list[_Function] | None = None
    response_format: _Schema = None
    input: (
        Annotated[list[Annotated[str, AfterValidator(_embedded)] | int | list[int]], BeforeValidator(_listed)] | None
    ) = None


def _library_request(dialect: DialectName, body: Mapping[str, object]) -> JsonObject:
    """The arguments that a caller's request becomes.

    Raises:
        UntranslatableRequest: A field holds what the library must not be given.
    """
    request = {name: body[name] for name in _fields_of(dialect) if name in body}
    try:
        checked = _CheckedFields.model_validate(request)
    except ValidationError as error:
        first = max(
            error.errors(include_url=False), key=lambda one: len(one["loc"])
        )  # of a union, where it goes deepest
        place = _place_in(request, first["loc"])
        message = f"'{place}': {first['msg']}; a backend behind the litellm library is not sent it."
        raise UntranslatableRequest(place, message) from None
    request |= checked.model_dump(exclude_unset=True, exclude={"input"})
    for name in ("tools", "functions"):
        if name in request and not request[name]:
            del request[name]
    return request


def _fields_of(dialect: DialectName) -> frozenset[str]:
    return EMBEDDINGS_FIELDS if dialect == "embeddings" else CHAT_FIELDS


def _place_in(request: object, location: tuple[str | int, ...]) -> str:
    """A location of pydantic, without the names of types, as `messages[0].content`."""
    place, value = "", request
    for part in location:
        if isinstance(value, dict) and part in value:
            place += f".{part}" if place else str(part)
            value = value[part]
        elif isinstance(value, list) and isinstance(part, int):
            place += f"[{part}]"
            value = value[part]
    return place


# ---------------------------------------------------------------------- sending


class LibrarySender:
    """Sends requests through the litellm library."""

    def __init__(self) -> None:
        self._dropped: set[str] = set()
        """Names of fields of which the log tells already."""

    async def send(self, backend: Backend, request: PreparedRequest) -> ResponseHead:
        """Have the library answer; it reports errors of the way as statuses too.

        Raises:
            UntranslatableRequest: The request holds what the library must not be given.
        """
        arguments = self._arguments_of(backend, request)
        try:
            library = await asyncio.to_thread(_library)
            function = library.aembedding if request.dialect == "embeddings" else library.acompletion
            result = await function(**arguments)
        except Exception as error:  # noqa: BLE001  # the library raises whatever its providers raise
            return _error_response(error, backend)
        if request.stream:
            return _head(200, _events(aiter(result), backend), {"content-type": "text/event-stream"})
        return _head(200, _whole(_json_of(result)))

    def _arguments_of(self, backend: Backend, request: PreparedRequest) -> dict[str, Any]:
        body: dict[str, Any] = orjson.loads(request.body)
        fields = _fields_of(request.dialect)
        # What the entry sets is the operator's, also where a caller may not set it.
        own = {
            name: value
            for name, value in backend.defaults.items()
            if name in body and (name not in fields or body[name] == value)
        }
        callers = {name: value for name, value in body.items() if name not in own}
        self._warn_of_dropped(callers.keys() - fields - {"model", "stream"}, backend)
        arguments = {**_library_request(request.dialect, callers), **own, **backend.options, "model": backend.model}
        arguments |= {"timeout": backend.timeout, "num_retries": 0, "max_retries": 0}
        headers = dict(backend.headers)
        headers.pop("Authorization", None)  # the library makes its own from the key
        if headers:
            arguments["extra_headers"] = headers
        if request.dialect != "embeddings":
            arguments["stream"] = request.stream
        return arguments

    def _warn_of_dropped(self, names: set[str], backend: Backend) -> None:
        for name in sorted(names - self._dropped)[: _MOST_WARNINGS - len(self._dropped)]:
            self._dropped.add(name)
            logger.warning(
                "The field %.80r of requests is not passed on to backend %s, since it goes through the litellm "
                "library, to which fields are arguments; set it in litellm_params of the entry if you want it.",
                name,
                backend,
            )


def _head(status: int, chunks: AsyncGenerator[bytes, None], headers: Mapping[str, str] | None = None) -> ResponseHead:
    return ResponseHead(status, headers or {"content-type": "application/json"}, chunks, chunks.aclose)


async def _whole(content: bytes) -> AsyncGenerator[bytes, None]:
    yield content


async def _events(chunks: AsyncIterator[object], backend: Backend) -> AsyncGenerator[bytes, None]:
    """One event for each chunk of the library."""
    try:
        while True:
            chunk = await asyncio.wait_for(chunks.__anext__(), backend.timeout)
            yield b"data: " + _json_of(chunk, is_part=True) + b"\n\n"
    except StopAsyncIteration:
        pass
    except Exception as error:  # noqa: BLE001  # the library raises whatever its providers raise
        message = backend.redacted(f"{type(error).__name__}: {error}".partition("\n")[0])
        raise BackendBroken(f"Backend '{backend.name}' broke off in the middle of an answer ({message}).") from None
    finally:
        close = getattr(chunks, "aclose", None)
        if close is not None:
            await close()
    yield b"data: [DONE]\n\n"


def _library() -> Any:
    os.environ.setdefault(_LOCAL_PRICES_VARIABLE, "True")
    library: Any = importlib.import_module("litellm")
    library.suppress_debug_info = True  # it prints advice to the terminal otherwise
    return library


def _json_of(value: Any, *, is_part: bool = False) -> bytes:
    """The JSON of a model of the library; parts of a stream leave out what they do not say."""
    if isinstance(value, Mapping):
        return orjson.dumps(value)
    return orjson.dumps(value.model_dump(mode="json", exclude_unset=True, exclude_none=is_part))


def _error_response(error: Exception, backend: Backend) -> ResponseHead:
    """The error as OpenAI would report it."""
    status = getattr(error, "status_code", None)
    if isinstance(status, bool) or not isinstance(status, int) or not 400 <= status < 600:
        status = _SERVER_ERROR
    reported = {
        "message": backend.redacted(str(getattr(error, "message", None) or error)),
        "type": type(error).__name__,
        "param": getattr(error, "param", None),
        "code": getattr(error, "code", None) or status,
    }
    given = getattr(getattr(error, "response", None), "headers", None) or {}
    headers = {name: given[name] for name in _PASSED_HEADERS if given.get(name) is not None}
    body = _whole(orjson.dumps({"error": reported}, default=str))
    head = _head(status, body, {"content-type": "application/json", **headers})
    return head._replace(reason=type(error).__name__)
