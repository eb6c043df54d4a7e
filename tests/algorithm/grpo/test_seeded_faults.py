"""Faults written into agents of `examples/` are named by the verdict of a real training."""

import pytest

pytest.importorskip("torch", reason="trains the tiny model")

from tests.algorithm.grpo.training import SharedEngine
from tests.verdict.seeded import FAULTS, trained

QUICK = ("a wrong key", "a comparison that never holds", "nothing returned", "too few tokens", "a reward forgotten")
"""The others are trained by `bench/verdicts.py`, with healthy agents beside them."""


@pytest.mark.parametrize("name", QUICK)
def test_a_fault_in_an_agent_is_named(engine: SharedEngine, name: str) -> None:
    verdict = trained(FAULTS[name])
    assert verdict["outcome"] != "gained"
    assert verdict["findings"][0]["name"] == FAULTS[name].finding, verdict["sentence"]
