"""However a training ends, what it has learned is kept."""

import asyncio
import logging
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="GRPO needs torch")

import agentlightning as agl  # after the check for torch
from agentlightning.algorithm.batches import Batches
from agentlightning.algorithm.grpo import GRPO, Checkpoints
from agentlightning.algorithm.sentinel import Sentinel
from agentlightning.engine.checkpoint import load, read_extra
from agentlightning.errors import ConfigurationError, TrainingError
from tests.algorithm.grpo.training import (
    TASKS,
    Asking,
    are_same,
    every_second,
    fit,
    grpo,
    trainer,
    weights,
)

pytestmark = pytest.mark.usefixtures("engine", "few_empty_steps")

LONG_ENOUGH_SECONDS = 1.0
MOST_EMPTY_STEPS = 4


@pytest.fixture
def few_empty_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentlightning.algorithm.grpo.grpo.MOST_EMPTY_STEPS", MOST_EMPTY_STEPS)


def exported(folder: Path) -> dict[str, Any]:
    return dict(load(str(folder))[0].state())


def learns_until(step: int, then: float) -> Any:
    """Rewards that differ before a step, and are the same from it on."""

    def judge(agent: Asking, task: Any, rollout: Any, said: str) -> float:
        if rollout.mode == "val" or rollout.metadata["step"] >= step:
            return then
        return every_second(agent, task, rollout, said)

    return judge


# ---------------------------------------------------------------------- a task that is solved


def test_solved_run_ends_well_and_leaves_its_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    algorithm = grpo(tasks_per_step=1, steps=100, output=tmp_path / "model")
    made = trainer(algorithm, concurrency=1)

    with caplog.at_level(logging.INFO, logger="agentlightning.algorithm.grpo"):
        made.fit(Asking(learns_until(2, 1.0)), TASKS, TASKS[:2])

    assert algorithm.progress.step == 2 + MOST_EMPTY_STEPS
    assert algorithm.result is not None
    assert algorithm.result.mean == 1.0
    assert are_same(weights(algorithm), exported(tmp_path / "model"))
    assert f"Nothing is left to learn: in the last {MOST_EMPTY_STEPS} steps every reward was 1" in caplog.text
    assert [run.status for run in asyncio.run(made.store.query_runs())] == ["succeeded"]


def test_run_that_is_stuck_below_its_best_reward_is_given_up_and_leaves_its_model(tmp_path: Path) -> None:
    algorithm = grpo(tasks_per_step=1, steps=100, output=tmp_path / "model")

    with pytest.raises(TrainingError, match=f"{MOST_EMPTY_STEPS} steps in a row .* 2 rollouts no_variance"):
        fit(algorithm, Asking(learns_until(2, 0.5)))

    assert algorithm.progress.step == 2 + MOST_EMPTY_STEPS
    assert are_same(weights(algorithm), exported(tmp_path / "model"))


def test_validation_with_higher_rewards_shows_that_a_run_is_not_solved() -> None:
    def judge(agent: Asking, task: Any, rollout: Any, said: str) -> float:
        return 2.0 if rollout.mode == "val" else learns_until(1, 1.0)(agent, task, rollout, said)

    algorithm = grpo(tasks_per_step=1, steps=100)

    with pytest.raises(TrainingError, match=f"{MOST_EMPTY_STEPS} steps in a row"):
        trainer(algorithm, concurrency=1).fit(Asking(judge), TASKS, TASKS[:1])


# ---------------------------------------------------------------------- other ends


def test_failed_run_leaves_the_model_of_the_last_whole_step(tmp_path: Path, monkeypatch: Any) -> None:
    spoil_update_after(monkeypatch, 2)
    algorithm = grpo(steps=5, output=tmp_path / "model", checkpoints=tmp_path / "checkpoints", save_every=1)

    with pytest.raises(TrainingError, match="nan"):
        fit(algorithm)

    kept = Checkpoints(tmp_path / "checkpoints" / "tiny").latest()
    assert kept is not None
    assert are_same(exported(tmp_path / "model"), kept.model_state())
    assert read_extra(tmp_path / "model")["version"] == 2


def test_failed_run_leaves_the_model_that_did_best_in_validation(tmp_path: Path, monkeypatch: Any) -> None:
    def judge(agent: Asking, task: Any, rollout: Any, said: str) -> float:
        if rollout.mode == "val":
            return [0.0, 1.0, 0.5, 0.5][agent.seen[f"val/{task}"] - 1]
        return every_second(agent, task, rollout, said)

    spoil_update_after(monkeypatch, 3)
    options = {"checkpoints": tmp_path / "checkpoints", "output": tmp_path / "model"}
    algorithm = grpo(steps=9, validate_every=1, validation_temperature=1.0, **options)

    with pytest.raises(TrainingError, match="nan"):
        trainer(algorithm, concurrency=1).fit(Asking(judge), TASKS, TASKS[:1])

    best = Checkpoints(tmp_path / "checkpoints" / "tiny").best()
    assert best is not None
    assert best.step == read_extra(tmp_path / "model")["version"] == 1
    assert are_same(exported(tmp_path / "model"), best.model_state())


