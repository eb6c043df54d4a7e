"""What one sees of a training where there is no terminal: in CI, under nohup, in a notebook, in the log of a job."""

import re
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.trainer.views import agl_command


def one(task: Any) -> float:
    return 1.0


@agl.algo
async def three_steps(*, store: agl.LightningStore, train_dataset: Any) -> None:
    (run,) = await store.query_runs(status_in=["running"])
    for step in range(3):
        rollout = await store.enqueue_rollout(train_dataset[0])
        await store.wait_for_rollouts([rollout.rollout_id])
        await store.add_metrics(run.run_id, step, {"seconds/all": 1.5, "reward/mean": step / 2})


@agl.algo
async def no_steps(*, store: agl.LightningStore, train_dataset: Any) -> None:
    rollout = await store.enqueue_rollout(train_dataset[0])
    await store.wait_for_rollouts([rollout.rollout_id])


def fit(algorithm: Any, **options: Any) -> None:
    defaults: dict[str, Any] = {"store": "memory", "strategy": "shm", "initial_resources": {}}
    agl.Trainer(algorithm=algorithm, name="nightly", **{**defaults, **options}).fit(one, train_dataset=["task"])


@pytest.fixture(autouse=True)
def without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AGL_PROGRESS", raising=False)


def test_a_training_without_a_terminal_writes_a_line_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    fit(three_steps)

    shown = capsys.readouterr()
    steps = re.findall(r"^nightly  \d+:\d\d  step (\d)  reward/mean (\S+)  seconds/all 1.5", shown.err, re.MULTILINE)
    assert steps == [("0", "0"), ("1", "0.5"), ("2", "1")]
    assert shown.out == ""


def test_the_first_line_says_where_to_look(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    fit(no_steps, store=f"sqlite:///{tmp_path}/runs.db")

    first, *_, last = capsys.readouterr().err.splitlines()
    assert re.match(rf"nightly  0:00  run \S+  store {tmp_path}/runs.db  look at it: \S*agl dashboard ", first)
    assert last.endswith(f"look at it again: {agl_command()} dashboard {tmp_path}/runs.db")


def test_the_last_line_says_how_it_went(capsys: pytest.CaptureFixture[str]) -> None:
    fit(no_steps)

    first, last = capsys.readouterr().err.splitlines()
    assert first.endswith("store in memory")
    assert re.fullmatch(r"nightly  \d+:\d\d  ended  rollouts: 1 succeeded  mean reward 1", last)


@pytest.mark.parametrize("progress", [None, "off"])
def test_progress_can_be_switched_off(capsys: pytest.CaptureFixture[str], progress: Any) -> None:
    fit(three_steps, progress=progress)

    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "")


@pytest.mark.parametrize("progress", [True, 3, "jsn"])
def test_a_progress_that_is_no_mode_is_answered_with_the_modes(progress: Any) -> None:
    with pytest.raises(ValueError, match="progress must be one of auto, rich, plain, json, off; it is"):
        agl.Trainer(progress=progress)
