"""Views of a run with several agents: who did what, how far each task is, and how both were rewarded.

    by_agent(events)["critic"].rewards.mean
    by_task(events)["ro-1f2"].progress.open

A view adds up the events it is given; `latest_attempts` leaves out what earlier attempts did.
"""

import math
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

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

__all__ = ["Activity", "Progress", "RewardSummary", "by_agent", "by_task", "grouped", "latest_attempts"]

KeyT = TypeVar("KeyT", bound=Hashable)


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
        return math.fsum(self.values)

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
        """Who took part, in the order of appearance."""
        return tuple(dict.fromkeys(event.agent for event in self.events if event.agent is not None))

    @property
    def messages(self) -> tuple[MessageEvent, ...]:
        return tuple(event for event in self.events if isinstance(event, MessageEvent))

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """One for each call id: the last that was seen, which knows the result if any does."""
        calls = [event for event in self.events if isinstance(event, ToolCall)]
        by_id = {call.call_id or (place,): call for place, call in enumerate(calls)}
        return tuple(by_id.values())

    @property
    def progress(self) -> Progress:
        def count(kind: type[AgentEvent]) -> int:
            return sum(isinstance(event, kind) for event in self.events)

        return Progress(count(StartEvent), count(CompleteEvent), count(ErrorEvent))

    @property
    def rewards(self) -> RewardSummary:
        judged = [event for event in self.events if isinstance(event, RewardEvent)]
        totals: dict[str, float] = {}
        for event in judged:
            for reward in event.rewards if isinstance(event, SequenceReward) else ():
                totals[reward.name] = totals.get(reward.name, 0.0) + reward.value
        return RewardSummary(tuple(event.value for event in judged), totals)


def grouped(events: Iterable[AgentEvent], key: Callable[[AgentEvent], KeyT]) -> dict[KeyT, Activity]:
    """Activities by whatever a key tells of an event, in the order of appearance."""
    groups: dict[KeyT, list[AgentEvent]] = {}
    for event in events:
        groups.setdefault(key(event), []).append(event)
    return {value: Activity(tuple(group)) for value, group in groups.items()}


def by_agent(events: Iterable[AgentEvent]) -> dict[str | None, Activity]:
    """What each agent did; work of which nobody knows whose it is stands under None."""
    return grouped(events, lambda event: event.agent)


def by_task(events: Iterable[AgentEvent]) -> dict[str, Activity]:
    """What was done for each task, by rollout id."""
    return grouped(events, lambda event: event.rollout_id)


def latest_attempts(events: Iterable[AgentEvent]) -> list[AgentEvent]:
    """The events of the attempt of each rollout that appeared last."""
    kept = list(events)
    latest: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    for event in kept:
        if (event.rollout_id, event.attempt_id) not in seen:
            seen.add((event.rollout_id, event.attempt_id))
            latest[event.rollout_id] = event.attempt_id
    return [event for event in kept if latest[event.rollout_id] == event.attempt_id]
