"""A run that was broken off goes on where it was, and does nothing twice."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from agentlightning.algorithm.batches import Batches
from agentlightning.algorithm.prompts.evaluation import RunJournal
from agentlightning.errors import ConfigurationError
from agentlightning.store import InMemoryLightningStore, SqliteLightningStore
from tests.algorithm.prompts.world import Optimiser, agents, apo_in, optimised

pytestmark = pytest.mark.usefixtures("quick_poml", "nothing_withdrawn")


@pytest.fixture
def nothing_withdrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is killed withdraws no rollouts."""

    async def withdraw(self: Batches, rollout_ids: Any) -> list[Any]:
        return []

    monkeypatch.setattr(Batches, "withdraw", withdraw)


class Killed(BaseException):
    """Stands for the end of the process."""


class KillingJournal(RunJournal):
    """Ends the run at its n-th line, after writing it."""

    left = 0

    def put(self, step: str, outcome: Any) -> None:
        super().put(step, outcome)
        type(self).left -= 1
        if type(self).left == 0:
            raise Killed(step)


async def run_once(path: Path, store: Any, client: Optimiser, seed: int = 3) -> Any:
    return await optimised(client, store=store, state_file=path, tasks=40, beam_rounds=2, seed=seed)


@pytest.mark.parametrize("lines", [1, 7, 25, 60])
async def test_a_killed_run_goes_on_without_repeating_what_was_finished(
    lines: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, client, path = InMemoryLightningStore(), Optimiser(), tmp_path / "state.jsonl"
    with monkeypatch.context() as patched:
        patched.setattr(KillingJournal, "left", lines)
        patched.setattr("agentlightning.algorithm.prompts.apo_search.RunJournal", KillingJournal)
        with pytest.raises(Killed):
            await run_once(path, store, client)
    kept = [json.loads(line)[0] for line in path.read_text().splitlines()[1:]]
    calls_before = len(client.calls)

    apo = await run_once(path, store, client, seed=99)

    whole = Optimiser()
    in_one_go = await run_once(tmp_path / "other.jsonl", InMemoryLightningStore(), whole)
    edits = sum(step.endswith("edit") for step in kept)
    assert len(await store.query_rollouts()) == apo.result.spent["rollouts"]
    # It may be killed between counting and calling.
    assert apo.result.spent["model_calls"] - len(client.calls) in (0, 1)
    assert len(client.calls) - calls_before <= len(whole.calls) - 2 * edits
    assert len(apo.candidates) == len(in_one_go.candidates)


@pytest.mark.parametrize("lines", [5, 20, 50])
async def test_no_finished_evaluation_is_repeated_though_the_store_is_lost(
    lines: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, store = tmp_path / "state.jsonl", InMemoryLightningStore()
    with monkeypatch.context() as patched:
        patched.setattr(KillingJournal, "left", lines)
        patched.setattr("agentlightning.algorithm.prompts.apo_search.RunJournal", KillingJournal)
        with pytest.raises(Killed):
            await run_once(path, InMemoryLightningStore(), Optimiser())
    kept = dict(json.loads(line) for line in path.read_text().splitlines()[1:])
    finished = sum(len(told[0]) for step, told in kept.items() if step.endswith(" done"))

    apo = await run_once(path, store, Optimiser(), seed=99)

    assert finished > 0
    assert finished + len(await store.query_rollouts()) == apo.result.spent["rollouts"]


async def test_rollouts_under_way_at_the_kill_are_found_again_in_a_durable_store(tmp_path: Path) -> None:
    path = tmp_path / "state.jsonl"
    async with SqliteLightningStore(tmp_path / "store.db") as store:
        apo = apo_in(store, Optimiser(), state_file=path, beam_rounds=0, rollout_batch_timeout=30)
        running = asyncio.create_task(apo.run([1], list(range(10))))
        while len(await store.query_rollouts()) < 10:
            await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        async with agents(store) as done:
            again = apo_in(store, Optimiser(), state_file=path, beam_rounds=0)
            await again.run([1], list(range(10)))

        assert len(done) == len(await store.query_rollouts()) == 10
        assert again.result.spent["rollouts"] == 10


async def test_rollout_whose_runner_died_with_the_process_is_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentlightning.algorithm.prompts.evaluation.SILENCE_SECONDS", 0.3)
    store, path = InMemoryLightningStore(), tmp_path / "state.jsonl"
    running = asyncio.create_task(apo_in(store, Optimiser(), state_file=path, beam_rounds=0).run([1], [0, 1, 2]))
    claimed = await store.dequeue_rollout("doomed", wait=10)
    assert claimed is not None
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running

    async with agents(store) as done:
        again = apo_in(store, Optimiser(), state_file=path, beam_rounds=0)
        await again.run([1], [0, 1, 2])

    assert sorted(done) == sorted(rollout.rollout_id for rollout in await store.query_rollouts())
    assert len(await store.query_attempts(claimed.rollout_id)) == 2
    assert again.result.spent["rollouts"] == 3


def test_line_that_was_cut_off_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "state.jsonl"
    journal = RunJournal(path, {"a": 1})
    journal.put("one", [1, 2])
    with path.open("ab") as file:
        file.write(b'["two", [3')

    again = RunJournal(path, {"a": 1})
    again.put("three", "3")

    last = RunJournal(path, {"a": 1})
    assert ("two" in last, last.get("one"), last.get("three")) == (False, [1, 2], "3")
    assert last.rollout_ids("one", 2) == journal.rollout_ids("one", 2)


@pytest.mark.parametrize("content", ['{"other": 1}\n', "not json\n"])
def test_file_that_is_no_journal_is_refused_and_left_alone(content: str, tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text(content)

    with pytest.raises(ConfigurationError, match="not the state of a run of APO"):
        RunJournal(path, {})

    assert path.read_text() == content


def test_a_journal_is_for_its_owner_alone(tmp_path: Path) -> None:
    RunJournal(tmp_path / "state", {"a": 1}).put("step", "a prompt")
    assert (tmp_path / "state").stat().st_mode & 0o077 == 0
