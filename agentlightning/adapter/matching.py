"""Which reward belongs to which model call.

A reward goes to the most recent call that was over when the reward began and has none yet. "Most recent" is the order
in which nodes are examined: by start time over the whole trace, or among siblings as they stand in the tree. A rewarded
call is never asked again, so that later rewards reach earlier calls.
"""

from collections.abc import Sequence
from enum import Enum
from typing import Protocol

from agentlightning.types.rewards import number_or_none, reward_payload_of
from agentlightning.types.tracer import Span

__all__ = ["Examined", "RewardMatchPolicy", "match_in_order"]

_NEVER = float("inf")


class RewardMatchPolicy(str, Enum):
    """Where the reward of a call is looked for."""

    FIRST_SIBLING = "first_sibling"
    """Among the spans that have the same parent."""

    FIRST_OCCURRENCE = "first_occurrence"
    """Anywhere later in the trace."""


class Examined(Protocol):
    """A node of a trace."""

    id: str
    span: Span


def match_in_order(nodes: Sequence[Examined], call_ids: set[str]) -> dict[str, float | None]:
    """Rewards of the calls, by node id, after examining the nodes once in the order given."""
    calls: list[str] = []
    waiting = _WaitingCalls(min(len(call_ids), len(nodes)))
    rewards: dict[str, float | None] = {}
    for node in nodes:
        span = node.span
        if node.id in call_ids:
            waiting.add(len(calls), _NEVER if span.end_time is None else span.end_time)
            calls.append(node.id)
        payload = reward_payload_of(span)
        if payload.get("type") != "reward" or span.start_time is None:
            continue
        latest = waiting.take_latest_over_by(span.start_time)
        if latest is not None:
            rewards[calls[latest]] = number_or_none(payload.get("value"), span)
    return rewards


class _WaitingCalls:
    """Calls without reward by position, each with its end; finds the last one that is over in logarithmic time.

    A binary tree in a list: a leaf for each position, and in each inner node the earliest end beneath it. The newest
    call is kept beside the tree, because nearly every reward is for that one.
    """

    def __init__(self, size: int) -> None:
        self._leaves = 1 << max(size - 1, 0).bit_length()
        self._earliest = [_NEVER] * (2 * self._leaves)
        self._newest: int | None = None
        self._newest_end = _NEVER

    def add(self, position: int, end: float) -> None:
        """Positions rise from call to call."""
        if self._newest is not None:
            node = self._leaves + self._newest
            while node and self._earliest[node] > self._newest_end:
                self._earliest[node] = self._newest_end
                node >>= 1
        self._newest, self._newest_end = position, end

    def take_latest_over_by(self, moment: float) -> int | None:
        """Remove and return the highest position whose call ended at this moment or before."""
        if self._newest is not None and self._newest_end <= moment:
            position, self._newest = self._newest, None
            return position
        earliest = self._earliest
        if earliest[1] > moment:
            return None
        node = 1
        while node < self._leaves:
            node = 2 * node + (earliest[2 * node + 1] <= moment)
        position = node - self._leaves
        earliest[node] = _NEVER
        while node > 1:
            node >>= 1
            earliest[node] = min(earliest[2 * node], earliest[2 * node + 1])
        return position
