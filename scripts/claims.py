"""The promises of the design notes, and the tests that prove them: `make claims`.

`tests/design_notes/claims.toml` has the promises by number; a test proves some of them by `@pytest.mark.claim(...)`.
This runs the marked tests, or reads reports of runs (`--report FILE`, which pytest writes with `--junit-xml`), prints
every promise with its tests and their result, and fails if a promise has no passing test. What cannot be run here
stands in `unproven.toml` with its reason and the nearest proof; there may be five of those at most.
"""

import argparse
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
NOTES = ROOT / "tests" / "design_notes"
MOST_UNPROVEN = 5
PROPERTY = "claim"
"""The property under which `tests/conftest.py` writes a test's claims into the report."""


@dataclass(frozen=True)
class Proof:
    """A test that proves something, and whether it did."""

    test: str
    result: str
    """passed, failed or skipped."""


def read_claims() -> dict[int, str]:
    """Every promise by its number."""
    sections = tomllib.loads((NOTES / "claims.toml").read_text(encoding="utf-8"))
    return {int(number): text for section in sections.values() for number, text in section.items()}


def read_unproven() -> dict[int, str]:
    """Why a promise has no test, and its nearest proof, by its number."""
    reasons = tomllib.loads((NOTES / "unproven.toml").read_text(encoding="utf-8"))
    return {int(number): reason for number, reason in reasons.items()}


def read_proofs(reports: Sequence[Path]) -> dict[int, list[Proof]]:
    """The tests of some reports by the claims they prove; one that was skipped everywhere proves nothing."""
    proofs: defaultdict[int, list[Proof]] = defaultdict(list)
    for case in (case for report in reports for case in ET.parse(report).getroot().iter("testcase")):
        outcomes = {child.tag for child in case}
        result = "failed" if outcomes & {"failure", "error"} else "skipped" if "skipped" in outcomes else "passed"
        name = f"{case.get('classname', '')}::{case.get('name', '')}".removeprefix("tests.")
        for item in case.iter("property"):
            if item.get("name") == PROPERTY:
                proofs[int(item.get("value", ""))].append(Proof(name, result))
    return proofs


def breaches_of(
    claims: Mapping[int, str], unproven: Mapping[int, str], proofs: Mapping[int, Sequence[Proof]]
) -> list[str]:
    """What is wrong: each as a sentence."""
    breaches = [f"Claim {number} is marked in a test and not in claims.toml." for number in proofs.keys() - claims]
    breaches += [
        f"Claim {number} stands in unproven.toml and not in claims.toml." for number in unproven.keys() - claims
    ]
    if len(unproven) > MOST_UNPROVEN:
        breaches.append(f"{len(unproven)} claims are unproven; {MOST_UNPROVEN} is the ceiling.")
    for number in sorted(claims):
        results = {proof.result for proof in proofs.get(number, ())}
        is_proven = "passed" in results and "failed" not in results
        if is_proven and number in unproven:
            breaches.append(f"Claim {number} is proven; take it out of unproven.toml.")
        elif "failed" in results:
            breaches.append(f"Claim {number} has a test that failed: {claims[number]}")
        elif not is_proven and number not in unproven:
            breaches.append(f"Claim {number} has no passing test: {claims[number]}")
    return breaches


def print_table(claims: Mapping[int, str], unproven: Mapping[int, str], proofs: Mapping[int, Sequence[Proof]]) -> None:
    for number, text in sorted(claims.items()):
        print(f"{number:4} {text}")
        if number in unproven:
            print(f"       unproven: {unproven[number]}")
        for proof in proofs.get(number, ()):
            print(f"       {proof.result}: {proof.test}")


def run_tests(report: Path, options: Sequence[str]) -> None:
    """Run the marked tests; whether they passed is in the report."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "claim", f"--junit-xml={report}", *options]
    if subprocess.run(command, cwd=ROOT, check=False).returncode not in (0, 1):  # our own interpreter
        sys.exit("pytest could not run the tests.")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Example: scripts/claims.py -- -n 4",
    )
    parser.add_argument("--report", type=Path, nargs="+", help="read reports of runs instead of running the tests")
    parser.add_argument("--quiet", action="store_true", help="print what is wrong, and no table")
    parser.add_argument("options", nargs="*", help="options of pytest, after --")
    arguments = parser.parse_args()
    claims, unproven = read_claims(), read_unproven()
    with tempfile.TemporaryDirectory() as folder:
        reports = arguments.report
        if reports is None:
            reports = [Path(folder) / "report.xml"]
            run_tests(reports[0], arguments.options)
        proofs = read_proofs(reports)
    if not arguments.quiet:
        print_table(claims, unproven, proofs)
    breaches = breaches_of(claims, unproven, proofs)
    print(*breaches, sep="\n", end="\n" if breaches else "")
    print(f"{len(claims)} claims, {len(unproven)} unproven, {len(breaches)} breaches")
    return 1 if breaches else 0


if __name__ == "__main__":
    sys.exit(main())
