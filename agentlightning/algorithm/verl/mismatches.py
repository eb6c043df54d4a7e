"""Why turns of a conversation could not be joined to one row, written down for who wants to mend it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import orjson

from agentlightning.adapter.sequences import BreakReason, Trajectory
from agentlightning.algorithm.verl.rows import as_trajectory
from agentlightning.types import Triplet
from agentlightning.utils.private_files import append_to

__all__ = ["MISMATCH_FILE", "write_mismatches"]

MISMATCH_FILE: Final = "mismatches.jsonl"
_MISMATCHES: Final = (
    BreakReason.RETOKENISED,
    BreakReason.TOOL_OUTPUT_INSERTED,
    BreakReason.CONTEXT_TRUNCATED,
    BreakReason.CONTEXT_EDITED,
)
"""The other reasons are new conversations, which nothing could have joined."""


def write_mismatches(rollout_id: str, data_id: str, trace: Trajectory | Sequence[Triplet], folder: Path) -> int:
    """Append a line for each mismatch to the file in the folder, which is made if need be; how many there are."""
    lines = [
        orjson.dumps({"rollout_id": rollout_id, "data_id": data_id, **one.model_dump(mode="json")})
        for one in as_trajectory(trace).breaks
        if one.reason in _MISMATCHES
    ]
    folder.mkdir(parents=True, exist_ok=True)
    with append_to(folder / MISMATCH_FILE) as file:
        file.writelines(line + b"\n" for line in lines)
    return len(lines)
