"""A dialect: where a protocol is served, how its requests are read, and how answers and errors are written in it."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tests.stub_model.script import BadRequest, CallOptions, Failure, Reply
from tests.stub_model.words import as_json

OPENAI_ERROR_TYPES = {400: "invalid_request_error", 401: "invalid_request_error", 404: "invalid_request_error"}
OPENAI_ERROR_TYPES |= {403: "permission_error", 429: "rate_limit_error"}
OPENAI_ERROR_CODES = {401: "invalid_api_key", 404: "model_not_found", 429: "rate_limit_exceeded"}


@dataclass(frozen=True)
class Dialect:
    """One protocol that generates."""

    name: str
    path: str
    """Below the root, and below `/v1` too."""
    id_prefix: str
    tool_call_prefix: str
    read: Callable[[dict[str, Any]], CallOptions]
    write: Callable[[Reply], dict[str, Any]]
    stream: Callable[[Reply], Iterator[bytes]]
    """The events of a stream, each as it goes over the wire."""
    fail: Callable[[Failure], dict[str, Any]]
    fail_in_stream: Callable[[Failure], bytes]


def openai_error(failure: Failure) -> dict[str, Any]:
    kind = OPENAI_ERROR_TYPES.get(failure.status, "server_error")
    code = failure.code or OPENAI_ERROR_CODES.get(failure.status)
    return {"error": {"message": failure.message, "type": kind, "param": failure.param, "code": code}}


def data_event(content: Mapping[str, Any] | str) -> bytes:
    """An event without a name, as in chat completions."""
    text = content if isinstance(content, str) else json.dumps(content)
    return f"data: {text}\n\n".encode()


def named_event(content: Mapping[str, Any]) -> bytes:
    """An event named after its type."""
    return f"event: {content['type']}\ndata: {json.dumps(content)}\n\n".encode()


def openai_error_event(failure: Failure) -> bytes:
    return data_event(openai_error(failure))


def list_of(body: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """A list of objects that must be there and not be empty."""
    items = body.get(name)
    if not isinstance(items, list) or not items or not all(isinstance(item, dict) for item in items):
        raise BadRequest(f"Invalid '{name}': expected a list of objects with at least one of them.", name)
    return items


def content_of(content: Any, place: str) -> tuple[str, tuple[str, ...]]:
    """The text and the images of a message's content, which is a text, a list of parts, or missing."""
    if content is None or isinstance(content, str):
        return content or "", ()
    if not isinstance(content, list):
        raise BadRequest(f"Invalid type for '{place}': expected a string or a list of parts.", place)
    texts, images = [], []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in ("text", "input_text", "output_text"):
            texts.append(part["text"])
        elif kind in ("image_url", "input_image", "image"):
            images.append(_image_of(part))
        else:
            raise BadRequest(f"Invalid value for '{place}[{number}].type': {kind!r}.", f"{place}[{number}].type")
    return "".join(texts), tuple(images)


def _image_of(part: dict[str, Any]) -> str:
    """The address or the data of an image."""
    image = part.get("image_url") or part.get("source") or part.get("file_id") or ""
    if isinstance(image, dict):
        return str(image.get("url") or image.get("data") or "")
    return str(image)


def json_schema_of(form: Any) -> Mapping[str, Any] | None:
    """The schema a response format asks for; None if it asks for text."""
    kind = form.get("type") if isinstance(form, dict) else None
    if kind in (None, "text"):
        return None
    if kind == "json_object":
        return {}
    if kind == "json_schema":
        schema: Mapping[str, Any] = form.get("json_schema", form).get("schema", {})
        return schema
    raise BadRequest(f"Invalid response format {kind!r}.", "response_format")


def stops_of(value: Any) -> tuple[str, ...]:
    """Stop texts, given as one or as a list."""
    return (value,) if isinstance(value, str) else tuple(value or ())


def positive(body: Mapping[str, Any], *names: str) -> int | None:
    """The first of these numbers that is given; each must be a whole number above zero."""
    for name in names:
        value = body.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise BadRequest(f"Invalid '{name}': expected a whole number above 0, but got {as_json(value)}.", name)
        return value
    return None
