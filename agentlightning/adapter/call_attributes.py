"""What the span of a model call says: token ids, log-probabilities, ids, texts and how the response ended.

Tracers and proxies write the same facts under different names and in different forms: token ids as lists or as JSON
text (`"[1,2,3]"`), the ids of a response under its first choice. Everything that knows these names is here. Reading
never raises: what is absent is None, and what is present but makes no sense is `UNREADABLE`.
"""

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, Final, TypeAlias

from agentlightning.adapter.sequences import FinishReason
from agentlightning.semconv import (
    COMPLETION,
    IS_CUT,
    IS_EXCLUDED,
    LOGPROBS,
    PROMPT_IDS,
    PROXY,
    RECORDED_AS,
    REQUEST_MODEL,
    RESPONSE_ID,
    RESPONSE_IDS,
    TOKEN_FACTS,
    VERSION_ATTRIBUTE,
)
from agentlightning.store.copies import replaced
from agentlightning.types.attributes import sum_of_numbers
from agentlightning.types.tracer import Span
from agentlightning.utils.json_values import (
    MOST_DIGITS,
    MOST_LEVELS,
    JsonMapping,
    JsonObject,
    as_float,
    parsed,
)

SpanAttributes: TypeAlias = Mapping[str, Any]

_PROMPT_IDS: Final = (PROMPT_IDS, "agentlightning.operation.output.prompt_token_ids")
_RESPONSE_IDS: Final = (
    RESPONSE_IDS,
    "agentlightning.operation.output.response_token_ids.0",
    "agentlightning.operation.output.choices.0.token_ids",
    "agentlightning.operation.output.choices.0.provider_specific_fields.token_ids",
)
_CONTENT: Final = re.compile(
    rf"gen_ai\.(prompt|completion|request\.functions)\.|(embedding\.input|{'|'.join(map(re.escape, TOKEN_FACTS))})$"
)
"""Attributes that hold what was said, as words or as tokens."""
_RAW_FIELD: Final = re.compile(r"llm\.[^.]+\.(id|prompt_token_ids|response_token_ids|choices)")
"""Raw requests name their attributes after the provider: `llm.openai.id`."""
_RESPONSE_ID: Final = (RESPONSE_ID, "agentlightning.operation.output.id")
_FINISH_REASON: Final = (
    f"{COMPLETION}.0.finish_reason",
    "gen_ai.response.finish_reasons",
    "gen_ai.response.finish_reason",
    "agentlightning.operation.output.choices.0.finish_reason",
)
_API_REASONS: Final[Mapping[FinishReason, str]] = {
    "stop": "stop|completed|complete|end_turn|stop_sequence|eos|eos_token",
    "length": "length|max_tokens|max_output_tokens|incomplete|model_length|model_context_window_exceeded",
    "tool_calls": "tool_calls|tool_call|tool_use|function_call",
    "content_filter": "content_filter|content_filtered|refusal|safety|guardrail_intervened",
    "cancelled": "cancelled",
    "abort": "abort|aborted",
}
"""The finish reasons of the APIs, in small letters."""
_FINISH_REASONS: Final[Mapping[str, FinishReason]] = {
    word: reason for reason, words in _API_REASONS.items() for word in words.split("|")
}


class Unreadable(Enum):
    """Type of `UNREADABLE`."""

    UNREADABLE = "unreadable"


UNREADABLE: Final = Unreadable.UNREADABLE
"""The attribute is there, but is not what it should be."""


def recorded_span_id(span: Span) -> str:
    """The id of the LLM proxy's span of the same call; empty if none is known."""
    return str(span.attributes.get(RECORDED_AS, "")).rpartition("/")[2]


def with_recorded_content(spans: Iterable[Span]) -> list[Span]:
    """The spans of an attempt; those of calls whose content only the LLM proxy stored are copies that have it too."""
    spans = list(spans)
    places = [(place, span) for place, span in enumerate(spans) if RECORDED_AS in span.attributes]
    by_id = {span.span_id: span for span in spans} if places else {}
    for place, span in places:
        holder = by_id.get(recorded_span_id(span))
        if holder is not None:
            content = {name: value for name, value in holder.attributes.items() if _CONTENT.match(name)}
            spans[place] = replaced(span, attributes={**content, **span.attributes})
    return spans


