"""Spans by hand, for tests that need no store."""

import itertools
from typing import Any

from agentlightning.types import OtelResource, Span, TraceStatus

CHAT = "openai.chat.completion"
REWARD = "agentlightning.reward"


def span(span_id: str, parent_id: str | None = None, *, name: str = "step", **fields: Any) -> Span:
    """A span of one attempt, from `start` to `end`, by default from 0 to 1."""
    start, end = fields.pop("start", 0.0), fields.pop("end", 1.0)
    defaults: dict[str, Any] = {
        "rollout_id": "ro-1",
        "attempt_id": "at-1",
        "sequence_id": 0,
        "trace_id": f"{1:032x}",
        "status": TraceStatus(status_code="OK"),
        "attributes": {},
        "events": [],
        "links": [],
        "context": None,
        "parent": None,
        "resource": OtelResource(attributes={}, schema_url=""),
    }
    times = {"start_time": start, "end_time": end}
    return Span(**{**defaults, **times, "span_id": span_id, "parent_id": parent_id, "name": name, **fields})


def reward(span_id: str, parent_id: str | None, value: float | None, *, at: float, **fields: Any) -> Span:
    attributes = {} if value is None else {"reward": value}
    return span(span_id, parent_id, name=REWARD, start=at, end=at, attributes=attributes, **fields)


class Conversation:
    """Model calls of one attempt, one after the other, a second each."""

    def __init__(self) -> None:
        self.spans: list[Span] = [span("root", start=0.0, end=1e6)]
        self._numbers = itertools.count(1)

    def call(self, prompt: Any, response: Any, *, under: str = "root", **attributes: Any) -> Span:
        number = next(self._numbers)
        ids = {"prompt_token_ids": prompt, "response_token_ids": response, "gen_ai.response.id": f"r{number}"}
        given = {key: value for key, value in {**ids, **attributes}.items() if value is not None}
        times = {"start": float(number), "end": number + 0.5, "sequence_id": number}
        self.spans.append(span(f"call-{number}", under, name=CHAT, attributes=given, **times))
        return self.spans[-1]

    def agent(self, name: str, *, under: str = "root", calls: int = 1000) -> str:
        """An agent that lasts for so many calls."""
        number = next(self._numbers)
        times = {"start": float(number), "end": number + calls + 0.75, "sequence_id": number}
        self.spans.append(span(f"agent-{number}", under, attributes={"agent.name": name}, **times))
        return f"agent-{number}"

    def reward(self, value: float, *, under: str = "root") -> None:
        number = next(self._numbers)
        self.spans.append(reward(f"reward-{number}", under, value, at=number + 0.0, sequence_id=number))
