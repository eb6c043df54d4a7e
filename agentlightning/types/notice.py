"""Change notices: what a subscriber to a store is told after something was committed."""

from typing import Literal, NamedTuple

__all__ = ["Notice", "NoticeKind", "NOTICE_KINDS"]

NoticeKind = Literal["rollout", "span", "resources", "metrics", "run", "worker", "gap"]

NOTICE_KINDS: tuple[NoticeKind, ...] = ("rollout", "span", "resources", "metrics", "run", "worker")


class Notice(NamedTuple):
    """One change. A named tuple, because the hot path makes one for every span."""

    kind: NoticeKind
    """`gap` means that changes before `cursor` are no longer kept: query afresh, then go on from here."""
    cursor: int = 0
    """Position in the store's order of changes; give it to `subscribe(after=…)` to resume behind it."""
    rollout_id: str | None = None
    """Rollout of a `rollout` or `span` notice."""
    attempt_id: str | None = None
    status: str | None = None
    """New status of the rollout, run or worker; `open` of a span that has begun and not ended."""
    name: str | None = None
    """Span name, resources id, run id or worker id, by kind."""
    number: int | None = None
    """Sequence id of the span if it has ended, version of the resources, or step of the metrics."""
