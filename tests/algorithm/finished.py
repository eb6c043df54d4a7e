"""Finished rollouts by hand."""

from agentlightning.adapter.trajectory import Trajectory
from agentlightning.algorithm.batches import FinishedRollout
from agentlightning.types import Rollout


def finished(
    rollout_id: str,
    group: str,
    status: str,
    reward: float | None,
    trajectory: Trajectory | None,
    error: str | None = None,
) -> FinishedRollout:
    """A rollout whose trace was read."""
    rollout = Rollout.model_validate({"rollout_id": rollout_id, "input": None, "start_time": 0.0, "status": status})
    return FinishedRollout(rollout, group, [], reward, error, trajectory=trajectory)
