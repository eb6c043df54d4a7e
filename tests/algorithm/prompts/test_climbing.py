"""GEPA on the simulated model, through the real Trainer, proxy and store."""

import asyncio
import json
from pathlib import Path

from agentlightning.algorithm.gepa import Lineage
from agentlightning.store import LightningStore
from agentlightning.types import PromptTemplate
from tests.algorithm.prompts.climbing import evolve
from tests.simulated_model.server import SEED_PROMPT


def test_prompt_climbs_from_below_four_tenths_to_above_nine_though_the_optimiser_makes_faults(tmp_path: Path) -> None:
    done = evolve(1, faults=0.3, output=tmp_path / "best.json")

    written = json.loads((tmp_path / "best.json").read_text(encoding="utf-8"))
    best = done.algorithm.get_best_prompts()["prompt"].template
    assert done.seed_test_score < 0.4
    assert done.best_test_score > 0.9
    assert done.result.gain is not None
    assert done.result.gain.low > 0
    assert written["prompts"]["prompt"]["template"] == best
    assert "-- prompt (seed)\n+++ prompt (best)" in done.result.diff()
    asyncio.run(check_the_store(done.store, best, done.algorithm.candidates))


async def check_the_store(store: LightningStore, best: str, candidates: Lineage) -> None:
    """The best prompt is the latest resource, and the run tells where it came from."""
    latest = await store.get_latest_resources()
    (run,) = await store.query_runs(name="gepa")
    points = await store.query_metrics(run.run_id, names=["gepa/best_score", "gepa/rollouts"])
    rollouts = await store.query_rollouts()

    assert latest is not None
    assert latest.resources["prompt"] == PromptTemplate(template=best, engine="f-string")
    assert "main_llm" not in latest.resources  # it ended with the run
    assert (run.status, list(Lineage.of_run(run))) == ("succeeded", list(candidates))
    (promoted,) = [one for one in candidates if one.fate == "promoted"]
    line = candidates.ancestry(promoted.version)
    assert (line[0].template, line[-1].template) == (SEED_PROMPT, best)
    assert points[-1].values["gepa/best_score"] > points[0].values["gepa/best_score"]
    assert run.summary["spent"]["rollouts"] == len(rollouts)
