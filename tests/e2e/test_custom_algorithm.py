"""The example of an algorithm of one's own: it learns, goes on from its checkpoint, and withdraws what it sent."""

import ast
import asyncio
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl

PATH = Path(__file__).parents[2] / "examples" / "custom_algorithm" / "best_of_n.py"
TASKS = [1.0, 2.0, 3.0, 4.0, 5.0]


@pytest.fixture
def example() -> Any:
    spec = importlib.util.spec_from_file_location("best_of_n", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_learns_in_groups_and_goes_on_from_its_checkpoint(example: Any, tmp_path: Path) -> None:
    checkpoint, store = tmp_path / "state.json", agl.InMemoryLightningStore()
    curves = []
    for steps in (1, 3):
        algorithm = example.BestOfN(steps=steps, checkpoint=checkpoint)
        trainer = agl.Trainer(algorithm=algorithm, store=store, strategy="shm", progress="off", name=f"to {steps}")
        trainer.fit(example.convert, TASKS)
        curves.append(algorithm.curve)

    rollouts, (run,) = asyncio.run(store.query_rollouts()), asyncio.run(store.query_runs(name="to 3"))
    points = asyncio.run(store.query_metrics(run.run_id, names=["reward/best_of_n"]))
    assert [len(curve) for curve in curves] == [1, 2]
    assert curves[0][0] < 1.0
    assert curves[1] == [1.0, 1.0]
    assert [point.values["reward/best_of_n"] for point in points] == [1.0, 1.0]
    assert len({(one.resources_id, (one.metadata or {})["group"]) for one in rollouts}) == 12
    assert json.loads(checkpoint.read_text(encoding="utf-8"))["step"] == 3


async def test_interrupted_it_withdraws_what_it_sent(example: Any) -> None:
    store, algorithm = agl.InMemoryLightningStore(), example.BestOfN()
    algorithm.set_store(store)
    running = asyncio.create_task(algorithm.run(TASKS))
    while not await store.query_rollouts():
        await asyncio.sleep(0)
    running.cancel()

    with pytest.raises(asyncio.CancelledError):
        await running

    assert {rollout.status for rollout in await store.query_rollouts()} == {"cancelled"}


def test_it_takes_sixty_lines_at_most() -> None:
    names = ("BestOfN", "best_of_groups")
    parts = [one for one in ast.parse(PATH.read_text(encoding="utf-8")).body if getattr(one, "name", None) in names]

    assert len(parts) == 2
    assert sum((one.end_lineno or 0) - one.lineno + 1 for one in parts) <= 60