# ---------------------------------------------------------------------- tokens


def prompt_ids_of(attributes: SpanAttributes) -> list[int] | Unreadable | None:
    """Token ids of the prompt."""
    return _first_ids(attributes, _PROMPT_IDS, PROMPT_IDS)


def response_ids_of(attributes: SpanAttributes) -> list[int] | Unreadable | None:
    """Token ids of the response; of several choices, of the first."""
    ids = _first_ids(attributes, _RESPONSE_IDS, RESPONSE_IDS)
    if not ids and "token_ids" in (choice := _first_raw_choice(attributes)):
        return as_token_ids(choice["token_ids"])
    return ids


def has_tokens(attributes: SpanAttributes) -> bool:
    """Whether the tokens of the prompt and of the response are there."""
    prompt_ids, response_ids = prompt_ids_of(attributes), response_ids_of(attributes)
    return isinstance(prompt_ids, list) and isinstance(response_ids, list) and bool(prompt_ids and response_ids)


def _first_ids(attributes: SpanAttributes, names: Sequence[str], raw_field: str) -> list[int] | Unreadable | None:
    for name in names:
        if name in attributes:
            return as_token_ids(attributes[name])
    values = _raw_values(attributes, raw_field)
    return as_token_ids(values[0]) if values else None


def _raw_values(attributes: SpanAttributes, field: str) -> list[object]:
    """The attributes in which a raw request has this field, whichever provider it went to."""
    found = [_RAW_FIELD.fullmatch(name) for name in attributes if name.startswith("llm.")]
    return [attributes[match.group()] for match in found if match is not None and match.group(1) == field]


def _first_raw_choice(attributes: SpanAttributes) -> JsonMapping:
    choices = [_first_of(parsed(value)) for value in _raw_values(attributes, "choices")]
    return next((choice for choice in choices if isinstance(choice, Mapping)), {})


def _first_of(values: object) -> object:
    """Of a list, which may be text, the first; anything else as it is."""
    if isinstance(values, str) and values.startswith("["):
        values = parsed(values)
    if isinstance(values, (list, tuple)):
        return values[0] if values else None
    return values


def further_choices(attributes: SpanAttributes) -> int:
    """How many choices a call has whose tokens were recorded, beyond the first."""
    numbers = itertools.count(1)
    return next(number for number in numbers if f"{COMPLETION}.{number}.token_ids" not in attributes) - 1


def as_token_ids(value: object) -> list[int] | Unreadable:
    """A list of integers from a list, a tuple or its text; of a list of lists, the first."""
    ids = parsed(value, is_kept=False)
    if isinstance(ids, (list, tuple)) and ids and isinstance(ids[0], (list, tuple)):
        ids = ids[0]
    if not isinstance(ids, (list, tuple)) or type(sum_of_numbers(ids)) is not int:
        return UNREADABLE
    return ids if isinstance(ids, list) else list(ids)


def logprobs_of(attributes: SpanAttributes, n_tokens: int) -> list[float | None] | None:
    """One log-probability for each token of the response; None if they are missing or do not match in number."""
    entries = parsed(attributes.get(LOGPROBS), is_kept=False)
    if not isinstance(entries, (list, tuple)) or len(entries) != n_tokens:
        return None
    values = [entry.get("logprob") if isinstance(entry, Mapping) else entry for entry in entries]
    if all(type(value) is float for value in values):
        return values
    return [as_float(value) if isinstance(value, (int, float)) else None for value in values]


# ---------------------------------------------------------------------- the call


def response_id_of(attributes: SpanAttributes) -> str | None:
    """The id the model's server gave to its response."""
    for name in _RESPONSE_ID:
        value = attributes.get(name)
        if isinstance(value, str) and value:
            return value
    return next((value for value in _raw_values(attributes, "id") if isinstance(value, str) and value), None)


