"""Views of a run: filters over its events, who did what, how far each task is, and how agents worked together.

    rewards_of_critics = pipeline(of_kind("reward"), of_agent("critic-*"))
    by_agent(rewards_of_critics(events))["critic-1"].rewards.mean
    by_task(events)["ro-1f2"].progress.open

A filter looks at one event at a time, so it takes a whole run or a stream in pieces. `subtasks` and `handovers` read
the spans of frameworks that divide work: CrewAI's tasks, the handoffs of the OpenAI Agents SDK, the teams and messages
of AutoGen, and the chats of ag2.
"""

import math
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal, TypeAlias, TypeVar

from agentlightning.errors import ConfigurationError
from agentlightning.events.event import (
    AgentEvent,
    CompleteEvent,
    ErrorEvent,
    MessageEvent,
    RewardEvent,
    SequenceReward,
    StartEvent,
    ToolCall,
)
from agentlightning.semconv import AGENT_NAME
from agentlightning.types.rewards import reward_value_of
from agentlightning.types.tracer import Span
from agentlightning.utils.json_values import MOST_LEVELS

KeyT = TypeVar("KeyT", bound=Hashable)
Step: TypeAlias = Callable[[Iterable[AgentEvent]], Iterator[AgentEvent]]

# ---------------------------------------------------------------------- filters


def where(holds: Callable[[AgentEvent], bool]) -> Step:
    """Keep events for which a condition holds."""
    return mapped(lambda event: event if holds(event) else None)


def mapped(change: Callable[[AgentEvent], AgentEvent | None]) -> Step:
    """Replace every event by another; None drops it."""

    def step(events: Iterable[AgentEvent]) -> Iterator[AgentEvent]:
        return (changed for event in events if (changed := change(event)) is not None)

    return step


def of_kind(*kinds: str) -> Step:
    """Keep events of these kinds; `reward` includes `reward.binary` and its siblings."""
    known = {kind.kind for family in AgentEvent.__subclasses__() for kind in (family, *family.__subclasses__())}
    if unknown := [kind for kind in kinds if kind not in known]:
        raise ConfigurationError(f"There are no events of kind {unknown}; use some of {sorted(known)}.")
    families = tuple(f"{kind}." for kind in kinds)
    return where(lambda event: f"{event.kind}.".startswith(families))


def of_agent(*patterns: str) -> Step:
    """Keep events of agents whose name matches one of these patterns (`critic`, `critic-*`)."""
    return where(lambda event: any(event.agent is not None and fnmatchcase(event.agent, each) for each in patterns))


def of_rollout(*rollout_ids: str) -> Step:
    """Keep events of these rollouts."""
    return where(lambda event: event.rollout_id in rollout_ids)


def pipeline(*steps: Step) -> Step:
    """All steps, one after the other; none at all lets everything pass."""

    def step(events: Iterable[AgentEvent]) -> Iterator[AgentEvent]:
        flow = iter(events)
        for one in steps:
            flow = one(flow)
        return flow

    return step


# ---------------------------------------------------------------------- sums


@dataclass(frozen=True)
class Progress:
    """How much work began and how it ended."""

    started: int = 0
    completed: int = 0
    failed: int = 0
    """Errors, also those that were reported in the middle of work."""
    planned: int = 0
    """Work that is known to come and has not begun."""

    @property
    def total(self) -> int:
        """All work, begun or not."""
        return self.started + self.planned

    @property
    def open(self) -> int:
        """Work that began and has not completed or failed."""
        return max(self.started - self.completed - self.failed, 0)

    @property
    def fraction(self) -> float:
        """The part of all work that has ended; 0 before any began."""
        return 1.0 - (self.open + self.planned) / self.total if self.started else 0.0


@dataclass(frozen=True)
class RewardSummary:
    """Rewards added up; of several in one event, the primary one counts."""

    values: tuple[float, ...] = ()
    totals_by_name: dict[str, float] = field(default_factory=dict)
    """Sums of the named rewards of `SequenceReward` events."""

    @property
    def count(self) -> int:
        return len(self.values)

    @property
    def total(self) -> float:
        return math.fsum(self.values) if all(map(math.isfinite, self.values)) else sum(self.values)

    @property
    def mean(self) -> float | None:
        """None if there is no reward."""
        return self.total / self.count if self.values else None

    @property
    def final(self) -> float | None:
        """The reward that came last."""
        return self.values[-1] if self.values else None