def spoil_update_after(monkeypatch: pytest.MonkeyPatch, updates: int) -> None:
    """The update after so many finds weights that are no numbers."""
    from agentlightning.algorithm.grpo.learner import Learner

    original = Learner.update

    def spoiled(self: Learner, *batch: Any) -> Any:
        if self.version == updates:
            next(iter(self.model.trainable().values())).data.fill_(float("nan"))
        return original(self, *batch)

    monkeypatch.setattr(Learner, "update", spoiled)


def test_run_that_fails_before_it_learned_leaves_no_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def judge(agent: Asking, task: Any, rollout: Any, said: str) -> float:
        raise OSError("no disk")

    with pytest.raises(TrainingError):
        fit(grpo(tasks_per_step=1, steps=100, output=tmp_path / "model"), Asking(judge))

    assert list(tmp_path.iterdir()) == []
    assert "because there is no whole step that trained one" in caplog.text


def test_error_of_the_run_is_raised_where_its_model_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    spoil_update_after(monkeypatch, 1)

    with pytest.raises(TrainingError, match="nan"):
        fit(grpo(steps=5, output=tmp_path / "file" / "model", checkpoints=tmp_path / "checkpoints", save_every=1))

    assert "could not be kept" in caplog.text


def test_run_stops_at_the_alarm_of_its_sentinel_which_shows_both_curves(caplog: pytest.LogCaptureFixture) -> None:
    class Hacking(Asking):
        async def rollout_async(self, task: Any, resources: Any, rollout: Any) -> None:  # type: ignore[override]
            own, step = await super().rollout_async(task, resources, rollout), rollout.metadata["step"]
            agl.emit_reward({"trained": step / 10 + 0.1 * own, "watched": 1 - step / 10}, primary_key="trained")

    algorithm = grpo(steps=30, sentinel=Sentinel("watched", stop=True))
    made = fit(algorithm, Hacking(every_second))

    (run,) = asyncio.run(made.store.query_runs())
    (alarm,) = run.summary["alarms"]
    assert (run.status, algorithm.progress.step, alarm["name"]) == ("succeeded", 6, "reward_hacking")
    assert alarm["curves"]["watched/mean"] == pytest.approx([1.0, 0.9, 0.8, 0.7, 0.6, 0.5])
    assert "reward/mean: 0.05 0.15 0.25 0.35 0.45 0.55" in caplog.text
    assert "watched/mean: 1.00 0.90 0.80 0.70 0.60 0.50" in caplog.text


# ---------------------------------------------------------------------- a run that was stopped


@pytest.mark.parametrize("kept", ["checkpoints", "output", "nothing"])
def test_sentence_after_a_stop_says_how_to_go_on(tmp_path: Path, caplog: pytest.LogCaptureFixture, kept: str) -> None:
    def judge(agent: Asking, task: Any, rollout: Any, said: str) -> float:
        if rollout.metadata["step"] == 1 and made.state == "running":
            made.stop()
        return every_second(agent, task, rollout, said)

    options = {} if kept == "nothing" else {kept: tmp_path / "kept"}
    stopped = grpo(steps=50, **options)
    made = trainer(stopped, concurrency=1)
    made.fit(Asking(judge), TASKS)
    (said,) = [one.getMessage() for one in caplog.records if one.getMessage().startswith("Stopped at step ")]

    if kept == "nothing":
        assert "the same script begins anew" in said
        return
    written = said[said.index("GRPO(") : said.rindex(")") + 1]
    following: GRPO = eval(
        written, {"GRPO": lambda model="tiny", **more: grpo(model=model, steps=stopped.progress.step + 1, **more)}
    )
    if kept == "output":  # the engine that tests share serves one model alone
        assert are_same(exported(Path(str(following.model))), weights(stopped))
        return
    fit(following)
    assert following.progress.step == stopped.progress.step + 1
    assert following.progress.rewards[:-1] == stopped.progress.rewards


def test_stop_while_the_end_is_saved_leaves_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = trainer(grpo(steps=1, checkpoints=tmp_path / "checkpoints", output=tmp_path / "model"), concurrency=1)
    original = Checkpoints.save

    def stopped(self: Checkpoints, *args: Any, **kwargs: Any) -> Path:
        made.stop()
        time.sleep(LONG_ENOUGH_SECONDS)  # for the algorithm to be cancelled meanwhile
        return original(self, *args, **kwargs)

    monkeypatch.setattr(Checkpoints, "save", stopped)
    made.fit(Asking(every_second), TASKS)

    assert [run.status for run in asyncio.run(made.store.query_runs())] == ["stopped"]
    assert read_extra(tmp_path / "model")["version"] == 1


