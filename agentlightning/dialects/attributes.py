"""Reading what may be an object of an SDK or plain JSON, and writing the attributes that all dialects share."""

import functools
import json
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Any, Final, TypeAlias

import orjson
from opentelemetry.util.types import AttributeValue
from pydantic import BaseModel

from agentlightning import semconv
from agentlightning.utils.json_values import JsonMapping, JsonObject

Attributes = dict[str, AttributeValue]

Thing: TypeAlias = Any
"""An object of an SDK, or plain JSON; `field` reads either."""
ToolParts: TypeAlias = tuple[Thing, Thing, Thing]
"""Of a call, its id, name and arguments; of a tool, its name, description and schema."""

WEIGHTS_VERSION: Final = "weights_version"

_NO_MODEL: Final = object()
_SETTINGS = {
    "model",
    "temperature",
    "top_p",
    "top_k",
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "frequency_penalty",
    "presence_penalty",
    "seed",
    "n",
    "stop",
    "reasoning_effort",
    "previous_response_id",
    "dimensions",
}
"""Settings of a request that are noted under their own names."""


def field(thing: Thing, name: str) -> Thing:
    """A field of an object or of a mapping; None if it has none."""
    if type(thing) is dict or isinstance(thing, Mapping):
        return thing.get(name)
    if thing is None:
        return None
    plain = opened(thing)
    return plain.get(name) if plain is not thing else getattr(thing, name, None)


def opened(thing: Thing) -> Thing:
    """The fields of a pydantic model as a dictionary, which is quicker to read many of; anything else as it is.

    To ask a model for what it has not costs more than all of its fields.
    """
    extra: Any = getattr(thing, "__pydantic_extra__", _NO_MODEL)
    if extra is _NO_MODEL or not hasattr(thing, "__dict__"):
        return thing
    return {**thing.__dict__, **extra} if extra else thing.__dict__


def reader(thing: Thing) -> Callable[[str], Thing]:
    """Gives the fields of a thing by their names, as `field` does; quicker where many are read."""
    plain = opened(thing)
    return plain.get if type(plain) is dict else functools.partial(field, plain)


def items(things: Thing) -> Iterable[Thing]:
    """The things of a list; none, if it is not one."""
    return things if isinstance(things, (list, tuple)) else ()


def plain_text(value: object) -> str:
    """A value as text; of a member of an enum, as JSON has it, its value: `str` would give the member's name."""
    return str(value.value if isinstance(value, Enum) else value)


def text_of(content: Thing, text_types: tuple[str, ...] = ("text", "input_text", "output_text")) -> str | None:
    """Content of a message as text: that of its parts where all are text, the parts as JSON otherwise."""
    if content is None or isinstance(content, str):
        return content
    if isinstance(content, (list, tuple)):
        parts = [field(part, "text") if field(part, "type") in text_types else None for part in content]
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) == len(parts):
            return "".join(texts)
    return as_json(content)


def as_json(value: object) -> str:
    """A value as text: a text as it is, anything else as JSON, and what JSON does not know as Python shows it."""
    if isinstance(value, str):
        return value
    try:
        return orjson.dumps(value, default=_as_plain, option=orjson.OPT_NON_STR_KEYS).decode()
    except (TypeError, ValueError, RecursionError):  # such as a number of more than 64 bits
        try:
            return json.dumps(value, ensure_ascii=False, default=_as_plain)
        except (TypeError, ValueError, RecursionError):
            return _shown(value)


def _as_plain(value: object) -> Thing:
    if isinstance(value, BaseModel):  # its fields, and what came besides them
        return {**vars(value), **(value.model_extra or {})}
    return _shown(value)


def _shown(value: object) -> str:
    try:
        return str(value)
    except Exception:  # noqa: BLE001 # of the program: it may not be able to show itself
        return object.__repr__(value)


def write_request(attributes: Attributes, body: JsonMapping, *, system: str) -> None:
    """The model's name and the settings of a request."""
    attributes["gen_ai.system"] = system
    for name, value in body.items():
        if name not in _SETTINGS:
            continue
        if isinstance(value, Enum):
            value = value.value
        if isinstance(value, (str, int, float, bool)):
            attributes[f"gen_ai.request.{name}"] = value
        elif isinstance(value, (list, tuple)):
            attributes[f"gen_ai.request.{name}"] = [plain_text(part) for part in value]
    if body.get("stream"):
        attributes["gen_ai.request.streaming"] = True


