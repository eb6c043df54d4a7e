"""Results of the v0.1 protocol: what an agent returned as a `RolloutLegacy`, and a `RolloutLegacy` as spans.

A reported result is kept twice: whole, in the metadata of its attempt, so that it can be given back as it came; and as
spans, so that everything that reads a store can read it. Triplets become model calls, rewards become reward spans. A
trace already contains its model calls, so triplets beside a trace add none.

A trace holds spans as `ReadableSpan.to_json` writes them. It comes from whatever the client used to record it, so
reading is lenient: what is not a span is kept as an object span, ids that are missing are derived from the content (the
same entry gives the same span again), and attribute values that OpenTelemetry does not allow are kept as JSON text.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from numbers import Real
from typing import Any, TypeVar

from opentelemetry.sdk.trace import ReadableSpan

from agentlightning.runner.results import output_of, rewards_of_result
from agentlightning.semconv import AGL_REWARD
from agentlightning.types import (
    Attempt,
    AttemptedRollout,
    Attributes,
    Event,
    Link,
    OtelResource,
    Rollout,
    RolloutLegacy,
    Span,
    SpanContext,
    SpanNames,
    Task,
    TraceStatus,
    Triplet,
)
from agentlightning.types.rewards import final_reward_of
from agentlightning.types.tracer import convert_timestamp
from agentlightning.utils.json_values import JsonObject

__all__ = [
    "RESULT",
    "as_rollout",
    "entry_from_span",
    "final_reward_of",
    "is_report",
    "rollout_from_result",
    "rollout_from_spans",
    "span_from_entry",
    "spans_of",
]

MODEL_CALL = "openai.chat.completion"
"""Name under which adapters look for model calls."""

RESULT = "result"
"""Metadata key of what an agent returned that is neither a reward nor a trace."""

_TELLING_FIELDS = {"final_reward", "triplets", "trace"}
_ONE_MICROSECOND = 1e-6

ItemT = TypeVar("ItemT")
Entry = Mapping[str, Any]

_HEX_PREFIX = "0x"
_TRACE_ID_DIGITS = 32
_SPAN_ID_DIGITS = 16


# ---------------------------------------------------------------------- from what an agent returned


def is_report(given: object) -> bool:
    """Whether `post_rollout` was given a whole result, which names its rollout."""
    return isinstance(given, RolloutLegacy) or (isinstance(given, Mapping) and "rollout_id" in given)


def as_rollout(rollout: object) -> RolloutLegacy:
    """A whole result, checked."""
    if isinstance(rollout, RolloutLegacy):
        return rollout
    if isinstance(rollout, Mapping):
        return RolloutLegacy.model_validate(rollout)
    raise TypeError(
        f"post_rollouts takes RolloutLegacy objects or mappings of their fields, not {type(rollout).__name__}; "
        "turn what an agent returned into one with rollout_from_result(task, result)."
    )


def rollout_from_result(task: Task, result: object) -> RolloutLegacy:
    """What an agent returned for a task, ready to be posted.

    A number is the final reward; a list holds triplets, spans, or spans as dictionaries; a mapping holds fields of a
    `RolloutLegacy`, or rewards by name; None is a result without a reward. Text and any other value are kept as
    `metadata["result"]`.
    """
    known: JsonObject = {"rollout_id": task.rollout_id, "task": task}
    if isinstance(result, RolloutLegacy):
        return result.model_copy(update={**known, "task": result.task or task})
    if result is None:
        return RolloutLegacy(**known)
    if isinstance(result, Real):
        return RolloutLegacy(**known, final_reward=float(result))
    if isinstance(result, str):
        return RolloutLegacy(**known, metadata={RESULT: result})
    if isinstance(result, Mapping):  # of fields: no others, or one that is hardly there by chance
        is_known = bool(result) and RolloutLegacy.model_fields.keys() >= result.keys()
        if is_known or not result.keys().isdisjoint(_TELLING_FIELDS):
            return RolloutLegacy.model_validate({**known, **result})
    if isinstance(result, (list, tuple)):
        return RolloutLegacy(**known, **_fields_from_items(list(result)))
    rewards = rewards_of_result(result)
    reward = next(iter(rewards.values())) if rewards else None
    return RolloutLegacy(**known, final_reward=reward, metadata={RESULT: output_of(result)})


def _fields_from_items(items: list[object]) -> JsonObject:
    if triplets := _all_of(Triplet, items):
        return {"triplets": triplets, "final_reward": triplets[-1].reward}
    if entries := _all_of(dict, items):
        return {"trace": entries}
    if spans := _all_of(Span, items):
        return {"trace": [entry_from_span(span) for span in spans], "final_reward": final_reward_of(spans)}
    if recorded := _all_of(ReadableSpan, items):
        return {
            "trace": [json.loads(span.to_json()) for span in recorded],
            "final_reward": final_reward_of(recorded),
        }
    if any(isinstance(item, (Triplet, Span, ReadableSpan)) for item in items):
        kinds = sorted({type(item).__name__ for item in items})
        raise TypeError(
            f"An agent returned a list of {kinds}; a list with triplets or spans in it may hold one kind of them only."
        )
    return {"metadata": {RESULT: output_of(items)}} if items else {"trace": []}


def _all_of(kind: type[ItemT] | tuple[type[ItemT], ...], items: list[Any]) -> list[ItemT]:
    """The items if all are of one kind; otherwise, as for no items, an empty list."""
    return items if all(isinstance(item, kind) for item in items) else []


# ---------------------------------------------------------------------- to and from spans


def spans_of(rollout: RolloutLegacy, attempt: Attempt, now: float) -> list[Span]:
    """A reported result as spans of an attempt, in order and not yet numbered.

    Reporting the same result again gives spans with the same ids.
    """
    spans = [span_from_entry(entry, attempt, position) for position, entry in enumerate(rollout.trace or ())]

    def add(name: str, attributes: Attributes) -> None:
        position = len(spans)
        spans.append(made_span(name, attributes, attempt, position, now + position * _ONE_MICROSECOND))

    for triplet in () if rollout.trace else rollout.triplets or ():
        attributes = _side("prompt", "user", triplet.prompt) | _side("completion", "assistant", triplet.response)
        if (response_id := triplet.metadata.get("response_id")) is not None:
            attributes["gen_ai.response.id"] = str(response_id)
        add(MODEL_CALL, attributes)
        if triplet.reward is not None:
            add(AGL_REWARD, {"reward": triplet.reward})
    if rollout.final_reward is not None and rollout.final_reward != final_reward_of(spans):
        add(AGL_REWARD, {"reward": rollout.final_reward})
    return spans


def _side(side: str, role: str, value: object) -> Attributes:
    """Attributes of a prompt or a completion: token ids where there are some, messages otherwise."""
    if isinstance(value, Mapping) and isinstance(value.get("token_ids"), list):
        name = {"prompt": "prompt_token_ids", "completion": "response_token_ids"}[side]
        attributes: Attributes = {name: value["token_ids"]}
        if value.get("logprobs") is not None:
            attributes["logprobs.content"] = json.dumps(value["logprobs"])
        return attributes
    messages = (
        value if isinstance(value, list) and value and _all_of(dict, value) else [{"role": role, "content": value}]
    )
    attributes = {}
    for number, message in enumerate(messages):
        content = message.get("content")
        attributes[f"gen_ai.{side}.{number}.role"] = str(message.get("role", role))
        attributes[f"gen_ai.{side}.{number}.content"] = (
            content if isinstance(content, str) else json.dumps(content, default=str)
        )
    return attributes


def rollout_from_spans(rollout: Rollout, spans: Sequence[Span]) -> RolloutLegacy:
    """A rollout that a runner of the store finished; its metadata says with what status."""
    attempt_metadata = rollout.attempt.metadata if isinstance(rollout, AttemptedRollout) else None
    output = {} if rollout.output is None else {RESULT: rollout.output}
    return RolloutLegacy(
        rollout_id=rollout.rollout_id,
        task=Task.of_rollout(rollout),
        final_reward=final_reward_of(spans),
        trace=[entry_from_span(span) for span in spans],
        metadata={**(attempt_metadata or {}), **output, "status": rollout.status},
    )


# ---------------------------------------------------------------------- traces: reading


def span_from_entry(entry: Entry, attempt: Attempt, position: int) -> Span:
    """The span an entry of a trace describes, as a span of this attempt; its number is given later."""
    if not isinstance(entry.get("name"), str):
        text = json.dumps(entry, default=str)
        return made_span(SpanNames.OBJECT.value, {"object": text}, attempt, position, attempt.start_time)
    made = made_span(entry["name"], _attributes(entry.get("attributes")), attempt, position, attempt.start_time)
    context = _context(entry.get("context") or entry, made.trace_id, made.span_id)
    parent, resource = entry.get("parent_id"), _mapping(entry.get("resource"))
    parent_id = _hex_digits(parent, _SPAN_ID_DIGITS) if parent else None
    return made.model_copy(
        update={
            "trace_id": context.trace_id,
            "span_id": context.span_id,
            "parent_id": parent_id,
            "status": _status(_mapping(entry.get("status"))),
            "events": [_event(event) for event in _mappings(entry.get("events"))],
            "links": [_link(link) for link in _mappings(entry.get("links"))],
            "start_time": _seconds(entry.get("start_time")),
            "end_time": _seconds(entry.get("end_time")),
            "context": context,
            "parent": context.model_copy(update={"span_id": parent_id}) if parent_id else None,
            "resource": OtelResource(
                attributes=_attributes(resource.get("attributes")), schema_url=str(resource.get("schema_url") or "")
            ),
        }
    )


def made_span(name: str, attributes: Attributes, attempt: Attempt, position: int, moment: float) -> Span:
    """A span of no length that nobody recorded; the same content at the same position always has the same id."""
    content = json.dumps([attempt.rollout_id, attempt.attempt_id, position, name, attributes], sort_keys=True)
    digest = hashlib.sha256(content.encode(errors="surrogatepass")).hexdigest()
    trace = hashlib.sha256(f"{attempt.rollout_id}/{attempt.attempt_id}".encode()).hexdigest()
    return Span.from_attributes(
        name=name,
        attributes=attributes,
        rollout_id=attempt.rollout_id,
        attempt_id=attempt.attempt_id,
        trace_id=trace[:_TRACE_ID_DIGITS],
        span_id=digest[:_SPAN_ID_DIGITS],
        start_time=moment,
        end_time=moment,
    )


def _mapping(value: object) -> Entry:
    return value if isinstance(value, Mapping) else {}


def _mappings(value: object) -> list[Entry]:
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, Sequence) else []


def _attributes(value: object) -> Attributes:
    return {str(name): _attribute_value(item) for name, item in _mapping(value).items() if item is not None}


def _attribute_value(value: object) -> Any:
    if isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, list) and ({type(item) for item in value} <= {str} or _all_of((bool, int, float), value)):
        return value
    return json.dumps(value, default=str)


def _hex_digits(value: object, digits: int) -> str:
    """An id without its `0x`, at full length."""
    text = format(value, "x") if isinstance(value, int) else str(value)
    return text.removeprefix(_HEX_PREFIX).zfill(digits)


def _context(given: Entry, trace_id: str, span_id: str) -> SpanContext:
    state = given.get("trace_state")
    return SpanContext(
        trace_id=_hex_digits(given.get("trace_id") or trace_id, _TRACE_ID_DIGITS),
        span_id=_hex_digits(given.get("span_id") or span_id, _SPAN_ID_DIGITS),
        is_remote=bool(given.get("is_remote", False)),
        trace_state={str(key): str(item) for key, item in state.items()} if isinstance(state, Mapping) else {},
    )


def _status(given: Entry) -> TraceStatus:
    description = given.get("description")
    return TraceStatus(
        status_code=str(given.get("status_code") or "UNSET"),
        description=None if description is None else str(description),
    )


def _event(given: Entry) -> Event:
    name, attributes = str(given.get("name", "")), _attributes(given.get("attributes"))
    return Event(name=name, attributes=attributes, timestamp=_seconds(given.get("timestamp")))


def _link(given: Entry) -> Link:
    context = _context(_mapping(given.get("context")), "0", "0")
    return Link(context=context, attributes=_attributes(given.get("attributes")) or None)


def _seconds(value: object) -> float | None:
    """Seconds since the epoch from ISO text, seconds or nanoseconds; None for anything else."""
    if isinstance(value, (int, float)):
        return convert_timestamp(value)
    try:
        return datetime.fromisoformat(str(value).replace("Z", "+00:00")).timestamp()
    except ValueError:
        return None


# ---------------------------------------------------------------------- traces: writing


def entry_from_span(span: Span) -> JsonObject:
    """A stored span in the shape of `ReadableSpan.to_json`."""
    return {
        "name": span.name,
        "context": _context_entry(span.trace_id, span.span_id),
        "kind": "SpanKind.INTERNAL",
        "parent_id": _HEX_PREFIX + span.parent_id if span.parent_id else None,
        "start_time": _iso(span.start_time),
        "end_time": _iso(span.end_time),
        "status": span.status.model_dump(mode="json", exclude_none=True),
        "attributes": dict(span.attributes),
        "events": [
            {"name": event.name, "timestamp": _iso(event.timestamp), "attributes": dict(event.attributes)}
            for event in span.events
        ],
        "links": [
            {
                "context": _context_entry(link.context.trace_id, link.context.span_id),
                "attributes": dict(link.attributes or {}),
            }
            for link in span.links
        ],
        "resource": span.resource.model_dump(mode="json"),
    }


def _context_entry(trace_id: str, span_id: str) -> dict[str, str]:
    return {"trace_id": _HEX_PREFIX + trace_id, "span_id": _HEX_PREFIX + span_id, "trace_state": "[]"}


def _iso(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
