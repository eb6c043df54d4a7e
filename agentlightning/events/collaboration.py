"""How agents worked together in one rollout: the tasks they were given, and to whom they handed over.

Read from the spans of frameworks that divide work: CrewAI's tasks, the hand-overs of the OpenAI Agents SDK, the teams
and messages of AutoGen, and the chats of ag2.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from agentlightning.events.views import Progress, RewardSummary
from agentlightning.types.rewards import reward_value_of
from agentlightning.types.tracer import Span

__all__ = ["Handover", "Subtask", "handovers", "progress_of", "subtasks"]

SubtaskStatus = Literal["planned", "open", "completed", "failed"]
_TASK = "crewai.task."
_CREW_TASKS = "crewai.crew.tasks"
_FROM_AGENT, _TO_AGENT = "handoff.from_agent", "handoff.to_agent"
_CHAT_SENDER, _CHAT_RECIPIENT = "ag2.chat.sender", "ag2.chat.recipient"
_MESSAGE_SENDER, _MESSAGE_RECIPIENT = "sender_agent_type", "recipient_agent_type"
_AGENT = "gen_ai.agent.name"
_TEAM_ID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}$")
"""What an AutoGen team appends to the names of its members, and of its manager."""


@dataclass(frozen=True)
class Subtask:
    """One piece of work that a crew divided its task into."""

    id: str
    name: str
    agent: str | None
    """The role it was given to."""
    status: "SubtaskStatus"
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
    """The pieces of work of a trace, in the order they began, and behind them those that a crew has not begun yet.

    A task that runs, and the crew it belongs to, are among `store.query_open_spans`: give those too.
    """
    children: dict[str | None, list[Span]] = {}
    for span in spans:
        children.setdefault(span.parent_id, []).append(span)
    tasks = [span for span in _in_order(spans) if f"{_TASK}description" in span.attributes]
    crews = [span for span in _in_order(spans) if _CREW_TASKS in span.attributes and span.end_time is None]
    planned = [task for crew in crews for task in _planned(crew, children)]
    return [_subtask(span, children) for span in tasks] + planned


def progress_of(tasks: Sequence[Subtask]) -> Progress:
    """How far a crew is."""
    count = [task.status for task in tasks].count
    planned = count("planned")
    return Progress(len(tasks) - planned, count("completed"), count("failed"), planned)


def handovers(spans: Sequence[Span]) -> list[Handover]:
    """Who passed the work to whom, in order: by a hand-over, by a message, or by taking turns in a team or chat."""
    by_id = {span.span_id: span for span in spans}
    found: list[Handover] = []
    speakers: dict[str, str] = {}
    """Who has the turn, by team or chat."""
    announced: set[tuple[str, str | None]] = set()
    """Hand-overs after which the turn has not changed yet."""
    for span in _in_order(spans):
        passed = _passed(span)
        if passed is not None:
            found.append(passed)
        if passed is not None and _FROM_AGENT in span.attributes:
            announced.add((passed.from_agent, passed.to_agent))
        if _CHAT_RECIPIENT in span.attributes:
            speakers[span.span_id] = str(span.attributes[_CHAT_RECIPIENT])
        conversation = _conversation_of(span, by_id)
        if conversation is None:
            continue
        speaker = str(span.attributes[_AGENT])
        before = speakers.get(conversation, speaker)
        if before != speaker and (before, speaker) not in announced:
            found.append(Handover(before, speaker, span.start_time))
        announced.discard((before, speaker))
        speakers[conversation] = speaker
    return found


def _passed(span: Span) -> Handover | None:
    """The hand-over that a span itself tells of."""
    if _FROM_AGENT in span.attributes:
        return Handover(str(span.attributes[_FROM_AGENT]), _text(span, _TO_AGENT), span.start_time)
    if _CHAT_SENDER in span.attributes:
        return Handover(str(span.attributes[_CHAT_SENDER]), _text(span, _CHAT_RECIPIENT), span.start_time)
    sender, recipient = _text(span, _MESSAGE_SENDER), _text(span, _MESSAGE_RECIPIENT)
    # Within a team every message goes to all members, and its manager gives the turn.
    if sender is None or recipient is None or _TEAM_ID.search(sender) or _TEAM_ID.search(recipient):
        return None
    return Handover(sender, recipient, span.start_time)


def _conversation_of(span: Span, by_id: Mapping[str, Span]) -> str | None:
    """The team or chat in which an agent takes its turn with this span; None if it does not."""
    if _AGENT not in span.attributes:
        return None
    above = by_id.get(span.parent_id or "")
    if above is not None and (team := _TEAM_ID.search(_text(above, _MESSAGE_RECIPIENT) or "")):
        return team.group()
    seen: set[str] = set()
    while above is not None and above.span_id not in seen:
        if _CHAT_RECIPIENT in above.attributes:
            return above.span_id
        seen.add(above.span_id)
        above = by_id.get(above.parent_id or "")
    return None


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


def _planned(crew: Span, children: dict[str | None, list[Span]]) -> list[Subtask]:
    """Tasks that a running crew has not begun; of those it says only how many there are."""
    begun = sum(f"{_TASK}description" in span.attributes for span in children.get(crew.span_id, ()))
    total = crew.attributes[_CREW_TASKS]
    numbers = range(begun + 1, (total if isinstance(total, int) else 0) + 1)
    return [Subtask(f"{crew.span_id}.{number}", f"task {number}", None, "planned") for number in numbers]


def _status(span: Span) -> SubtaskStatus:
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
