"""What a store keeps and tells besides rollouts: runs with the curves they draw, and notices of changes."""

from typing import Any, Literal, NamedTuple

from pydantic import BaseModel

__all__ = ["Run", "RunStatus", "MetricPoint", "Notice", "NoticeKind", "NOTICE_KINDS"]

RunStatus = Literal["running", "succeeded", "failed", "stopped", "lost"]
NoticeKind = Literal["rollout", "span", "resources", "metrics", "run", "worker", "gap"]
NOTICE_KINDS: tuple[NoticeKind, ...] = ("rollout", "span", "resources", "metrics", "run", "worker")


class Run(BaseModel):
    """One execution of an algorithm."""

    run_id: str
    name: str
    status: RunStatus = "running"
    """`lost` if it promised to report and has not for too long; its `end_time` is then that of its last report."""
    start_time: float
    end_time: float | None = None
    config: dict[str, Any] = {}
    """What the run was started with, as the user would write it down."""
    metadata: dict[str, Any] = {}
    summary: dict[str, Any] = {}
    """What the run reports at its end: final scores, the reason of a failure."""


class MetricPoint(BaseModel):
    """Named figures at one step of a run."""

    run_id: str
    step: int
    time: float
    values: dict[str, float]


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
