"""Real runs of algorithms that train no weights: their verdicts, as `fit` writes them and `agl why` reads them."""

import asyncio

import pytest

pytest.importorskip("torch", reason="the runs of SFT beside them train the tiny model")

from tests.verdict import other_algorithms
from tests.verdict.other_algorithms import FAULTS, HEALTHY

SLOW = (
    "APO, an optimiser that is down",
    "APO on the simulated model",
    "GEPA on the simulated model",
    "GRPO with LoRA",
)
"""With everything that trains, they are left to `bench/verdicts.py`."""
QUICK = {name: run for name, run in {**FAULTS, **HEALTHY}.items() if name not in SLOW and not name.startswith("SFT")}


@pytest.mark.parametrize("name", QUICK)
def test_the_verdict_on_a_run_is_right(name: str) -> None:
    verdict = QUICK[name].judged()
    assert QUICK[name].errors(verdict, is_healthy=name in HEALTHY) == [], verdict["sentence"]


@pytest.mark.parametrize("name", ["APO in the small world", "APO, an optimiser that talks nonsense"])
def test_fit_writes_what_agl_why_says(name: str) -> None:
    run = QUICK[name]
    assert isinstance(run, other_algorithms.Made)
    store = run.make()

    (fit,) = asyncio.run(store.query_runs(name="fit"))

    assert fit.summary["verdict"]["sentence"] == asyncio.run(other_algorithms.judged(store, None))[0]["sentence"]
