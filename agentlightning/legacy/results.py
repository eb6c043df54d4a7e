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
import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any, Final

from opentelemetry.sdk.trace import ReadableSpan

from agentlightning.dialects import OPENAI_DIALECTS
from agentlightning.runner.results import holds_spans, output_of, rewards_of_result
from agentlightning.semconv import AGL_REWARD
from agentlightning.types import (
    Attempt,
    AttemptedRollout,
    Attributes,
    Event,
    OtelResource,
    Rollout,
    RolloutLegacy,
    Span,
    SpanNames,
    Task,
    TraceStatus,
    Triplet,
)
from agentlightning.types.rewards import final_reward_of
from agentlightning.types.tracer import convert_timestamp
from agentlightning.utils.json_values import JsonMapping, JsonObject
from agentlightning.utils.otel import sanitize_attributes

__all__ = [
    "RESULT",
    "as_rollout",
    "entry_from_span",
    "is_report",
    "rollout_from_result",
    "rollout_from_spans",
    "span_from_entry",
    "spans_of",
]

RESULT: Final = "result"
"""Metadata key of what an agent returned that is neither a reward nor a trace."""
_CHAT: Final = OPENAI_DIALECTS["/chat/completions"]
_ONE_MICROSECOND: Final = 1e-6
_HEX_PREFIX: Final = "0x"
_TRACE_ID_DIGITS, _SPAN_ID_DIGITS = 32, 16


# ---------------------------------------------------------------------- from what an agent returned


def is_report(result: object) -> bool:
    """Whether `post_rollout` was given a whole result, which names its rollout."""
    return isinstance(result, RolloutLegacy) or (isinstance(result, Mapping) and "rollout_id" in result)


def as_rollout(rollout: object) -> RolloutLegacy:
    """A whole result, checked."""
    if not isinstance(rollout, (RolloutLegacy, Mapping)):
        raise TypeError(
            f"post_rollouts takes RolloutLegacy objects or mappings of their fields, not {type(rollout).__name__}; "
            "turn what an agent returned into one with rollout_from_result(task, result)."
        )
    return RolloutLegacy.model_validate(rollout)


def rollout_from_result(task: Task, result: object) -> RolloutLegacy:
    """What an agent returned for a task, ready to be posted.

    A number is the final reward; a list holds triplets, spans, or spans as dictionaries; a mapping holds fields of a
    `RolloutLegacy`, or rewards by name; None is a result without a reward. Text and any other value are kept as
    `metadata["result"]`.
    """
    known: JsonObject = {"rollout_id": task.rollout_id, "task": task}
    if isinstance(result, RolloutLegacy):
        return result.model_copy(update={**known, "task": result.task or task})
    if isinstance(result, Mapping):  # of fields: no others, or one that is hardly there by chance
        is_known = bool(result) and RolloutLegacy.model_fields.keys() >= result.keys()
        if is_known or not result.keys().isdisjoint({"final_reward", "triplets", "trace"}):
            return RolloutLegacy.model_validate({**known, **result})
    if isinstance(result, (list, tuple)):
        return RolloutLegacy(**known, **_fields_from_items(list(result)))
    rewards = rewards_of_result(result)
    reward = next(iter(rewards.values())) if rewards else None
    is_told = result is None or (reward is not None and not isinstance(result, Mapping))
    return RolloutLegacy(**known, final_reward=reward, metadata={} if is_told else {RESULT: output_of(result)})


def _fields_from_items(items: list[Any]) -> JsonObject:
    kinds = {Triplet if isinstance(item, Triplet) else dict if isinstance(item, dict) else object for item in items}
    if kinds == {Triplet}:
        return {"triplets": items, "final_reward": items[-1].reward}
    if kinds <= {dict}:
        return {"trace": items}
    if kinds == {object} and not holds_spans(items):
        return {"metadata": {RESULT: output_of(items)}}
    if not all(isinstance(item, (Span, ReadableSpan)) for item in items):
        raise TypeError(
            f"An agent returned a list of {sorted({type(item).__name__ for item in items})}; a list with triplets or "
            "spans in it may hold one kind of them only."
        )
    return {"trace": [entry_from_span(span) for span in items], "final_reward": final_reward_of(items)}


# ---------------------------------------------------------------------- to and from spans


def spans_of(rollout: RolloutLegacy, attempt: Attempt) -> list[Span]:
    """A reported result as spans of an attempt, in order and not yet numbered.

    Reporting the same result again gives spans with the same ids.
    """
    now = time.time()
    spans = [span_from_entry(entry, attempt, position) for position, entry in enumerate(rollout.trace or ())]

    def add(name: str, attributes: Attributes) -> None:
        position = len(spans)
        spans.append(_made_span(name, attributes, attempt, position, now + position * _ONE_MICROSECOND))

    for triplet in () if rollout.trace else rollout.triplets or ():
        add(_CHAT.span_name, _call_attributes(triplet))
        if triplet.reward is not None:
            add(AGL_REWARD, {"reward": triplet.reward})
    if rollout.final_reward is not None and rollout.final_reward != final_reward_of(spans):
        add(AGL_REWARD, {"reward": rollout.final_reward})
    return spans


