"""Faults written into agents of `examples/` are named by the verdict of a real training."""

import pytest

pytest.importorskip("torch", reason="trains the tiny model")

from tests.algorithm.grpo.training import SharedEngine
from tests.verdict.seeded import FAULTS

QUICK = ("a wrong key", "a comparison that never holds", "nothing returned", "too few tokens", "a reward forgotten")
"""The others are trained by `bench/verdicts.py`, with healthy agents beside them."""


@pytest.mark.parametrize("name", QUICK)
def test_a_fault_in_an_agent_is_named(engine: SharedEngine, name: str) -> None:
    verdict = FAULTS[name].judged()
    assert FAULTS[name].errors(verdict, is_healthy=False) == [], verdict["sentence"]
