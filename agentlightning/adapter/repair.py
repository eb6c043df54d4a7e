"""Which span a stray belongs under: the shortest one that encloses it in time.

Frameworks that are traced by several systems leave model calls directly under the root, beside the agent that made
them. Time tells where they belong. All answers come from one sweep over the spans sorted by start, so a trace of many
thousand spans costs a sort rather than a comparison of all pairs.
"""

from bisect import bisect_left
from collections.abc import Collection, Sequence

__all__ = ["closest_enclosing"]


def closest_enclosing(
    strays: Collection[int], starts: Sequence[float | None], ends: Sequence[float | None]
) -> dict[int, int]:
    """For each stray the shortest other span that encloses it and has not the very same times.

    Spans are numbers: places in `starts` and `ends`. Of two that fit alike, the lower number is chosen. Strays that
    nothing encloses are left out, and so are spans without a start or an end.
    """
    begin = [float("nan") if start is None else start for start in starts]
    until = [float("nan") if end is None else end for end in ends]
    timed = [
        number for number in range(len(begin)) if begin[number] == begin[number] and until[number] == until[number]
    ]
    timed.sort(key=until.__getitem__, reverse=True)  # stable, so that of equal times the lowest number comes first
    timed.sort(key=begin.__getitem__)
    is_stray = bytearray(len(begin))
    for stray in strays:
        is_stray[stray] = True
    frontier = _Frontier()
    found: dict[int, int] = {}
    start = end = float("nan")
    enclosing: int | None = None
    for number in timed:
        if begin[number] != start or until[number] != end:
            start, end = begin[number], until[number]
            # Whoever came before starts earlier, or with this one and ends later: none has the very same times.
            frontier.forget_before(start)
            enclosing = frontier.shortest_then_add(end, end - start, number)
        if enclosing is not None and is_stray[number]:
            found[number] = enclosing
    return found


class _Frontier:
    """Spans that begin early enough, without those that another one always beats.

    Sorted by end; a span that ends later is also longer (or of higher number), else it would beat those before it.
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

    def shortest_then_add(self, end: float, length: float, number: int) -> int | None:
        """The shortest span so far that lasts until `end`, before another one is added that does."""
        ends, ranks = self._ends, self._ranks
        rank = (length, number)
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
