"""SFT as an algorithm, on the shipped model and rollouts in a store."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from agentlightning.algorithm.grpo.settings import LearnerSettings
from agentlightning.algorithm.sft import SFT, Acceptance, FittingSettings, RecordedRollouts
from agentlightning.engine.checkpoint import load
from agentlightning.engine.model import CausalModel, logits_of
from agentlightning.engine.tiny.codec import TinyChatCodec
from agentlightning.errors import ConfigurationError, TrainingError
from agentlightning.store import InMemoryLightningStore, LightningStore
from tests.adapter.spans import REWARD, span
from tests.algorithm.sft.recording import prompt_of, record

COLOURS = {"sky": "blue", "grass": "green", "snow": "white", "coal": "black"}
FAST = LearnerSettings(learning_rate=5e-3, threads=1)


def greedy(model: CausalModel, task: str) -> str:
    """What the model says, taking the likeliest token each time."""
    ids = prompt_of(task)
    start = len(ids)
    with torch.no_grad():
        while len(ids) - start < 10 and (len(ids) == start or ids[-1] not in model.end_ids):
            row = torch.tensor([ids])
            last = torch.zeros_like(row, dtype=torch.bool)
            last[0, -1] = True
            ids.append(int(logits_of(model, row, torch.tensor([len(ids)]), last)[0].argmax()))
    return TinyChatCodec().decode(ids[start:])


def sft(store: LightningStore, **chosen: Any) -> SFT:
    settings = {"learning": FAST, "fitting": FittingSettings(epochs=40, batch_size=4), "held_out": 0.0}
    algorithm = SFT(**{**settings, **chosen})
    algorithm.set_store(store)
    return algorithm


@pytest.fixture
async def store() -> InMemoryLightningStore:
    """Right answers with a reward of 1, wrong ones with 0."""
    made = InMemoryLightningStore()
    for thing, colour in COLOURS.items():
        await record(made, thing, "red", 0.0)
        await record(made, thing, colour, 1.0)
    return made


async def test_the_model_learns_to_say_what_was_rewarded(store: InMemoryLightningStore) -> None:
    algorithm = sft(store, acceptance=Acceptance(min_reward=1.0))

    await algorithm.run()

    assert {thing: greedy(algorithm.model, thing) for thing in COLOURS} == COLOURS
    assert algorithm.examples is not None
    assert algorithm.examples.words() == "4 of 8 rollouts are used; left out: 4 low_reward."


async def test_metrics_are_in_the_run_epoch_by_epoch(store: InMemoryLightningStore) -> None:
    run = await store.start_run("tuning")
    algorithm = sft(store, held_out=0.25, fitting=FittingSettings(epochs=2, batch_size=2))
    algorithm.set_run_id(run.run_id)

    await algorithm.run()

    points = {point.step: point.values for point in await store.query_metrics(run.run_id)}
    assert sorted(points) == [0, 1, 2]
    assert points[0]["examples/rollouts_used"] == 8
    assert points[2]["sft/loss"] < points[1]["sft/loss"]
    assert algorithm.best_loss == min(values["sft/held_out_loss"] for values in points.values())


async def test_a_run_that_is_resumed_ends_with_the_same_weights(store: InMemoryLightningStore, tmp_path: Path) -> None:
    chosen: dict[str, Any] = {"held_out": 0.25, "acceptance": Acceptance(keep_per_task=1)}
    whole = sft(store, **chosen, fitting=FittingSettings(epochs=3, batch_size=2))
    await whole.run()
    await sft(store, **chosen, fitting=FittingSettings(epochs=1, batch_size=2), checkpoints=tmp_path).run()
    await record(store, "sky", "pink", 2.0)  # would be the best one now

    resumed = sft(store, **chosen, fitting=FittingSettings(epochs=3, batch_size=2), checkpoints=tmp_path, resume=True)
    await resumed.run()

    for name, weight in whole.model.state().items():
        assert torch.equal(resumed.model.state()[name], weight)


async def test_a_run_that_is_stopped_leaves_its_best_model(store: InMemoryLightningStore, tmp_path: Path) -> None:
    run = await store.start_run("tuning")
    algorithm = sft(store, output=tmp_path / "model", fitting=FittingSettings(epochs=10_000, batch_size=4))
    algorithm.set_run_id(run.run_id)
    work = asyncio.create_task(algorithm.run())
    while len(await store.query_metrics(run.run_id)) < 3:  # that before the first epoch, and two epochs
        await asyncio.sleep(0.01)

    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work

    left = load(str(tmp_path / "model"))[0].state()
    assert algorithm.epochs_made >= 2
    assert all(torch.equal(left[name], weight) for name, weight in algorithm.model.state().items())
    assert f"after epoch {algorithm.epochs_made} is in '{tmp_path / 'model'}'" in algorithm.resume_hint()


@pytest.mark.parametrize("skip_truncated", [True, False])
async def test_a_run_that_is_resumed_has_the_sequences_it_began_with(
    store: InMemoryLightningStore, tmp_path: Path, skip_truncated: bool
) -> None:
    await record(store, "sea", "blueblueblue", ended="length")
    chosen: dict[str, Any] = {"acceptance": Acceptance(skip_truncated=skip_truncated), "checkpoints": tmp_path}
    first = sft(store, **chosen, fitting=FittingSettings(epochs=1))
    await first.run()

    resumed = sft(store, **chosen, fitting=FittingSettings(epochs=2), resume=True)
    await resumed.run()

    assert first.examples is not None
    assert resumed.examples is not None
    assert resumed.examples.samples == first.examples.samples
    assert len(first.examples.samples) == (8 if skip_truncated else 9)


async def test_nothing_to_learn_from_says_why(store: InMemoryLightningStore) -> None:
    with pytest.raises(TrainingError, match=r"0 of 8 rollouts are used; left out: 8 low_reward"):
        await sft(store, acceptance=Acceptance(min_reward=5.0)).run()
    with pytest.raises(TrainingError, match=r"the store has no such rollouts; record some in it"):
        await sft(InMemoryLightningStore()).run()


async def two_points(store: LightningStore, run_id: str) -> None:
    while len(await store.query_metrics(run_id)) < 2:
        await asyncio.sleep(0.01)


async def test_a_run_that_is_cancelled_computes_no_longer(store: InMemoryLightningStore) -> None:
    algorithm = sft(store, fitting=FittingSettings(epochs=100_000, batch_size=1))
    run_id = (await store.start_run("tuning")).run_id
    algorithm.set_run_id(run_id)
    task = asyncio.create_task(algorithm.run())
    await asyncio.wait_for(two_points(store, run_id), 60)

    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    before = {name: weight.clone() for name, weight in algorithm.model.state().items()}
    await asyncio.sleep(0.05)
    assert all(torch.equal(weight, before[name]) for name, weight in algorithm.model.state().items())


@pytest.mark.parametrize(
    "wrong",
    [{"best_of": 0}, {"best_of": 2, "recorded": RecordedRollouts()}, {"held_out": 1.0}, {"resume": True}],
    ids=["best_of", "both sources", "held_out", "resume without a folder"],
)
def test_arguments_that_cannot_be_used_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        SFT(**wrong)


async def test_sampling_needs_tasks() -> None:
    with pytest.raises(ConfigurationError, match="train_dataset"):
        await sft(InMemoryLightningStore(), best_of=2).run()


async def test_validation_counts_what_failed_as_the_worst(monkeypatch: pytest.MonkeyPatch) -> None:
    store = InMemoryLightningStore()
    algorithm, run = sft(store), await store.start_run("sft")
    algorithm.set_run_id(run.run_id)

    async def no_resources(name: str, temperature: float | None) -> None:
        return None

    monkeypatch.setattr(algorithm, "_resources", no_resources)
    task = asyncio.create_task(algorithm._validate(["sky", "grass"], step=0))
    for status, rewards in (("succeeded", [1.0]), ("failed", [])):
        claimed = await store.dequeue_rollout("somebody", wait=30)
        assert claimed is not None
        owner = {"rollout_id": claimed.rollout_id, "attempt_id": claimed.attempt.attempt_id}
        for reward in rewards:
            await store.add_span(span("reward", name=REWARD, attributes={"reward": reward}, sequence_id=1, **owner))
        await store.update_attempt(**owner, status=status)  # type: ignore[arg-type]

    assert (await asyncio.wait_for(task, 30)).mean == 0.5
    (point,) = await store.query_metrics(run.run_id)
    assert (point.values["validation/reward"], point.values["validation/failed"]) == (0.5, 1.0)


async def test_the_model_is_left_in_the_output_folder(store: InMemoryLightningStore, tmp_path: Path) -> None:
    algorithm = sft(store, output=tmp_path / "model", fitting=FittingSettings(epochs=1))

    await algorithm.run()

    loaded, _ = load(str(tmp_path / "model"))
    assert greedy(loaded, "sky") == greedy(algorithm.model, "sky")
