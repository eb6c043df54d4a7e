"""Size budgets: no file above 500 lines, no function above 60, and no more than the house rules allow of a few habits.

Run by `make check`. Prints every breach with its place and exits with 1 if there is one.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
CODE = ("agentlightning", "bench", "examples", "scripts")
LONGEST_FILE = 500
LONGEST_FUNCTION = 60
LOOP_MAKER = Path("agentlightning/utils/loop_thread.py")


def breaches_of(path: Path) -> Iterator[str]:
    """Every breach in one file."""
    text = path.read_text(encoding="utf-8")
    place = path.relative_to(ROOT)
    lines = text.count("\n")
    if lines > LONGEST_FILE:
        yield f"{place}: {lines} lines, {LONGEST_FILE} is the ceiling"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > LONGEST_FUNCTION:
                yield f"{place}:{node.lineno}: {node.name} has {length} lines, {LONGEST_FUNCTION} is the ceiling"
        if isinstance(node, ast.Global):
            yield f"{place}:{node.lineno}: `global`; state has an owner"
        if isinstance(node, ast.Attribute) and node.attr == "new_event_loop" and place != LOOP_MAKER:
            yield f"{place}:{node.lineno}: a second event loop; only {LOOP_MAKER} makes one"


def main() -> int:
    files = sorted(path for folder in CODE for path in (ROOT / folder).rglob("*.py"))
    breaches = [breach for path in files for breach in breaches_of(path)]
    for breach in breaches:
        print(breach)
    print(f"{len(files)} files, {len(breaches)} breaches of the size budgets")
    return 1 if breaches else 0


if __name__ == "__main__":
    sys.exit(main())
