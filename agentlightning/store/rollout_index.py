"""What rollouts are filtered and sorted by besides their own fields: run, step, group, agent, error, and their task.

The first four stand in what an algorithm sends with a rollout, its metadata and its task; the error is noted on its
latest attempt. SQL keeps them in a table of their own, memory reads them where they are.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

import orjson

from agentlightning.types import Attempt, Rollout
from agentlightning.types.core import TASK_ROW

ENDED_BADLY: Final = ("failed", "timeout", "unresponsive")
"""Statuses of an attempt that are errors themselves."""


def failure_text(attempt: Attempt | None) -> str | None:
    """The error that an attempt noted, in one line; None if it noted none."""
    noted = None if attempt is None else (attempt.metadata or {}).get("error")
    if not isinstance(noted, Mapping) or not noted.get("type"):
        return None
    first_line = str(noted.get("message") or "").partition("\n")[0]
    return f"{noted['type']}: {first_line}" if first_line else str(noted["type"])


def _text_in_metadata(name: str, rollout: Rollout) -> str | None:
    value = (rollout.metadata or {}).get(name)
    return value if isinstance(value, str) else None


def _step_of(rollout: Rollout) -> int | None:
    step = (rollout.metadata or {}).get("step")
    return step if type(step) is int and abs(step) < 2**63 else None


def _agent_of(rollout: Rollout) -> str | None:
    """The agent that a task names, in itself or in the metadata of a `Task`."""
    agent = rollout.input.get("agent") if isinstance(rollout.input, dict) else None
    row = (rollout.metadata or {}).get(TASK_ROW)
    if agent is None and isinstance(row, Mapping) and isinstance(row.get("metadata"), Mapping):
        agent = row["metadata"].get("agent")
    return agent if isinstance(agent, str) else None


def _error_of(attempt: Attempt | None) -> str | None:
    noted = failure_text(attempt)
    return attempt.status if noted is None and attempt is not None and attempt.status in ENDED_BADLY else noted


_READERS: Final[Mapping[str, Callable[[Rollout, Attempt | None], Any]]] = {
    "reward": lambda rollout, _: rollout.reward,
    "run_id": lambda rollout, _: _text_in_metadata("run_id", rollout),
    "step": lambda rollout, _: _step_of(rollout),
    "group_id": lambda rollout, _: _text_in_metadata("group", rollout),
    "agent": lambda rollout, _: _agent_of(rollout),
    "error": lambda _, attempt: _error_of(attempt),
    "input": lambda rollout, _: orjson.dumps(rollout.input, default=str, option=orjson.OPT_NON_STR_KEYS).decode(),
}
INDEX_COLUMNS: Final = tuple(name for name in _READERS if name != "input")
ROLLOUT_FIELDS: Final = (frozenset(Rollout.model_fields) - {"config", "metadata", "output"}) | set(INDEX_COLUMNS)
"""Fields a query may filter and sort by; `input` only as a text that contains another."""


def index_values(rollout: Rollout, attempt: Attempt | None) -> list[Any]:
    """What a rollout is found by, in the order of `INDEX_COLUMNS`.

    Args:
        attempt: Its latest.
    """
    return [_READERS[name](rollout, attempt) for name in INDEX_COLUMNS]


def index_value(rollout: Rollout, attempt: Attempt | None, field: str) -> Any:
    """One field that a query names, of the rollout itself or of its index."""
    reader = _READERS.get(field)
    return getattr(rollout, field) if reader is None else reader(rollout, attempt)


def searched_text(text: str) -> str:
    """A text as it stands in the JSON of a task."""
    return orjson.dumps(text.encode(errors="replace").decode())[1:-1].decode()
