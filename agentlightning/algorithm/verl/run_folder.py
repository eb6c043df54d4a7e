"""What a program hands to verl's own process: data sets, the adapter, the proxy and the store's address.

verl's trainer runs in an actor of Ray, and its configuration holds plain values. The rest lies in a folder that only
the user may read; the configuration names it as `agentlightning.run_folder`.
"""

import importlib
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from agentlightning.adapter.base import TraceAdapter
from agentlightning.algorithm.base import Tasks
from agentlightning.errors import ConfigurationError
from agentlightning.llm_proxy import LLMProxy
from agentlightning.store.base import LightningStore
from agentlightning.types import NamedResources

ROWS_SUFFIX: Final = ".rows"
"""Of files with pickled rows, which this module writes."""
_PARTS_FILE: Final = "parts.pickle"


@dataclass(frozen=True)
class RunParts:
    """The parts of a training that verl's process needs."""

    store: LightningStore
    """A client or a server: in another process it is a client of the same store."""
    adapter: TraceAdapter[Any] | None = None
    llm_proxy: LLMProxy | None = None
    """Not started; None makes one on a free port of this machine."""
    initial_resources: NamedResources | None = None
    run_id: str | None = None
    """The run in the store to which metrics belong."""


@contextmanager
def run_folder(parts: RunParts, train_dataset: Tasks | None, val_dataset: Tasks | None) -> Iterator[dict[str, str]]:
    """A folder for the length of the block; the paths in it, by the name "folder", "train" and "val"."""
    pickling = importlib.import_module("ray.cloudpickle")  # takes what is defined in the user's script
    folder = Path(tempfile.mkdtemp(prefix="agl-verl-"))
    try:
        paths = {"folder": str(folder)}
        (folder / _PARTS_FILE).write_bytes(pickling.dumps(parts))
        for name, dataset in (("train", train_dataset), ("val", val_dataset)):
            if dataset is not None:
                paths[name] = str(folder / f"{name}{ROWS_SUFFIX}")
                rows = [dataset[number] for number in range(len(dataset))]
                Path(paths[name]).write_bytes(pickling.dumps(rows))
        yield paths
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def read_parts(folder: str) -> RunParts:
    """What `run_folder` was given."""
    parts = importlib.import_module("ray.cloudpickle").loads(Path(folder, _PARTS_FILE).read_bytes())
    assert isinstance(parts, RunParts)
    return parts


def read_rows(paths: Sequence[str]) -> list[Any]:
    """The rows of files: of ours, JSON lines, a JSON list, or Parquet."""
    return [row for path in paths for row in _read(Path(path).expanduser())]


def _read(path: Path) -> list[object]:
    try:
        if path.suffix == ROWS_SUFFIX:
            return list(importlib.import_module("ray.cloudpickle").loads(path.read_bytes()))
        if path.suffix == ".parquet":
            return list(importlib.import_module("pyarrow.parquet").read_table(path).to_pylist())
        json = importlib.import_module("orjson")
        if path.suffix == ".jsonl":
            return [json.loads(line) for line in path.read_bytes().splitlines() if line.strip()]
        rows = json.loads(path.read_bytes()) if path.suffix == ".json" else None
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"The data file '{path}' cannot be read: {error}") from error
    if not isinstance(rows, list):
        raise ConfigurationError(
            f"The data file '{path}' is none that is known; give .parquet, .jsonl, or .json with a list."
        )
    return rows
