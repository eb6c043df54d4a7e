"""Size budgets: of every package, file and function, and no more than the house rules allow of a few habits.

Run by `make check`. Prints the size of every package beside its ceiling, every breach with its place, and exits with 1
if there is one. A change that needs more room raises the ceiling here and says why; one that needs less lowers it.
"""

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "agentlightning"
CODE = ("agentlightning", "bench", "examples", "scripts")
LONGEST_FILE = 500
LONGEST_FUNCTION = 60
LOOP_MAKER = Path("agentlightning/utils/loop_thread.py")
TOP_LEVEL = "(top level)"
KNOW_THE_PAST = (Path("agentlightning/legacy"), Path("agentlightning/store/composed.py"))
OLD_RELEASE = re.compile(
    r"\bv0\.1\b|\b0\.[123](\.\d+)? release|releases? 0\.[123]\b|\b(earlier|older|old|previous) releases?\b",
    re.IGNORECASE,
)
"""A word about the releases that the package is compatible with; all that knows of them stands in two places."""

CEILINGS = {
    TOP_LEVEL: (1_071, 550),
    "adapter": (2_450, 1_510),
    "algorithm": (12_330, 8_030),
    "asgi": (930, 630),
    "cli": (3_790, 2_030),
    "dashboard": (90, 40),
    "dialects": (3_400, 2_310),
    "emitter": (740, 440),
    "engine": (6_260, 4_185),
    "events": (1_330, 840),
    "execution": (1_900, 1_233),
    "instrumentation": (3_820, 2_370),
    "legacy": (2_340, 1_470),
    "litagent": (1_505, 925),
    "llm_proxy": (4_425, 3_090),
    "runner": (1_480, 1_040),
    "store": (12_450, 7_805),
    "tracer": (1_735, 1_110),
    "trainer": (2_770, 1_815),
    "types": (1_910, 1_170),
    "utils": (2_400, 1_540),
    "verdict": (1_190, 715),
    "verl": (120, 80),
}
"""Physical lines and statements that a package may have."""
RETIRED = frozenset(
    [
        "Abilities",
        "Ask",
        "Asked",
        "Attended",
        "CallJudge",
        "Collector",
        "Course",
        "Deaths",
        "Deliveries",
        "Delivery",
        "Doorkeeper",
        "Exchange",
        "Fleet",
        "HeardProgram",
        "Lane",
        "Ledgers",
        "Listening",
        "OutgoingCall",
        "Pace",
        "Parcel",
        "SettledCalls",
        "Shift",
        "Surroundings",
        "Switches",
        "Turns",
        "Weaver",
        "looks_at_nothing",
        "settle_calls",
    ]
)
"""Names that had to be learned, and were replaced by the trade's words."""


@dataclass
class Size:
    """How large a package is; statements count, so that shorter docstrings alone make nothing smaller."""

    lines: int = 0
    statements: int = 0


def sizes() -> dict[str, Size]:
    """The size of every package."""
    found: defaultdict[str, Size] = defaultdict(Size)
    for path in PACKAGE.rglob("*.py"):
        place = path.relative_to(PACKAGE)
        size = found[TOP_LEVEL if len(place.parts) == 1 else place.parts[0]]
        text = path.read_text(encoding="utf-8")
        size.lines += text.count("\n")
        size.statements += sum(isinstance(node, ast.stmt) for node in ast.walk(ast.parse(text)))
    return dict(sorted(found.items()))


def breaches_of_packages(found: dict[str, Size]) -> Iterator[str]:
    """Packages that are larger than they may be, or have no ceiling; ceilings without a package."""
    for name, size in found.items():
        if name not in CEILINGS:
            yield f"{name}: {size.lines} lines, {size.statements} statements, and no ceiling in {Path(__file__).name}"
            continue
        for count, ceiling, noun in zip(
            (size.lines, size.statements), CEILINGS[name], ("lines", "statements"), strict=True
        ):
            if count > ceiling:
                yield f"{name}: {count} {noun}, {ceiling} is the ceiling"
    yield from (f"{name}: a ceiling in {Path(__file__).name}, and no such package" for name in CEILINGS.keys() - found)


def breaches_of(path: Path) -> Iterator[str]:
    """Every breach in one file."""
    text = path.read_text(encoding="utf-8")
    place = path.relative_to(ROOT)
    lines = text.count("\n")
    if lines > LONGEST_FILE:
        yield f"{place}: {lines} lines, {LONGEST_FILE} is the ceiling"
    if PACKAGE in path.parents and not any(place.is_relative_to(known) for known in KNOW_THE_PAST):
        for number, line in enumerate(text.splitlines(), start=1):
            if mention := OLD_RELEASE.search(line):
                yield f"{place}:{number}: '{mention.group()}'; only legacy/ and store/composed.py know earlier releases"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > LONGEST_FUNCTION:
                yield f"{place}:{node.lineno}: {node.name} has {length} lines, {LONGEST_FUNCTION} is the ceiling"
        if (name := _identifier(node)) in RETIRED:
            yield f"{place}:{getattr(node, 'lineno', 1)}: '{name}' is a retired name"
        if isinstance(node, ast.Global):
            yield f"{place}:{node.lineno}: `global`; state has an owner"
        if isinstance(node, ast.Attribute) and node.attr == "new_event_loop" and place != LOOP_MAKER:
            yield f"{place}:{node.lineno}: a second event loop; only {LOOP_MAKER} makes one"


def _identifier(node: ast.AST) -> str | None:
    """The name that a node defines or uses."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return node.attr
    return getattr(node, "name", None)


def print_table(found: dict[str, Size]) -> None:
    print(f"{'package':<18}{'lines':>8}{'ceiling':>9}{'statements':>12}{'ceiling':>9}")
    for name, size in found.items():
        lines, statements = CEILINGS.get(name, (0, 0))
        print(f"{name:<18}{size.lines:>8}{lines:>9}{size.statements:>12}{statements:>9}")
    totals = [sum(size.lines for size in found.values()), sum(size.statements for size in found.values())]
    ceilings = [sum(column) for column in zip(*CEILINGS.values(), strict=True)]
    print(f"{'all':<18}{totals[0]:>8}{ceilings[0]:>9}{totals[1]:>12}{ceilings[1]:>9}")


def main() -> int:
    files = sorted(path for folder in CODE for path in (ROOT / folder).rglob("*.py"))
    found = sizes()
    breaches = [*breaches_of_packages(found), *(breach for path in files for breach in breaches_of(path))]
    print_table(found)
    for breach in breaches:
        print(breach)
    print(f"{len(files)} files, {len(breaches)} breaches of the size budgets")
    return 1 if breaches else 0


if __name__ == "__main__":
    sys.exit(main())
