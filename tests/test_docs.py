"""The Python in README.md and docs/ runs: the blocks of a page, in order, in one namespace.

Each page is run by this same file in a process and a folder of its own, with warnings as errors; a page that leaves
threads behind fails. Blocks may use `await` at the top level. One with `<!-- not run: reason -->` on the line before it
is left out.
"""

import ast
import asyncio
import inspect
import json
import re
import sys
import threading
import types
from collections.abc import Iterator
from inspect import CO_COROUTINE
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
FENCE = "```python"
BLOCK = re.compile(r"(?P<skip>^<!-- not run: [^\n]+ -->\n)?^```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
PAGE_TIMEOUT_SECONDS = 60
ENDING_SECONDS = 5.0


def pages() -> list[Path]:
    written = [ROOT / "README.md", ROOT / "README.zh.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page for page in written if FENCE in page.read_text(encoding="utf-8")]


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_the_code_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    from tests import warm_python  # the process of a page reads this file too, and does not know this package

    command = [sys.executable, "-W", "error", __file__, str(page)]
    done = warm_python.run(command, cwd=tmp_path, timeout=PAGE_TIMEOUT_SECONDS, kind=warm_python.TorchPopen)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "Exception ignored" not in done.stderr, done.stderr


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_every_fence_of_a_page_is_understood(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert len(BLOCK.findall(text)) == text.count(FENCE)


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "how-to").glob("*.md")), ids=name_of)
def test_a_how_to_says_what_you_get_and_can_be_pasted_into_a_file(page: Path) -> None:
    heading, opening, *_ = page.read_text(encoding="utf-8").split("\n\n")

    assert (heading[:2], opening[:9]) == ("# ", "You get: ")
    compile("\n".join(blocks(page)), str(page), "exec")


def test_every_public_name_is_in_the_reference() -> None:
    import agentlightning as agl

    text = "\n".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "reference").glob("*.md"))
    objects = [(path.rpartition(".")[2], resolve_name(path)) for path in re.findall(r"^::: (\S+)", text, re.MULTILINE)]
    shown = {name for name, _ in objects} | {
        name for _, found in objects if inspect.ismodule(found) for name in dir(found)
    }

    assert [name for name in agl.__all__ if name[0] != "_" and name not in shown and f"`{name}`" not in text] == []


def test_the_environment_page_names_every_variable() -> None:
    from agentlightning.env_var import LightningEnvVar

    text = (ROOT / "docs" / "reference" / "environment.md").read_text(encoding="utf-8")

    assert [variable.value for variable in LightningEnvVar if f"`{variable.value}`" not in text] == []


def test_the_reference_of_commands_and_routes_is_that_of_the_code() -> None:
    from scripts import write_reference as reference

    cli = reference.CLI.read_text(encoding="utf-8")
    openapi = json.loads(reference.OPENAPI.read_text(encoding="utf-8"))  # compared with a server's by its own test

    assert reference.cli_page(cli) == cli, "run `make reference`, and commit docs/reference"
    assert reference.routes_page(openapi) == reference.ROUTES.read_text(encoding="utf-8"), "run `make reference`"


# ---------------------------------------------------------------------- in the page's process


def blocks(page: Path) -> Iterator[str]:
    """The code to run, each block at its own line, so that a traceback points into the page."""
    text = page.read_text(encoding="utf-8")
    for match in BLOCK.finditer(text):
        if match["skip"] is None:
            yield "\n" * text.count("\n", 0, match.start("code")) + match["code"]


def run_page(page: Path) -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    loop = asyncio.new_event_loop()
    try:
        for block in blocks(page):
            code = compile(block, str(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            run = types.FunctionType(code, namespace)
            if code.co_flags & CO_COROUTINE:
                loop.run_until_complete(run())
            else:
                run()
        pending = [task.get_name() for task in asyncio.all_tasks(loop)]
        assert not pending, f"{page} leaves tasks behind: {pending}"
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
    finally:
        loop.close()
    others = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
    for thread in others:
        thread.join(ENDING_SECONDS)  # those that were told to end may not have had their turn yet
    left = [thread.name for thread in others if thread.is_alive()]
    assert not left, f"{page} leaves threads behind: {left}"


if __name__ == "__main__":
    run_page(Path(sys.argv[1]))
