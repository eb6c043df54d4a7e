"""How agents worked together in one rollout: the tasks they were given, and to whom they handed over.

Read from the spans of frameworks that divide work, such as CrewAI's tasks and the hand-overs of the OpenAI Agents SDK
and AutoGen.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from agentlightning.events.views import Progress, RewardSummary
from agentlightning.types.rewards import reward_value_of
from agentlightning.types.tracer import Span

__all__ = ["Handover", "Subtask", "handovers", "progress_of", "subtasks"]

_TASK = "crewai.task."
_FROM_AGENT, _TO_AGENT = "handoff.from_agent", "handoff.to_agent"


@dataclass(frozen=True)
class Subtask:
    """One piece of work that a crew divided its task into."""

    id: str
    name: str
    agent: str | None
    """The role it was given to."""
    status: Literal["open", "completed", "failed"]
    description: str = ""
    output: str | None = None
    rewards: RewardSummary = field(default_factory=RewardSummary)
    """Of the spans beneath."""


@dataclass(frozen=True)
class Handover:
    """An agent passed the work on."""

    from_agent: str
    to_agent: str | None
    """None if the span does not say."""
    time: float | None


def subtasks(spans: Sequence[Span]) -> list[Subtask]:
    """The pieces of work of a trace, in the order they began."""
    children: dict[str | None, list[Span]] = {}
    for span in spans:
        children.setdefault(span.parent_id, []).append(span)
    tasks = [span for span in _in_order(spans) if f"{_TASK}description" in span.attributes]
    return [_subtask(span, children) for span in tasks]


def progress_of(tasks: Sequence[Subtask]) -> Progress:
    """How far a crew is."""
    statuses = [task.status for task in tasks]
    return Progress(len(tasks), statuses.count("completed"), statuses.count("failed"))


def handovers(spans: Sequence[Span]) -> list[Handover]:
    """Who passed the work to whom, in order."""
    return [
        Handover(str(span.attributes[_FROM_AGENT]), _text(span, _TO_AGENT), span.start_time)
        for span in _in_order(spans)
        if _FROM_AGENT in span.attributes
    ]


def _in_order(spans: Sequence[Span]) -> list[Span]:
    return sorted(spans, key=lambda span: (span.start_time or 0.0, span.sequence_id))


def _subtask(span: Span, children: dict[str | None, list[Span]]) -> Subtask:
    rewards = (reward_value_of(below) for below in _in_order(list(_beneath(span, children))))
    task_id = _text(span, f"{_TASK}id") or span.span_id
    return Subtask(
        id=task_id,
        name=_text(span, f"{_TASK}name") or task_id,
        agent=_text(span, f"{_TASK}agent_role"),
        status=_status(span),
        description=_text(span, f"{_TASK}description") or "",
        output=_text(span, f"{_TASK}output"),
        rewards=RewardSummary(tuple(reward for reward in rewards if reward is not None)),
    )


def _status(span: Span) -> Literal["open", "completed", "failed"]:
    if span.status.status_code == "ERROR":
        return "failed"
    return "open" if span.end_time is None else "completed"


def _beneath(span: Span, children: dict[str | None, list[Span]]) -> Iterator[Span]:
    seen, waiting = {span.span_id}, list(children.get(span.span_id, ()))
    while waiting:
        below = waiting.pop()
        if below.span_id not in seen:
            seen.add(below.span_id)
            yield below
            waiting += children.get(below.span_id, ())


def _text(span: Span, name: str) -> str | None:
    value = span.attributes.get(name)
    return None if value is None else str(value)