def _call_attributes(triplet: Triplet) -> JsonObject:
    """A triplet as the model call that it was: token ids where there are some, messages otherwise."""
    attributes: JsonObject = {}
    prompt, response = triplet.prompt, triplet.response
    answer: JsonObject = {"id": str(triplet.metadata.get("response_id") or "")}
    if isinstance(prompt, Mapping) and "token_ids" in prompt:
        answer["prompt_token_ids"] = prompt["token_ids"]
    else:
        attributes |= _CHAT.request_attributes({"messages": _messages("user", prompt)})
    if isinstance(response, Mapping) and "token_ids" in response:
        choice = {"token_ids": response["token_ids"], "logprobs": {"content": response.get("logprobs")}}
    else:
        choice = {"message": _messages("assistant", response)[-1]}
    return attributes | {**_CHAT.response_attributes({**answer, "choices": [choice]})}


def _messages(role: str, value: object) -> list[JsonObject]:
    if isinstance(value, list) and value and all(isinstance(one, dict) for one in value):
        return value
    return [{"role": role, "content": value}]


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


# ---------------------------------------------------------------------- traces


def span_from_entry(entry: JsonMapping, attempt: Attempt, position: int) -> Span:
    """The span an entry of a trace describes, as a span of this attempt; its number is given later."""
    if not isinstance(entry.get("name"), str):
        text = json.dumps(entry, default=str)
        return _made_span(SpanNames.OBJECT.value, {"object": text}, attempt, position, attempt.start_time)
    context, status, resource = (_mapping(entry.get(name)) for name in ("context", "status", "resource"))
    made = _made_span(entry["name"], _attributes(entry), attempt, position, attempt.start_time)
    description, events = status.get("description"), entry.get("events")
    span = Span.from_attributes(
        name=made.name,
        attributes=made.attributes,
        rollout_id=made.rollout_id,
        attempt_id=made.attempt_id,
        trace_id=_hex_digits(context.get("trace_id") or made.trace_id, _TRACE_ID_DIGITS),
        span_id=_hex_digits(context.get("span_id") or made.span_id, _SPAN_ID_DIGITS),
        parent_id=_hex_digits(entry["parent_id"], _SPAN_ID_DIGITS) if entry.get("parent_id") else None,
        start_time=_seconds(entry.get("start_time")),
        end_time=_seconds(entry.get("end_time")),
        resource=OtelResource(attributes=_attributes(resource), schema_url=str(resource.get("schema_url") or "")),
        status=TraceStatus(
            status_code=str(status.get("status_code") or "UNSET"),
            description=None if description is None else str(description),
        ),
    )
    span.events += [
        Event(
            name=str(event.get("name", "")),
            attributes=_attributes(event),
            timestamp=_seconds(event.get("timestamp")),
        )
        for event in (events if isinstance(events, list) else ())
        if isinstance(event, Mapping)
    ]
    return span


def _made_span(name: str, attributes: Attributes, attempt: Attempt, position: int, moment: float) -> Span:
    """A span of no length that nobody recorded; the same content at the same position always has the same id."""
    content = json.dumps([attempt.rollout_id, attempt.attempt_id, position, name, attributes], sort_keys=True)
    return Span.from_attributes(
        name=name,
        attributes=attributes,
        rollout_id=attempt.rollout_id,
        attempt_id=attempt.attempt_id,
        trace_id=_digest(f"{attempt.rollout_id}/{attempt.attempt_id}")[:_TRACE_ID_DIGITS],
        span_id=_digest(content)[:_SPAN_ID_DIGITS],
        start_time=moment,
        end_time=moment,
    )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def _mapping(value: object) -> JsonMapping:
    return value if isinstance(value, Mapping) else {}


def _attributes(holder: JsonMapping) -> Attributes:
    attributes = _mapping(holder.get("attributes"))
    return sanitize_attributes({name: value for name, value in attributes.items() if value is not None})


def _hex_digits(value: object, digits: int) -> str:
    """An id without its `0x`, at full length."""
    text = format(value, "x") if isinstance(value, int) else str(value)
    return text.removeprefix(_HEX_PREFIX).zfill(digits)


def _seconds(value: object) -> float | None:
    """Seconds since the epoch from ISO text, seconds or nanoseconds; None for anything else."""
    if isinstance(value, (int, float)):
        return convert_timestamp(value)
    try:
        return datetime.fromisoformat(str(value).replace("Z", "+00:00")).timestamp()
    except ValueError:
        return None


def entry_from_span(span: Span | ReadableSpan) -> JsonObject:
    """A span as `ReadableSpan.to_json` writes it, also one of ours."""
    if isinstance(span, ReadableSpan):
        entry: JsonObject = json.loads(span.to_json())
        return entry
    fields = span.model_dump(mode="json", include={"name", "status", "attributes", "events", "resource"})
    return fields | {
        "context": _context_entry(span.trace_id, span.span_id),
        "kind": "SpanKind.INTERNAL",
        "parent_id": _HEX_PREFIX + span.parent_id if span.parent_id else None,
        "start_time": _iso(span.start_time),
        "end_time": _iso(span.end_time),
        "status": span.status.model_dump(mode="json", exclude_none=True),
        "events": [event | {"timestamp": _iso(event["timestamp"])} for event in fields["events"]],
        "links": [
            {
                "context": _context_entry(link.context.trace_id, link.context.span_id),
                "attributes": dict(link.attributes or {}),
            }
            for link in span.links
        ],
    }


def _context_entry(trace_id: str, span_id: str) -> dict[str, str]:
    return {"trace_id": _HEX_PREFIX + trace_id, "span_id": _HEX_PREFIX + span_id, "trace_state": "[]"}


def _iso(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
