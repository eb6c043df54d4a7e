"""Results of the v0.1 protocol: what an agent returned as a `RolloutLegacy`, and a `RolloutLegacy` as spans.

A reported result is kept twice: whole, in the metadata of its attempt, so that it can be given back as it came; and as
spans, so that everything that reads a store can read it. Triplets become model calls, rewards become reward spans. A
trace already contains its model calls, so triplets beside a trace add none.
"""

import json
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, TypeVar

from opentelemetry.sdk.trace import ReadableSpan

from agentlightning.legacy.otel_json import entry_from_span, made_span, span_from_entry
from agentlightning.runner.output import output_of
from agentlightning.runner.results import rewards_of_result
from agentlightning.semconv import AGL_REWARD
from agentlightning.types import (
    Attempt,
    AttemptedRollout,
    Attributes,
    Rollout,
    RolloutLegacy,
    Span,
    Task,
    Triplet,
)
from agentlightning.types.rewards import final_reward_of

__all__ = [
    "RESULT",
    "as_rollout",
    "final_reward_of",
    "is_report",
    "rollout_from_result",
    "rollout_from_spans",
    "spans_of",
]

MODEL_CALL = "openai.chat.completion"
"""Name under which adapters look for model calls."""

RESULT = "result"
"""Metadata key of what an agent returned that is neither a reward nor a trace."""

_TELLING_FIELDS = {"final_reward", "triplets", "trace"}
_ONE_MICROSECOND = 1e-6

ItemT = TypeVar("ItemT")


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
    known: dict[str, Any] = {"rollout_id": task.rollout_id, "task": task}
    if isinstance(result, RolloutLegacy):
        return result.model_copy(update={**known, "task": result.task or task})
    if result is None:
        return RolloutLegacy(**known)
    if isinstance(result, Real):
        return RolloutLegacy(**known, final_reward=float(result))
    if isinstance(result, str):
        return RolloutLegacy(**known, metadata={RESULT: result})
    if isinstance(result, Mapping) and _are_fields(result):
        return RolloutLegacy.model_validate({**known, **result})
    if isinstance(result, (list, tuple)):
        return RolloutLegacy(**known, **_fields_from_items(list(result)))
    rewards = rewards_of_result(result)
    reward = next(iter(rewards.values())) if rewards else None
    return RolloutLegacy(**known, final_reward=reward, metadata={RESULT: output_of(result)})


def _are_fields(result: Mapping[str, Any]) -> bool:
    """Whether a mapping holds fields of a `RolloutLegacy`: no others, or one that is hardly there by chance."""
    is_known = bool(result) and RolloutLegacy.model_fields.keys() >= result.keys()
    return is_known or not result.keys().isdisjoint(_TELLING_FIELDS)


def _fields_from_items(items: list[Any]) -> dict[str, Any]:
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
        raise _unusable(items)
    return {"metadata": {RESULT: output_of(items)}} if items else {"trace": []}


def _all_of(kind: type[ItemT], items: list[Any]) -> list[ItemT]:
    """The items if all are of one kind; otherwise, as for no items, an empty list."""
    return items if all(isinstance(item, kind) for item in items) else []


def _unusable(items: list[Any]) -> TypeError:
    kinds = sorted({type(item).__name__ for item in items})
    return TypeError(
        f"An agent returned a list of {kinds}; a list with triplets or spans in it may hold one kind of them only."
    )


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
        add(MODEL_CALL, _model_call(triplet))
        if triplet.reward is not None:
            add(AGL_REWARD, {"reward": triplet.reward})
    if rollout.final_reward is not None and rollout.final_reward != final_reward_of(spans):
        add(AGL_REWARD, {"reward": rollout.final_reward})
    return spans


def _model_call(triplet: Triplet) -> Attributes:
    attributes: Attributes = {
        **_side("prompt", "user", triplet.prompt),
        **_side("completion", "assistant", triplet.response),
    }
    response_id = triplet.metadata.get("response_id")
    if response_id is not None:
        attributes["gen_ai.response.id"] = str(response_id)
    return attributes


def _side(side: str, role: str, value: Any) -> Attributes:
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
