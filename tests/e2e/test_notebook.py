"""The notebook of the examples runs from its first cell to its last, inside a running event loop as in Jupyter.

Its cells are compiled as IPython compiles them, with `await` at the top level, and run one after the other on the main
thread while the loop of that thread runs. This is what differs between a kernel and a script.
"""

import ast
import asyncio
import json
import sys
import types
from inspect import CO_COROUTINE
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook" / "first_training.ipynb"


def cells() -> list[dict[str, Any]]:
    read: list[dict[str, Any]] = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in read if cell["cell_type"] == "code"]


def test_its_cells_run_in_a_running_event_loop(tmp_path: Path) -> None:
    import pytest

    from tests import tutorials, warm_python

    pytest.importorskip("torch", reason="it trains the tiny model")
    sources = ["".join(cell["source"]) for cell in cells()]
    short = tutorials.shortened("\0".join(sources)).split("\0")
    command = [sys.executable, __file__, json.dumps(short)]

    done = warm_python.run(command, cwd=tmp_path, timeout=100, kind=warm_python.TorchPopen)

    assert done.returncode == 0, done.stderr
    *_, summary, _, _, _, _, newest = done.stdout.splitlines()
    assert tutorials.LAST_LINE.search(summary), done.stdout
    assert " -> " in newest
    assert "reward" in newest


def test_it_is_kept_without_outputs() -> None:
    assert [(cell["outputs"], cell["execution_count"]) for cell in cells()] == [([], None)] * len(cells())


# ---------------------------------------------------------------------- in the notebook's process


async def run_cells(sources: list[str]) -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for number, source in enumerate(sources, 1):
        code = compile(source, f"cell {number}", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        result = types.FunctionType(code, namespace)()
        if code.co_flags & CO_COROUTINE:
            await result


if __name__ == "__main__":
    asyncio.run(run_cells(json.loads(sys.argv[1])))
