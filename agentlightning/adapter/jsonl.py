"""Trajectories and triplets in a file, one a line, and back."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar, overload

from pydantic import BaseModel, ValidationError
from pydantic_core import to_json

from agentlightning.adapter.sequences import Trajectory
from agentlightning.utils.private_files import replaced_file

__all__ = ["read_jsonl", "write_jsonl"]

Record = TypeVar("Record", bound=BaseModel)


def write_jsonl(path: str | os.PathLike[str], trajectories: Iterable[BaseModel]) -> int:
    """Write trajectories, or triplets, and return how many; a file that was there is replaced once all are written."""
    count = 0
    with replaced_file(Path(path)) as file:
        for record in trajectories:
            # JSON has no infinity, but a token can have a log-probability of minus infinity.
            file.write(to_json(record.model_dump(), inf_nan_mode="constants") + b"\n")
            count += 1
    return count


@overload
def read_jsonl(path: str | os.PathLike[str]) -> list[Trajectory]: ...
@overload
def read_jsonl(path: str | os.PathLike[str], kind: type[Record]) -> list[Record]: ...
def read_jsonl(path: str | os.PathLike[str], kind: type[Any] = Trajectory) -> list[Any]:
    """What was written; pass `Triplet` as the kind to read triplets. Empty lines are skipped."""
    with Path(path).open("rb") as file:
        return [_read_line(path, kind, number, line) for number, line in enumerate(file, 1) if line.strip()]


def _read_line(path: str | os.PathLike[str], kind: type[Record], number: int, line: bytes) -> Record:
    try:
        return kind.model_validate_json(line)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the line"
        raise ValueError(f"Line {number} of {path} is no {kind.__name__}: {where}: {first['msg']}.") from error
