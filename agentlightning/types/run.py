"""Runs and metrics: one training or optimisation, and the curves it draws."""

from typing import Any, Literal

from pydantic import BaseModel

__all__ = ["Run", "RunStatus", "MetricPoint"]

RunStatus = Literal["running", "succeeded", "failed", "stopped", "lost"]


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