def requests_other_model(attributes: SpanAttributes, model: str | None) -> bool:
    """Whether a call names another model than this one; None is any model."""
    # Names of the model that a call requested: the proxy's first, for a backend may know the model by another name.
    requested = next(
        (attributes[name] for name in (f"{PROXY}.requested_model", REQUEST_MODEL) if name in attributes),
        None,
    )
    return model is not None and requested is not None and requested != model


def is_excluded(attributes: SpanAttributes) -> bool:
    """Whether the call was kept from the models of the rollout: a judge's, or another helper's."""
    return attributes.get(IS_EXCLUDED) is True


def has_failed(span: Span) -> bool:
    """Whether a call ended in an error and without a response."""
    if span.status.status_code != "ERROR" or response_ids_of(span.attributes):
        return False
    return not any(name.startswith(f"{COMPLETION}.") for name in span.attributes)


def weights_version_of(attributes: SpanAttributes) -> str | None:
    """Which version of the weights answered, as text."""
    version = attributes.get(VERSION_ATTRIBUTE)
    return None if version is None else str(version)


def version_number(version: str | None) -> int | None:
    """A version of the weights as a number; None if it is none. One of too many digits is later than any."""
    return int(version[:MOST_DIGITS]) if version is not None and version.isdecimal() else None


def finish_reason_of(attributes: SpanAttributes) -> FinishReason | None:
    """Why the response ended; of several choices, the first. None if that is not recorded, or in an unknown word."""
    found = [_first_of(attributes[name]) for name in _FINISH_REASON if name in attributes]
    word = next(filter(None, found), None) or _first_raw_choice(attributes).get("finish_reason")
    reason = _FINISH_REASONS.get(word.lower()) if isinstance(word, str) else None
    if reason is None and attributes.get(IS_CUT) is True:
        return "cancelled"
    # Not all APIs have a reason of its own for tool calls.
    if reason == "stop" and f"{COMPLETION}.0.tool_calls.0.name" in attributes:
        return "tool_calls"
    return reason


# ---------------------------------------------------------------------- flattened names


def group_genai_dict(data: JsonMapping, prefix: str) -> JsonObject | list[Any]:
    """What stands below a prefix of dotted names, as nested dictionaries and lists.

    A level with a number among its names becomes a list in the order of the numbers, and loses the other names.
    """
    return _nested({name[len(prefix) + 1 :]: value for name, value in data.items() if name.startswith(prefix + ".")})


def genai_sections(attributes: SpanAttributes) -> dict[str, JsonObject | list[Any]]:
    """What stands below `gen_ai.prompt`, `gen_ai.completion` and so on, by the last word, unflattened."""
    names = [name for name in attributes if name.startswith("gen_ai.")]
    if names == [RESPONSE_ID]:  # as wherever texts are not recorded; three times as quick
        return {"response": {"id": attributes[RESPONSE_ID]}}
    flat: dict[str, JsonObject] = {}
    for name in names:
        _, section, *rest = name.split(".", 2)
        if rest:
            flat.setdefault(section, {})[rest[0]] = attributes[name]
    return {section: _nested(below) for section, below in flat.items()}


def messages_of(attributes: SpanAttributes, section: str) -> list[JsonObject]:
    return objects_in(genai_sections(attributes).get(section))


def objects_in(values: object) -> list[JsonObject]:
    """Those entries of a list that are objects; none, if it is no list."""
    return [value for value in values if isinstance(value, dict)] if isinstance(values, list) else []


def _nested(flat: JsonMapping, levels: int = MOST_LEVELS) -> JsonObject | list[object]:
    """Names of more levels than these keep their dots."""
    leaves: JsonObject = {}
    branches: dict[str, JsonObject] = {}
    for name, value in flat.items():
        head, dot, rest = name.partition(".")
        if dot and levels:
            branches.setdefault(head, {})[rest] = value
        else:
            leaves[name] = value
    values = {**{head: _nested(rest, levels - 1) for head, rest in branches.items()}, **leaves}
    by_number = {int(head): value for head, value in values.items() if head.isdecimal() and len(head) <= MOST_DIGITS}
    if by_number:
        return [by_number[number] for number in sorted(by_number)]
    return {head: values[head] for head in (*leaves, *branches)}