def write_message(
    attributes: Attributes, prefix: str, *, role: Thing, content: object = None, tool_call_id: str | None = None
) -> None:
    """One message; its content may be text, parts, or missing."""
    attributes[f"{prefix}.role"] = plain_text(role)
    text = text_of(content) if content is not None else None
    if text is not None:
        attributes[f"{prefix}.content"] = text
    if tool_call_id is not None:
        attributes[f"{prefix}.tool_call_id"] = tool_call_id


def write_tool_calls(attributes: Attributes, prefix: str, calls: Iterable[ToolParts]) -> None:
    """Calls of tools, each an id, a name and arguments."""
    for number, (call_id, name, arguments) in enumerate(calls):
        here = f"{prefix}.tool_calls.{number}"
        attributes[f"{here}.id"] = plain_text(call_id or "")
        attributes[f"{here}.type"] = "function"
        attributes[f"{here}.name"] = plain_text(name or "")
        attributes[f"{here}.arguments"] = as_json({} if arguments is None else arguments)


def write_tools(attributes: Attributes, tools: Iterable[ToolParts]) -> None:
    """Definitions of tools, each a name, a description and a schema."""
    for number, (name, description, schema) in enumerate(tools):
        here = f"gen_ai.request.functions.{number}"
        attributes[f"{here}.name"] = plain_text(name or "")
        attributes[f"{here}.description"] = plain_text(description or "")
        attributes[f"{here}.parameters"] = as_json(schema or {})


def response_attributes(response: Thing) -> Attributes:
    """What every response has: its id, the model that answered, its tokens and, where told, its weights' version."""
    attributes: Attributes = {}
    read = reader(response)
    for name, known_as in (("id", semconv.RESPONSE_ID), ("model", semconv.RESPONSE_MODEL)):
        value = read(name)
        if isinstance(value, str) and value:
            attributes[known_as] = value
    version = read(WEIGHTS_VERSION)
    if isinstance(version, (str, int)):
        attributes[semconv.VERSION_ATTRIBUTE] = version
    write_usage(attributes, read("usage"))
    return attributes


def write_usage(attributes: Attributes, usage: Thing) -> None:
    """How many tokens were read and written, whatever the dialect calls them."""
    if usage is None:
        return
    ask = reader(usage)
    read = _first_number(ask, "prompt_tokens", "input_tokens")
    written = _first_number(ask, "completion_tokens", "output_tokens")
    total = _first_number(ask, "total_tokens")
    if read is not None:
        attributes[semconv.TOKENS_READ] = read
    if written is not None:
        attributes[semconv.TOKENS_WRITTEN] = written
    if total is not None or read is not None:
        attributes["gen_ai.usage.total_tokens"] = total if total is not None else (read or 0) + (written or 0)
    details = ask("prompt_tokens_details") or ask("input_tokens_details")
    cached = _first_number(ask if details is None else reader(details), "cached_tokens", "cache_read_input_tokens")
    if cached is not None:
        attributes["gen_ai.usage.cached_tokens"] = cached


def _first_number(ask: Callable[[str], Thing], *names: str) -> int | None:
    for name in names:
        value = ask(name)
        if isinstance(value, int):
            return value
    return None


def write_token_ids(attributes: Attributes, name: str, ids: Thing) -> None:
    """Token ids, as the text of a JSON list: OpenTelemetry takes ten times as long to copy a list of integers."""
    if ids and isinstance(ids, (list, tuple)):
        attributes[name] = as_json(ids)


def response_ids(response: Thing, choice: Thing, number: int) -> Thing:
    """The token ids of one choice, where the servers we know put them."""
    of_choices = field(response, "response_token_ids")  # a list for each choice, from servers before vLLM 0.10.2
    if of_choices and isinstance(of_choices, (list, tuple)):
        if not isinstance(of_choices[0], (list, tuple)):
            of_choices = [of_choices]
        if number < len(of_choices):
            return of_choices[number]
    return field(choice, "token_ids") or field(field(choice, "provider_specific_fields"), "token_ids")


def keep_known(known: JsonObject, event: JsonMapping) -> None:
    """What one chunk of a stream says of the whole answer."""
    for name in ("id", "model", "usage", semconv.PROMPT_IDS, semconv.RESPONSE_IDS, WEIGHTS_VERSION):
        if event.get(name) is not None:
            known[name] = event[name]


def write_logprobs(attributes: Attributes, name: str, entries: Thing) -> None:
    """Log-probabilities, one entry a token, as the text of a JSON list."""
    if entries:
        attributes[name] = as_json(entries)