# ---------------------------------------------------------------------- what an earlier run left


def test_run_that_begins_anew_keeps_the_checkpoints_of_the_one_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fit(grpo(steps=3, checkpoints=tmp_path))
    fit(grpo(steps=4, checkpoints=tmp_path, resume=True))
    assert "earlier" not in caplog.text
    for steps in (1, 2):
        fit(grpo(steps=steps, checkpoints=tmp_path))

    places = [tmp_path / "earlier-1", tmp_path / "earlier-2", tmp_path]
    latest = [Checkpoints(place / "tiny").latest() for place in places]
    assert [one.step for one in latest if one is not None] == [4, 1, 2]
    assert caplog.text.count("began anew") == 2
    resumed = grpo(steps=5, checkpoints=tmp_path / "earlier-1", resume=True)
    fit(resumed)
    assert len(resumed.progress.rewards) == 5


def test_earlier_model_stays_where_a_run_learned_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(grpo(steps=1, output=tmp_path / "model"))
    before = exported(tmp_path / "model")

    fit(grpo(steps=1, output=tmp_path / "model"), Asking(learns_until(0, 1.0)))

    assert are_same(before, exported(tmp_path / "model"))
    assert "The earlier model stays" in caplog.text
    fit(grpo(steps=2, output=tmp_path / "model"))
    assert read_extra(tmp_path / "model")["version"] == 2


def test_update_that_broke_off_is_named_as_the_reason_why_there_is_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    spoil_update_after(monkeypatch, 2)

    with pytest.raises(TrainingError, match="nan"):
        fit(grpo(steps=5, output=tmp_path / "model"))

    assert "because the update of step 3 broke off, and no checkpoint has an earlier model" in caplog.text
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------- a run that was killed


def test_what_a_killed_run_left_is_withdrawn_before_runners_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit(grpo(steps=1, checkpoints=tmp_path), store=(store := agl.InMemoryLightningStore()))
    (resources_id, *_) = {rollout.resources_id for rollout in asyncio.run(store.query_rollouts())}
    left = asyncio.run(store.enqueue_rollout("say 99", resources_id=resources_id))
    agent, original = Asking(every_second), Batches.withdraw_left

    async def late(self: Batches, *args: Any) -> Any:
        await asyncio.sleep(LONG_ENOUGH_SECONDS)  # for runners that do not wait to claim it
        return await original(self, *args)

    monkeypatch.setattr(Batches, "withdraw_left", late)
    fit(grpo(steps=2, checkpoints=tmp_path, resume=True), agent, store=store)

    assert "train/say 99" not in agent.order
    assert asyncio.run(store.get_rollout_by_id(left.rollout_id)).status == "cancelled"  # type: ignore[union-attr]


def test_killed_run_is_closed_when_another_takes_its_place(tmp_path: Path) -> None:
    store = agl.InMemoryLightningStore()
    fit(grpo(steps=1, checkpoints=tmp_path), store=store)
    (dead,) = asyncio.run(store.query_runs())
    asyncio.run(store.finish_run(dead.run_id, "running"))  # as if nobody had ended it

    fit(grpo(steps=2, checkpoints=tmp_path, resume=True), store=store)

    dead, resumed = asyncio.run(store.query_runs())
    assert [dead.status, resumed.status] == ["failed", "succeeded"]
    assert dead.summary["error"].endswith(f"run '{resumed.run_id}' takes its place.")


def test_run_that_goes_on_has_the_curve_of_the_first_up_to_its_checkpoint(tmp_path: Path) -> None:
    store = agl.InMemoryLightningStore()
    fit(grpo(steps=2, checkpoints=tmp_path), store=store)
    (first,) = asyncio.run(store.query_runs())
    asyncio.run(store.add_metrics(first.run_id, 3, {"reward/mean": 9.0}))  # a step that was not saved

    fit(grpo(steps=3, checkpoints=tmp_path, resume=True), store=store)

    whole = [list(asyncio.run(store.query_metrics(run.run_id))) for run in asyncio.run(store.query_runs())]
    assert [point.step for point in whole[1]] == [1, 2, 3]
    assert [(point.time, point.values) for point in whole[1][:2]] == [
        (point.time, point.values) for point in whole[0][:2]
    ]
    assert whole[1][2].values["reward/mean"] == 0.5


# ---------------------------------------------------------------------- where the model is left


@pytest.mark.parametrize("output", ["run", "run/checkpoints"])
def test_output_that_would_replace_the_checkpoints_is_refused(tmp_path: Path, output: str) -> None:
    with pytest.raises(ConfigurationError, match="checkpoints"):
        grpo(checkpoints=tmp_path / "run" / "checkpoints", output=tmp_path / output)


def test_output_that_holds_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigurationError, match="something else than a model"):
        grpo(output=tmp_path)
