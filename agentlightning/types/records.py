"""What a store keeps and tells besides rollouts: runs with the curves they draw, notices of changes, and itself."""

from contextvars import ContextVar
from typing import Any, Final, Literal, NamedTuple

from pydantic import BaseModel
from typing_extensions import TypedDict

__all__ = ["Run", "RunStatus", "MetricPoint", "Notice", "NoticeKind", "NOTICE_KINDS"]

RunStatus = Literal["running", "succeeded", "failed", "stopped", "lost"]
NoticeKind = Literal["rollout", "span", "resources", "metrics", "run", "worker", "gap"]
NOTICE_KINDS: tuple[NoticeKind, ...] = ("rollout", "span", "resources", "metrics", "run", "worker")
CURRENT_RUN: Final[ContextVar[str | None]] = ContextVar("agl_current_run", default=None)
"""The id of the run that a trainer has under way, for what an algorithm starts; None outside of a trainer."""


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
    """Span name, resources id, run id or worker id, by kind; of a rollout, the run that its metadata names."""
    number: int | None = None
    """Sequence id of the span if it has ended, version of the resources, or step of the metrics."""


class LightningStoreCapabilities(TypedDict, total=False):
    """What a caller may rely on beyond the contract."""

    thread_safe: bool
    """May be used from several threads without a lock around it."""
    async_safe: bool
    """May be used from several event loops and tasks at once."""
    zero_copy: bool
    """May be handed to another process as it is; the other process then sees the same state."""
    otlp_traces: bool
    """Takes OpenTelemetry traces over OTLP/HTTP."""


class LightningStoreStatistics(TypedDict, total=False):
    """Counts and sizes of what a store holds."""

    name: str
    total_rollouts: int
    total_attempts: int
    total_spans: int
    total_resources: int
    total_workers: int
    total_runs: int
    queue_length: int
    uptime: float
    total_span_bytes: int
    total_rollout_bytes: int
    eviction_threshold_bytes: int
    safe_threshold_bytes: int
    memory_capacity_bytes: int
