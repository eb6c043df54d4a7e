"""Data sets as users have them, made into what algorithms read: tasks by number, with a length.

A list, or any object with a length that gives its tasks by number, stays as it is. Files of tasks and data frames are
read row by row when a row is needed, as far as their format allows it.
"""

import csv
import importlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from agentlightning.errors import ConfigurationError
from agentlightning.types import Dataset, Task

FILE_KINDS = "a .jsonl, .json, .csv or .parquet file"


class Rows(Sequence[Any]):
    """A number of rows, each of which is read when it is asked for."""

    def __init__(self, count: int, row: Callable[[int], object]) -> None:
        self._count, self._row = count, row

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return [self[one] for one in range(*number.indices(self._count))]
        if not -self._count <= number < self._count:
            raise IndexError(f"There is no row {number}; there are {self._count}.")
        return self._row(number % self._count)


def as_dataset(label: str, dataset: Any) -> Dataset[Any] | None:
    """The tasks of a data set by number; ConfigurationError, with the way out, for what does not give them."""
    if dataset is None:
        return None
    if isinstance(dataset, (str, Path)):
        return read_tasks(Path(dataset), label)
    if hasattr(dataset, "columns") and hasattr(dataset, "to_dicts"):  # polars
        return Rows(len(dataset), lambda number: dataset.row(number, named=True))
    if hasattr(dataset, "columns") and hasattr(dataset, "iloc"):  # pandas
        return Rows(len(dataset), lambda number: dataset.iloc[number : number + 1].to_dict("records")[0])
    if isinstance(dataset, (list, tuple)):
        if any(isinstance(row, BaseModel) and not isinstance(row, Task) for row in dataset):
            return Rows(len(dataset), lambda number: _plain_row(dataset[number]))
        return dataset
    is_indexed = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__") and not isinstance(dataset, Mapping)
    if not is_indexed or isinstance(dataset, bytes):
        hint = "make a list of it: list(...)" if isinstance(dataset, Iterable) else "give a list of tasks"
        if isinstance(dataset, Mapping):
            hint = "give one of its values, such as a split, or a list of tasks"
        raise ConfigurationError(
            f"{label} must have a length and give its tasks by number, as a list does, or name {FILE_KINDS}, but is of "
            f"type {type(dataset).__name__}; {hint}."
        )
    checked: Dataset[Any] = dataset
    return checked


def _plain_row(row: object) -> object:
    return row.model_dump(mode="json") if isinstance(row, BaseModel) and not isinstance(row, Task) else row


def read_tasks(path: Path, label: str = "data") -> Dataset[Any]:
    """The tasks in a file; ConfigurationError for one that cannot be read, or has none."""
    readers = {".jsonl": _json_lines, ".ndjson": _json_lines, ".json": _json, ".csv": _csv, ".parquet": _parquet}
    reader = readers.get(path.suffix.lower())
    if reader is None and not path.is_file():
        raise ConfigurationError(
            f"The {label} '{path!s:.80}' cannot be read: there is no such file; give tasks, or {FILE_KINDS}."
        )
    try:
        tasks = (reader or _json_lines)(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"The {label} '{path}' cannot be read: {error}") from error
    if not len(tasks):
        raise ConfigurationError(f"There are no tasks in '{path}'; write one in JSON on each line, or in each row.")
    return tasks


def _json_lines(path: Path) -> Dataset[Any]:
    """One task on each line, empty ones left out; every line is checked now, and read again when it is needed."""
    places: list[int] = []
    with path.open("rb") as file:
        place = 0
        for number, line in enumerate(file, 1):
            text = line.decode("utf-8")
            if text.strip():
                try:
                    json.loads(text)
                except ValueError as error:
                    raise ConfigurationError(f"Line {number} of '{path}' is not JSON: {error}") from error
                places.append(place)
            place += len(line)

    def row(number: int) -> object:
        with path.open("rb") as file:
            file.seek(places[number])
            return json.loads(file.readline())

    return Rows(len(places), row)


def _json(path: Path) -> Dataset[Any]:
    try:
        tasks = json.loads(path.read_bytes())
    except ValueError as error:
        raise ConfigurationError(f"'{path}' is not JSON: {error}") from error
    if not isinstance(tasks, list):
        raise ConfigurationError(f"'{path}' is a JSON {type(tasks).__name__}; write a list of tasks.")
    return tasks


def _csv(path: Path) -> Dataset[Any]:
    """A mapping for each row; its values are texts."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _parquet(path: Path) -> Dataset[Any]:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise ConfigurationError(f"pyarrow, which reads '{path}', is not installed; pip install pyarrow.") from error
    table = parquet.read_table(path)
    return Rows(table.num_rows, lambda number: table.slice(number, 1).to_pylist()[0])
