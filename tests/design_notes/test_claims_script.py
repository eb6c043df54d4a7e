"""`scripts/claims.py`: when a table of promises and tests is in order, and what is wrong with it otherwise."""

from pathlib import Path

import pytest

from scripts.claims import MOST_UNPROVEN, Proof, breaches_of, read_claims, read_proofs, read_unproven

CLAIMS = {1: "One holds.", 2: "Two holds."}
PASSED, FAILED, SKIPPED = Proof("a", "passed"), Proof("b", "failed"), Proof("c", "skipped")


def test_every_promise_with_a_passing_test_is_in_order() -> None:
    assert breaches_of(CLAIMS, {}, {1: [PASSED], 2: [SKIPPED, PASSED]}) == []


@pytest.mark.parametrize(
    ("proofs", "unproven", "breach"),
    [
        ({1: [PASSED]}, {}, "Claim 2 has no passing test"),
        ({1: [PASSED], 2: [SKIPPED]}, {}, "Claim 2 has no passing test"),
        ({1: [PASSED], 2: [PASSED, FAILED]}, {}, "Claim 2 has a test that failed"),
        ({1: [PASSED], 2: [FAILED]}, {2: "later"}, "Claim 2 has a test that failed"),
        ({1: [PASSED], 2: [PASSED]}, {2: "later"}, "Claim 2 is proven; take it out"),
        ({1: [PASSED], 2: [PASSED], 3: [PASSED]}, {}, "Claim 3 is marked in a test and not in claims.toml"),
        ({1: [PASSED], 2: [PASSED]}, {3: "later"}, "Claim 3 stands in unproven.toml and not in claims.toml"),
    ],
)
def test_what_is_wrong_is_said(proofs: dict[int, list[Proof]], unproven: dict[int, str], breach: str) -> None:
    [found] = breaches_of(CLAIMS, unproven, proofs)

    assert found.startswith(breach)


def test_too_many_promises_without_a_test_are_a_breach() -> None:
    claims = dict.fromkeys(range(MOST_UNPROVEN + 1), "It holds.")

    [found] = breaches_of(claims, dict.fromkeys(claims, "later"), {})

    assert "is the ceiling" in found


def test_a_report_of_pytest_is_read(tmp_path: Path) -> None:
    cases = [("passed", ""), ("failed", "<failure/>"), ("skipped", "<skipped/>")]
    text = "".join(
        f'<testcase classname="tests.a" name="{name}">'
        f'<properties><property name="claim" value="{number}"/></properties>'
        f"{outcome}</testcase>"
        for number, (name, outcome) in enumerate(cases)
    )
    (tmp_path / "report.xml").write_text(f"<testsuites><testsuite>{text}</testsuite></testsuites>")

    proofs = read_proofs([tmp_path / "report.xml"])

    assert proofs == {number: [Proof(f"a::{name}", name)] for number, (name, _) in enumerate(cases)}


def test_the_promises_can_be_read() -> None:
    claims = read_claims()

    assert set(range(1, 490)) <= set(claims)
    assert set(read_unproven()) <= set(claims)
    assert all(text.endswith(".") for text in claims.values())
