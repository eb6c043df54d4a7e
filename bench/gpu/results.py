"""Figures of the GPU benchmarks: one JSON object a line, appended to a file that several scripts share.

A line says what was measured, with what, on which machine. A figure that could not be measured has a line as well, with
the reason, so that the report never has to guess.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results.jsonl"
PACKAGES = ("torch", "transformers", "vllm", "trl")

Figure = dict[str, Any]


def add_options(parser: argparse.ArgumentParser) -> None:
    """What every script takes: the model's folder, its name in the tables, and where figures go."""
    parser.add_argument("folder", help="of a causal language model as transformers writes it, with a chat template")
    parser.add_argument("--label", help="the model's name in the tables; the folder's name by default")
    parser.add_argument("--results", type=Path, default=RESULTS, help="file to append to (default: %(default)s)")
    parser.add_argument("--device", default="auto", help="cpu or cuda (default: a GPU if there is one)")


def label_of(options: argparse.Namespace) -> str:
    return str(options.label or Path(options.folder).resolve().name)


def add(path: Path, figure: str, **values: Any) -> Figure:
    """Print a figure and append it to the file."""
    line = {"figure": figure, **values, **machine(), "date": datetime.now(timezone.utc).isoformat(timespec="seconds")}
    text = json.dumps(line)
    print(text, flush=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    # One write in append mode: scripts that run side by side do not tear each other's lines.
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(handle, (text + "\n").encode())
    finally:
        os.close(handle)
    return line


def read(path: Path) -> list[Figure]:
    """All figures of a file in the order in which they were measured; none if there is no file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def machine() -> Figure:
    """What the figures depend on and the code does not choose."""
    return {"gpu": gpu_name(), "python": platform.python_version(), "versions": versions(), "revision": revision()}


def gpu_name() -> str | None:
    """None where torch sees no GPU."""
    try:
        import torch
    except ImportError:
        return None
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def revision() -> str | None:
    """The commit that was measured; None outside a git checkout."""
    command = ["git", "-C", str(RESULTS.parent), "describe", "--always", "--dirty"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except OSError:
        return None
    return answer.stdout.strip() or None
