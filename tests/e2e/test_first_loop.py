"""The first example, run as a user runs it; then its store is opened and looked into."""

import sys
from pathlib import Path

import pytest

from agentlightning.semconv import AGL_REWARD
from agentlightning.store import SqliteLightningStore
from agentlightning.types import PromptTemplate
from tests import warm_python

EXAMPLE = Path(__file__).parents[2] / "examples" / "first_loop" / "first_loop.py"
BEST = "Convert {miles} miles to kilometres. Round to one decimal and name the unit."


def run_example(*arguments: str) -> str:
    command = [sys.executable, "-W", "error", str(EXAMPLE), *arguments]
    return warm_python.run(command, check=True, timeout=60).stdout


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The store the example left behind, and what it printed."""
    path = tmp_path_factory.mktemp("first_loop") / "loop.db"
    return path, run_example("--store", str(path))


def test_it_names_the_winner_and_the_store(loop: tuple[Path, str]) -> None:
    path, printed = loop

    assert f"winner: {BEST}" in printed
    assert f"agl store status {path}" in printed


async def test_its_store_holds_the_best_prompt_the_curve_and_every_reward(loop: tuple[Path, str]) -> None:
    async with SqliteLightningStore(loop[0]) as store:
        latest = await store.get_latest_resources()
        (run,) = await store.query_runs()
        points = await store.query_metrics(run.run_id, names=["mean_reward"])
        rollouts = await store.query_rollouts(status_in=["succeeded"])
        attempts = [await store.query_attempts(rollout.rollout_id) for rollout in rollouts]
        rewards = [await store.query_spans(rollout.rollout_id, name=AGL_REWARD) for rollout in rollouts]

    assert latest is not None
    prompt = latest.resources["prompt"]
    assert isinstance(prompt, PromptTemplate)
    assert prompt.template == BEST
    assert (run.status, run.summary["mean_reward"]) == ("succeeded", 1.0)
    assert [round(point.values["mean_reward"], 2) for point in points] == [0.0, 1.0, 0.67]
    retried = [[attempt.status for attempt in tries] for tries in attempts if len(tries) > 1]
    assert retried == [["failed", "succeeded"]]
    assert [len(spans) for spans in rewards] == [1] * 18
