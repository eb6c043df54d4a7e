"""What the clock tells about spans: which reward belongs to which model call, and which span a stray belongs under."""

from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from enum import Enum
from typing import TYPE_CHECKING

from agentlightning.types.rewards import number_or_none, reward_payload_of

if TYPE_CHECKING:
    from agentlightning.adapter.tree import TraceTree


class RewardMatchPolicy(str, Enum):
    """Where the reward of a call is looked for."""

    FIRST_SIBLING = "first_sibling"
    """Among the spans that have the same parent."""

    FIRST_OCCURRENCE = "first_occurrence"
    """Anywhere later in the trace."""


def match_in_order(nodes: Iterable["TraceTree"], call_ids: Collection[str]) -> dict[str, float | None]:
    """Rewards of the calls by node id, from one pass over the nodes in the order given.

    A reward goes to the most recent call that was over when the reward began and has none yet, so that later rewards
    reach earlier calls.
    """
    waiting: list[TraceTree] = []
    rewards: dict[str, float | None] = {}
    for node in nodes:
        if node.id in call_ids and node.end_time is not None:
            waiting.append(node)
        payload = reward_payload_of(node.span)
        if payload.get("type") != "reward" or node.start_time is None:
            continue
        for place in range(len(waiting) - 1, -1, -1):  # as a rule the last one fits
            end = waiting[place].end_time
            if end is not None and end <= node.start_time:
                rewards[waiting.pop(place).id] = number_or_none(payload.get("value"), node.span)
                break
    return rewards


# ---------------------------------------------------------------------- strays


def closest_enclosing(strays: Collection[int], spans: Sequence["TraceTree"]) -> dict[int, int]:
    """For each stray the shortest other span that encloses it in time and has not the very same times.

    Spans are named by their places. Of two that fit alike, the first is chosen. Strays that nothing encloses are left
    out, and so are spans without a start or an end. One sweep over the spans sorted by start finds all.
    """
    timed = [
        (span.start_time, -span.end_time, place)
        for place, span in enumerate(spans)
        if span.start_time is not None and span.end_time is not None
    ]
    wanted = set(strays)
    frontier = _Frontier()
    found: dict[int, int] = {}
    times: tuple[float, float] | None = None
    enclosing: int | None = None
    for start, ends_first, place in sorted(timed):
        if (start, ends_first) != times:
            times, end = (start, ends_first), -ends_first
            # Whoever came before starts earlier, or with this one and ends later: none has the very same times.
            frontier.forget_before(start)
            enclosing = frontier.shortest_then_add(end, end - start, place)
        if enclosing is not None and place in wanted:
            found[place] = enclosing
    return found


class _Frontier:
    """Spans that begin early enough, without those that another one always beats.

    Sorted by end; a span that ends later is also longer (or comes later), else it would beat those before it.
    """

    def __init__(self) -> None:
        self._ends: list[float] = []
        self._ranks: list[tuple[float, int]] = []

    def forget_before(self, start: float) -> None:
        """Drop spans that end before all that are still to come, as soon as they are half of all."""
        ends = self._ends
        if ends and ends[len(ends) // 2] < start:
            past = bisect_left(ends, start)
            del ends[:past], self._ranks[:past]

    def shortest_then_add(self, end: float, length: float, place: int) -> int | None:
        """The shortest span so far that lasts until `end`, before another one is added that does."""
        ends, ranks = self._ends, self._ranks
        rank = (length, place)
        index = beyond = bisect_left(ends, end)
        shortest: int | None = None
        if index < len(ends):
            shortest = ranks[index][1]
            if ranks[index] < rank:
                return shortest
            beyond += ends[index] == end
        # Ranks rise with the ends, so what is beaten lies right before this place.
        first_beaten = bisect_left(ranks, rank, 0, index)
        ends[first_beaten:beyond] = [end]
        ranks[first_beaten:beyond] = [rank]
        return shortest


def movable(targets: Sequence[int | None]) -> set[int]:
    """The branches that can go under the branch they want: those that it does not hang beneath by then.

    Branches are taken in order, and one of them always stays where it is.
    """
    under = list(range(len(targets)))
    moved: set[int] = set()
    for branch, target in enumerate(targets):
        if target is None or len(moved) == len(targets) - 1:
            continue
        top = target
        while under[top] != top:
            under[top] = under[under[top]]
            top = under[top]
        if top != branch:
            under[branch] = top
            moved.add(branch)
    return moved
