"""APO through the real trainer, store and proxy, on the simulated model."""

import asyncio

import pytest

from agentlightning.algorithm.apo import Lineage
from tests.algorithm.prompts.climbing import climb


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0])
def test_a_prompt_climbs_from_below_04_to_above_09(seed: int) -> None:
    climbed = climb(seed)

    gain = climbed.result.gain
    assert gain is not None
    assert climbed.seed_test_score < 0.4
    assert climbed.best_test_score > 0.9
    assert gain.low > 0
    (run,) = asyncio.run(climbed.store.query_runs(name="apo"))
    assert Lineage.of_run(run).ancestry(climbed.result.best_version) == climbed.algorithm.lineage()