@dataclass(frozen=True)
class Activity:
    """What one agent did, or what was done for one task."""

    events: tuple[AgentEvent, ...]
    """In the order given."""

    @property
    def agents(self) -> tuple[str, ...]:
        """The agents that took part, in the order of appearance."""
        return tuple(dict.fromkeys(event.agent for event in self.events if event.agent is not None))

    @property
    def messages(self) -> tuple[MessageEvent, ...]:
        return tuple(event for event in self.events if isinstance(event, MessageEvent))

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """One for each call id: the last one, which has the result if any does."""
        calls = [event for event in self.events if isinstance(event, ToolCall)]
        return tuple({call.call_id or (place,): call for place, call in enumerate(calls)}.values())

    @property
    def progress(self) -> Progress:
        kinds = [type(event) for event in self.events]
        return Progress(kinds.count(StartEvent), kinds.count(CompleteEvent), kinds.count(ErrorEvent))

    @property
    def rewards(self) -> RewardSummary:
        rewarded = [event for event in self.events if isinstance(event, RewardEvent)]
        totals: dict[str, float] = {}
        for event in rewarded:
            for reward in event.rewards if isinstance(event, SequenceReward) else ():
                totals[reward.name] = totals.get(reward.name, 0.0) + reward.value
        return RewardSummary(tuple(event.value for event in rewarded), totals)


def grouped(events: Iterable[AgentEvent], key: Callable[[AgentEvent], KeyT]) -> dict[KeyT, Activity]:
    """Activities by a key of each event, in the order of appearance."""
    groups: dict[KeyT, list[AgentEvent]] = {}
    for event in events:
        groups.setdefault(key(event), []).append(event)
    return {value: Activity(tuple(group)) for value, group in groups.items()}


def by_agent(events: Iterable[AgentEvent]) -> dict[str | None, Activity]:
    """What each agent did; work of unknown agents is under None."""
    return grouped(events, lambda event: event.agent)


def by_task(events: Iterable[AgentEvent]) -> dict[str, Activity]:
    """What was done for each task, by rollout id."""
    return grouped(events, lambda event: event.rollout_id)


# ---------------------------------------------------------------------- collaboration

_TASK = "crewai.task."
_FROM_AGENT, _TO_AGENT = "handoff.from_agent", "handoff.to_agent"
_CHAT_SENDER, _CHAT_RECIPIENT = "ag2.chat.sender", "ag2.chat.recipient"
_MESSAGE_SENDER, _MESSAGE_RECIPIENT = "sender_agent_type", "recipient_agent_type"
_TEAM_ID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}$")
"""What an AutoGen team appends to the names of its members, and of its manager."""


@dataclass(frozen=True)
class Subtask:
    """One piece of work that a crew divided its task into."""

    id: str
    name: str
    agent: str | None
    """The role it was given to."""
    status: Literal["planned", "open", "completed", "failed"]
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
    """The pieces of work of a trace, in the order they began, then those that a crew has not begun yet.

    A running task and its crew are among `store.query_open_spans`: pass those too.
    """
    in_order = _in_order(spans)
    children: dict[str | None, list[Span]] = {}
    for span in in_order:
        children.setdefault(span.parent_id, []).append(span)
    found = [_subtask(span, children) for span in in_order if f"{_TASK}description" in span.attributes]
    for crew in in_order:
        total = crew.attributes.get("crewai.crew.tasks")
        if isinstance(total, int) and crew.end_time is None:
            begun = sum(f"{_TASK}description" in span.attributes for span in children.get(crew.span_id, ()))
            numbers = range(begun + 1, min(total, 1000) + 1)  # a span that says more is not believed
            found += [Subtask(f"{crew.span_id}.{number}", f"task {number}", None, "planned") for number in numbers]
    return found


