"""Filters and transformers: plain functions from events to events, and their composition.

    rewards_of_critics = pipeline(of_kind("reward"), of_agent("critic-*"))
    list(rewards_of_critics(events))

A step looks at one event at a time, so it may be given a whole run at once or a stream in pieces.
"""

from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase
from typing import TypeAlias

from agentlightning.errors import ConfigurationError
from agentlightning.events.event import AgentEvent

__all__ = ["Step", "mapped", "of_agent", "of_kind", "of_rollout", "pipeline", "where"]

Step: TypeAlias = Callable[[Iterable[AgentEvent]], Iterator[AgentEvent]]


def where(holds: Callable[[AgentEvent], bool]) -> Step:
    """Keeps events for which a condition holds."""

    def step(events: Iterable[AgentEvent]) -> Iterator[AgentEvent]:
        return (event for event in events if holds(event))

    return step


def of_kind(*kinds: str) -> Step:
    """Keeps events of these kinds; `reward` stands for `reward.binary` and its siblings too."""
    unknown = [kind for kind in kinds if not any(_is_of(known, kind) for known in _known_kinds())]
    if unknown:
        raise ConfigurationError(f"There are no events of kind {unknown}; use some of {sorted(_known_kinds())}.")
    return where(lambda event: any(_is_of(event.kind, kind) for kind in kinds))


def of_agent(*patterns: str) -> Step:
    """Keeps events of agents whose name matches one of these patterns (`critic`, `critic-*`)."""
    return where(
        lambda event: event.agent is not None and any(fnmatchcase(event.agent, pattern) for pattern in patterns)
    )


def of_rollout(*rollout_ids: str) -> Step:
    """Keeps events of these rollouts."""
    wanted = frozenset(rollout_ids)
    return where(lambda event: event.rollout_id in wanted)


def mapped(change: Callable[[AgentEvent], AgentEvent | None]) -> Step:
    """Replaces every event by another; None drops it."""

    def step(events: Iterable[AgentEvent]) -> Iterator[AgentEvent]:
        return (changed for event in events if (changed := change(event)) is not None)

    return step


def pipeline(*steps: Step) -> Step:
    """All steps, one after the other; none at all lets everything pass."""

    def step(events: Iterable[AgentEvent]) -> Iterator[AgentEvent]:
        flow = iter(events)
        for one in steps:
            flow = one(flow)
        return flow

    return step


def _is_of(kind: str, family: str) -> bool:
    return kind == family or kind.startswith(f"{family}.")


def _known_kinds() -> set[str]:
    kinds: set[str] = set()
    unseen: list[type[AgentEvent]] = [*AgentEvent.__subclasses__()]
    while unseen:
        seen = unseen.pop()
        kinds.add(seen.kind)
        unseen += seen.__subclasses__()
    return kinds
