"""APO through the real trainer, store and proxy, on the simulated model."""

import asyncio

import pytest

from agentlightning.algorithm.apo import Lineage
from agentlightning.algorithm.apo import apo as apo_module
from tests.algorithm.apo.climbing import climb
from tests.algorithm.apo.world import rendered_here
from tests.simulated_model.bookings import Rule
from tests.simulated_model.phrases import rules_in

# One after the other, so that a seed gives the same run each time.
QUICK = {"concurrency": 1, "beam_rounds": 4, "branch_factor": 3, "validation_tasks": 100}


@pytest.fixture(autouse=True)
def quick_poml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apo_module.poml, "poml", rendered_here)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 3])
def test_a_prompt_climbs_from_below_04_to_above_09(seed: int) -> None:
    climbed = climb(seed, **QUICK)

    gain = climbed.result.gain
    assert gain is not None
    assert climbed.seed_test_score < 0.4
    assert climbed.best_test_score > 0.9
    assert 0 < gain.low <= climbed.best_test_score - climbed.seed_test_score <= gain.high
    assert rules_in(climbed.apo.get_best_prompt().template) == frozenset(Rule)
    (run,) = asyncio.run(climbed.store.query_runs(name="apo"))
    assert Lineage.of_run(run).ancestry(climbed.result.best_version) == climbed.apo.lineage()
