"""What rollouts are filtered and sorted by besides their own fields: run, step, group, agent, error, and their task.

The first four stand in what an algorithm sends with a rollout, its metadata and its task; the error is noted on its
latest attempt. SQL keeps them in a table of their own, memory reads them where they are.
"""

from collections.abc import Mapping
from typing import Any, Final

import orjson

from agentlightning.types import Attempt, Rollout
from agentlightning.types.core import TASK_ROW

__all__ = [
    "ENDED_BADLY",
    "INDEX_COLUMNS",
    "ROLLOUT_FIELDS",
    "failure_text",
    "index_value",
    "index_values",
    "searched_text",
]

INDEX_COLUMNS: Final = ("reward", "run_id", "step", "group_id", "agent", "error")
"""In the order of `index_values`."""
ROLLOUT_FIELDS: Final = (frozenset(Rollout.model_fields) - {"config", "metadata", "output"}) | set(INDEX_COLUMNS)
"""Fields a query may filter and sort by; `input` only as a text that contains another."""
ENDED_BADLY: Final = ("failed", "timeout", "unresponsive")
"""Statuses of an attempt that are errors themselves."""


def failure_text(attempt: Attempt | None) -> str | None:
    """The error that an attempt noted, in one line; None if it noted none."""
    noted = None if attempt is None else (attempt.metadata or {}).get("error")
    if not isinstance(noted, Mapping) or not noted.get("type"):
        return None
    first_line = str(noted.get("message") or "").partition("\n")[0]
    return f"{noted['type']}: {first_line}" if first_line else str(noted["type"])


def index_values(rollout: Rollout, attempt: Attempt | None) -> tuple[float | None, Any, Any, Any, Any, str | None]:
    """What a rollout is found by, in the order of `INDEX_COLUMNS`.

    Args:
        attempt: Its latest.
    """
    metadata, task = rollout.metadata or {}, rollout.input
    run_id, step, group = metadata.get("run_id"), metadata.get("step"), metadata.get("group")
    agent = task.get("agent") if isinstance(task, dict) else None
    row = metadata.get(TASK_ROW)
    if agent is None and isinstance(row, Mapping) and isinstance(row.get("metadata"), Mapping):
        agent = row["metadata"].get("agent")
    error = failure_text(attempt)
    if error is None and attempt is not None and attempt.status in ENDED_BADLY:
        error = attempt.status
    return (
        rollout.reward,
        run_id if isinstance(run_id, str) else None,
        step if type(step) is int and abs(step) < 2**63 else None,
        group if isinstance(group, str) else None,
        agent if isinstance(agent, str) else None,
        error,
    )


def index_value(rollout: Rollout, attempt: Attempt | None, field: str) -> Any:
    """One field that a query names, of the rollout itself or of its index."""
    if field == "input":
        return orjson.dumps(rollout.input, default=str, option=orjson.OPT_NON_STR_KEYS).decode()
    if field in Rollout.model_fields:
        return getattr(rollout, field)
    return index_values(rollout, attempt)[INDEX_COLUMNS.index(field)]


def searched_text(text: str) -> str:
    """A text as it stands in the JSON of a task."""
    return orjson.dumps(text.encode(errors="replace").decode())[1:-1].decode()