def _subtask(span: Span, children: Mapping[str | None, Sequence[Span]]) -> Subtask:
    beneath = {span.span_id: span}
    waiting = [span]
    while waiting:
        for child in children.get(waiting.pop().span_id, ()):
            if child.span_id not in beneath:
                beneath[child.span_id] = child
                waiting.append(child)
    rewards = (reward_value_of(each) for each in _in_order(beneath.values()) if each is not span)
    task_id = _text(span, f"{_TASK}id") or span.span_id
    has_failed = span.status.status_code == "ERROR"
    return Subtask(
        id=task_id,
        name=_text(span, f"{_TASK}name") or task_id,
        agent=_text(span, f"{_TASK}agent_role"),
        status="failed" if has_failed else "open" if span.end_time is None else "completed",
        description=_text(span, f"{_TASK}description") or "",
        output=_text(span, f"{_TASK}output"),
        rewards=RewardSummary(tuple(reward for reward in rewards if reward is not None)),
    )


def progress_of(tasks: Sequence[Subtask]) -> Progress:
    """How far a crew is."""
    count = [task.status for task in tasks].count
    planned = count("planned")
    return Progress(len(tasks) - planned, count("completed"), count("failed"), planned)


def handovers(spans: Sequence[Span]) -> list[Handover]:
    """The agents that passed work on, in order: by a handoff, a message, or taking turns in a team or chat."""
    by_id = {span.span_id: span for span in spans}
    found: list[Handover] = []
    speakers: dict[str, str] = {}
    """Who has the turn, by team or chat."""
    announced: set[tuple[str, str | None]] = set()
    """Handoffs after which the turn has not changed yet."""
    for span in _in_order(spans):
        explicit = _explicit_handover(span)
        if explicit is not None:
            found.append(explicit)
            if _FROM_AGENT in span.attributes:
                announced.add((explicit.from_agent, explicit.to_agent))
        if _CHAT_RECIPIENT in span.attributes:
            speakers[span.span_id] = str(span.attributes[_CHAT_RECIPIENT])
        conversation = _conversation_of(span, by_id)
        if conversation is not None:
            speaker = str(span.attributes[AGENT_NAME])
            before = speakers.get(conversation, speaker)
            if before != speaker and (before, speaker) not in announced:
                found.append(Handover(before, speaker, span.start_time))
            announced.discard((before, speaker))
            speakers[conversation] = speaker
    return found


def _explicit_handover(span: Span) -> Handover | None:
    """The handover that a span itself describes."""
    for sender_key, recipient_key in ((_FROM_AGENT, _TO_AGENT), (_CHAT_SENDER, _CHAT_RECIPIENT)):
        if sender_key in span.attributes:
            return Handover(str(span.attributes[sender_key]), _text(span, recipient_key), span.start_time)
    sender, recipient = _text(span, _MESSAGE_SENDER), _text(span, _MESSAGE_RECIPIENT)
    # Within a team every message goes to all members, and its manager gives the turn.
    if sender is None or recipient is None or _TEAM_ID.search(sender) or _TEAM_ID.search(recipient):
        return None
    return Handover(sender, recipient, span.start_time)


def _conversation_of(span: Span, by_id: Mapping[str, Span]) -> str | None:
    """The team or chat in which an agent takes its turn with this span; None if it does not."""
    if AGENT_NAME not in span.attributes:
        return None
    above = by_id.get(span.parent_id or "")
    if above is not None and (team := _TEAM_ID.search(_text(above, _MESSAGE_RECIPIENT) or "")):
        return team.group()
    return next((each.span_id for each in upwards(above, by_id) if _CHAT_RECIPIENT in each.attributes), None)


def upwards(span: Span | None, by_id: Mapping[str, Span]) -> Iterator[Span]:
    """The span and those around it, from the inside, `MOST_LEVELS` at most; a circle comes several times."""
    for _ in range(MOST_LEVELS):
        if span is None:
            return
        yield span
        span = by_id.get(span.parent_id or "")


def _in_order(spans: Iterable[Span]) -> list[Span]:
    return sorted(spans, key=lambda span: (span.start_time or 0.0, span.sequence_id))


def _text(span: Span, name: str) -> str | None:
    value = span.attributes.get(name)
    return None if value is None else str(value)
