"""GRPO as a whole: real model, engine, proxy, store and runner; few steps and small groups."""

import asyncio
import logging
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="GRPO needs torch")

import agentlightning as agl  # noqa: E402 # after the check for torch
from agentlightning.algorithm.grpo import Checkpoints, SampleSettings  # noqa: E402
from agentlightning.algorithm.grpo.grpo import GRPO  # noqa: E402
from agentlightning.engine.checkpoint import load  # noqa: E402
from agentlightning.engine.tiny import tokenizer  # noqa: E402
from agentlightning.errors import ConfigurationError, EngineError, TrainingError  # noqa: E402
from tests.algorithm.grpo.training import (  # noqa: E402
    PATIENCE_SECONDS,
    TASKS,
    Asking,
    SharedEngine,
    are_same,
    ask,
    curve,
    every_second,
    fit,
    grpo,
    trainer,
    weights,
)


async def calls(made: agl.Trainer) -> list[tuple[int, str]]:
    """Of every call that was recorded: the step it was made for, and the weights that answered."""
    found: list[tuple[int, str]] = []
    for rollout in await made.store.query_rollouts():
        for span in await made.store.query_spans(rollout.rollout_id):
            if span.name == "agentlightning.proxy.call" or "agentlightning.weights_version" in span.attributes:
                step = (rollout.metadata or {}).get("step", -1)
                found.append((step, str(span.attributes.get("agentlightning.weights_version"))))
    return found


# ---------------------------------------------------------------------- a run


def test_steps_change_the_weights_and_every_call_says_which_weights_answered(engine: SharedEngine) -> None:
    algorithm = grpo()

    made = fit(algorithm)

    assert not are_same(weights(algorithm), engine.base)
    assert engine.published == [1, 2, 3]
    assert sorted(set(asyncio.run(calls(made)))) == [(0, "0"), (1, "1"), (2, "2")]
    assert [point["learner/samples"] for point in curve(made, "learner/samples")] == [4.0] * 3
    assert [point["reward/mean"] for point in curve(made, "reward/mean")] == [0.5] * 3
    assert {"seconds/rollouts", "seconds/learning", "seconds/publishing"} <= set(
        curve(made, "seconds/rollouts", "seconds/learning", "seconds/publishing")[0]
    )


def test_failed_rollouts_can_be_learned_from_as_the_worst(
    engine: SharedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    def judge(agent: Asking, task: Any, rollout: Any, said: str) -> float:
        if agent.seen[f"{rollout.mode}/{task}"] == 2:
            raise IndexError("the model called no tool")
        return 1.0

    with caplog.at_level(logging.WARNING, logger="agentlightning.algorithm.grpo"):
        made = fit(grpo(steps=1, sampling=SampleSettings(failed="worst")), Asking(judge))

    (figures,) = curve(made, "rollouts/failed", "skipped/failed", "learner/samples", "reward/mean")
    assert figures == {"rollouts/failed": 2, "skipped/failed": 0, "learner/samples": 4, "reward/mean": 0.5}
    assert "2 of 4 rollouts gave no reward and count 0; most often: IndexError: the model called no tool" in caplog.text


def test_answers_that_were_cut_off_are_left_out_and_counted(engine: SharedEngine) -> None:
    class Hurried(Asking):
        async def rollout_async(self, task: Any, resources: Any, rollout: Any) -> float:
            self.seen[f"{rollout.mode}/{task}"] += 1
            limit = 1 if self.seen[f"{rollout.mode}/{task}"] == 3 else 12
            said = await ask(resources["main_llm"], rollout, "say 7", seed=1, max_tokens=limit)
            return self.judge(self, task, rollout, said)

    made = fit(grpo(group_size=3, steps=1), Hurried(every_second))

    (figures,) = curve(made, "samples/truncated_calls", "skipped/truncated", "learner/samples")
    assert figures == {"samples/truncated_calls": 2, "skipped/truncated": 2, "learner/samples": 4}


def test_steps_without_variance_say_why_and_warn_from_the_third_in_a_row(
    engine: SharedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    def judge(agent: Asking, task: Any, rollout: Any, said: str) -> float:
        return 1.0 if rollout.metadata["step"] < 3 else every_second(agent, task, rollout, said)

    with caplog.at_level(logging.INFO, logger="agentlightning.algorithm.grpo"):
        made = fit(grpo(steps=4), Asking(judge))

    told = [record for record in caplog.records if "taught tiny nothing: 0 of 4 rollouts" in record.getMessage()]
    assert [record.levelname for record in told] == ["INFO", "INFO", "WARNING"]
    assert "4 rollouts no_variance" in caplog.text
    assert [point["skipped/no_variance"] for point in curve(made, "skipped/no_variance")] == [4.0, 4.0, 4.0, 0.0]
    assert engine.published == [1]


def test_dynamic_sampling_sends_more_tasks_until_enough_groups_differ(engine: SharedEngine) -> None:
    first: list[str] = []

    def judge(agent: Asking, task: Any, rollout: Any, said: str) -> float:
        if len(first) < 2 and task not in first:
            first.append(task)
        return 1.0 if task in first else every_second(agent, task, rollout, said)

    made = fit(grpo(steps=1, dynamic_sampling=True), Asking(judge))

    (figures,) = curve(made, "groups/all", "groups/used")
    assert figures == {"groups/all": 4, "groups/used": 2}


def test_target_and_time_end_a_run(engine: SharedEngine) -> None:
    reached, late = grpo(steps=50, target_reward=0.5), grpo(steps=50, max_seconds=1e-9)

    fit(reached)
    fit(late)

    assert reached.progress.step == 5
    assert late.progress.step == 0


def test_validation_before_and_after_counts_what_failed_as_the_worst_and_the_run_keeps_it(engine: SharedEngine) -> None:
    def judge(agent: Asking, task: Any, rollout: Any, said: str) -> float:
        if rollout.mode == "val" and task == "say 1":
            raise OSError("no disk")
        return 0.25 if rollout.mode == "val" else every_second(agent, task, rollout, said)

    algorithm = grpo(steps=2, validate_every=1, seed=11)
    made = trainer(algorithm, concurrency=2)
    made.fit(Asking(judge), TASKS, ["say 1", "say 2", "say 3"])

    assert algorithm.baseline is not None
    assert (algorithm.baseline.mean, algorithm.baseline.n) == (pytest.approx(0.5 / 3), 3)
    assert str(algorithm.baseline).endswith("(n=3, 1 failed and count 0)")
    assert algorithm.result == algorithm.baseline
    assert (
        curve(made, "validation/reward", "validation/failed")
        == [{"validation/reward": pytest.approx(0.5 / 3), "validation/failed": 1.0}] * 3
    )
    assert [len(examples) for examples in algorithm.examples] == [3, 3, 3]
    (run,) = asyncio.run(made.store.query_runs())
    assert run.summary["validation_before"]["mean"] == run.summary["validation_after"]["mean"] == pytest.approx(0.5 / 3)
    assert (run.config["seed"], run.config["settings"]["algorithm"]["model"]) == (11, "tiny")
    assert run.config["settings"]["algorithm"]["learning"]["clip_high"] == algorithm.learning.clip_high


def test_agent_that_always_fails_is_told_before_training(engine: SharedEngine) -> None:
    def judge(agent: Asking, task: Any, rollout: Any, said: str) -> float:
        raise OSError("no disk")

    with pytest.raises(TrainingError, match="None of 2 rollouts gave a reward; most often: OSError: no disk"):
        trainer(grpo()).fit(Asking(judge), TASKS, TASKS[:2])


# ---------------------------------------------------------------------- stopping and going on


def test_run_that_goes_on_reaches_the_same_weights(engine: SharedEngine, tmp_path: Path) -> None:
    straight, agent = grpo(steps=4, temperature=0.0), Asking(every_second)  # nothing is left to chance
    fit(straight, agent)
    first, second = Asking(every_second), Asking(every_second)

    fit(grpo(steps=2, temperature=0.0, checkpoints=tmp_path), first)
    resumed = grpo(steps=4, temperature=0.0, checkpoints=tmp_path, resume=True)
    fit(resumed, second)

    assert first.order + second.order == agent.order
    assert are_same(weights(straight), weights(resumed))
    assert (resumed.progress.step, len(resumed.progress.rewards)) == (4, 4)
    assert engine.published == [2, 3, 4]


def test_run_that_goes_on_compares_with_the_base_of_the_first(engine: SharedEngine, tmp_path: Path) -> None:
    is_first = True

    def judge(agent: Asking, task: Any, rollout: Any, said: str) -> float:
        return float(not is_first) if rollout.mode == "val" else every_second(agent, task, rollout, said)

    trainer(grpo(steps=1, checkpoints=tmp_path)).fit(Asking(judge), TASKS, TASKS[:2])
    is_first = False
    resumed = grpo(steps=3, validate_every=1, checkpoints=tmp_path, resume=True)
    trainer(resumed).fit(Asking(judge), TASKS, TASKS[:2])

    gain = resumed.run_summary()["gain"]
    assert (gain["mean"], gain["n"]) == (1.0, 2)


@pytest.mark.parametrize("moment", ["rollouts", "learning"])
def test_run_that_is_stopped_leaves_a_checkpoint_of_whole_steps_and_its_model(
    engine: SharedEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    from agentlightning.algorithm.grpo.learner import Learner

    made: list[agl.Trainer] = []
    original, is_cancelled = Learner.update, threading.Event()

    def stopping(self: Learner, *batch: Any) -> Any:
        if self.version == 1 and moment == "learning":
            made[0].stop()
        return original(self, *batch)

    def judge(agent: Asking, task: Any, rollout: Any, said: str) -> float:
        if rollout.metadata["step"] == 1 and moment == "rollouts" and made[0].state == "running":
            made[0].stop()
        if made[0].state != "running":  # an agent may be quicker than the algorithm notices
            assert is_cancelled.wait(PATIENCE_SECONDS)
        return every_second(agent, task, rollout, said)

    monkeypatch.setattr(Learner, "update", stopping)
    stopped, agent = grpo(steps=50, checkpoints=tmp_path / "checkpoints", output=tmp_path / "out"), Asking(judge)
    run = stopped.run

    async def watched(*args: Any, **kwargs: Any) -> None:
        try:
            await run(*args, **kwargs)
        except asyncio.CancelledError:
            is_cancelled.set()
            raise

    monkeypatch.setattr(stopped, "run", watched)
    made.append(trainer(stopped, concurrency=1))
    made[0].fit(agent, TASKS)

    kept = Checkpoints(tmp_path / "checkpoints" / "tiny").latest()
    assert kept is not None
    assert kept.step == kept.progress["version"] == (1 if moment == "rollouts" else 2)
    place = kept.progress["curriculum"]
    assert place["position"] - len(place["open"]) == 2 * kept.step
    assert are_same(weights(stopped), kept.model_state())
    assert are_same(weights(stopped), load(str(tmp_path / "out"))[0].state())
    statuses = [rollout.status for rollout in asyncio.run(made[0].store.query_rollouts())]
    assert set(statuses) <= {"succeeded", "cancelled", "failed"}


# ---------------------------------------------------------------------- asynchronous


def test_rollouts_of_the_next_step_run_while_the_model_learns(
    engine: SharedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from agentlightning.algorithm.grpo.learner import Learner

    agent, original, were_answered = Asking(every_second), Learner.update, list[bool]()

    def update(self: Learner, *batch: Any) -> Any:
        if self.version < 3:
            were_answered.append(agent.await_step(self.version + 1))
        return original(self, *batch)

    monkeypatch.setattr(Learner, "update", update)
    made = fit(grpo(steps=4, max_staleness=1), agent)

    assert were_answered == [True] * 3
    stalest = [point["staleness/max"] for point in curve(made, "staleness/max")]
    assert stalest == [0.0, 1.0, 1.0, 1.0]
    assert len(agent.order) == 4 * 2 * 2
    assert all(step - 1 <= int(version) <= step for step, version in asyncio.run(calls(made)))


# ---------------------------------------------------------------------- several agents


def test_only_calls_of_matching_agents_are_learned_from(engine: SharedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    from agentlightning.algorithm.grpo.learner import Learner

    class Two(Asking):
        async def rollout_async(self, task: Any, resources: Any, rollout: Any) -> float:
            self.seen[f"{rollout.mode}/{task}"] += 1
            await ask(resources["main_llm"], rollout, "say 1", agent="critic")
            await ask(resources["main_llm"], rollout, str(task), agent="solver")
            return self.judge(self, task, rollout, "")

    seen, original = list[Any](), Learner.update
    monkeypatch.setattr(Learner, "update", lambda self, *batch: (seen.extend(batch[0]), original(self, *batch))[1])

    algorithm = grpo(steps=1, agent_match="^solver$")
    fit(algorithm, Two(every_second))

    assert len(seen) == 4
    said = [tokenizer.decode(sample.token_ids) for sample in seen]
    assert not any("say 1" in text for text in said)
    assert all(any(task in text for task in TASKS) for text in said)


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_is_left")
def test_two_policies_learn_each_from_its_own_calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from agentlightning.algorithm.grpo.learner import Learner

    class Pair(Asking):
        """The planner's answers decide the reward; the solver is asked in half of the rollouts only."""

        async def rollout_async(self, task: Any, resources: Any, rollout: Any) -> float:
            self.seen[f"{rollout.mode}/{task}"] += 1
            await ask(resources["planner"], rollout, "say 7")
            if task in TASKS[::2]:
                await ask(resources["solver"], rollout, "run 3+4")
            return self.judge(self, task, rollout, "")

    seen, original = dict[int, list[Any]](), Learner.update

    def update(self: Learner, *batch: Any) -> Any:
        seen.setdefault(id(self), []).extend(batch[0])
        return original(self, *batch)

    monkeypatch.setattr(Learner, "update", update)
    algorithm = grpo(model={"planner": "tiny", "solver": "tiny"}, tasks_per_step=4, steps=2, output=tmp_path / "out")
    made = fit(algorithm, Pair(every_second))

    planner, solver = algorithm.policies
    said = {
        policy.name: [tokenizer.decode(sample.token_ids) for sample in seen[id(policy.learner)]]
        for policy in (planner, solver)
    }
    assert all("say 7" in text and "run 3+4" not in text for text in said["planner"])
    assert all("run 3+4" in text and "say 7" not in text for text in said["solver"])
    assert len(seen[id(planner.learner)]) == 16
    assert 0 < len(seen[id(solver.learner)]) < 16
    assert not are_same(weights(algorithm, 0), weights(algorithm, 1))
    assert [point["planner/learner/samples"] for point in curve(made, "planner/learner/samples")] == [8.0, 8.0]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["planner", "solver"]


# ---------------------------------------------------------------------- the proxy and the engine


@pytest.mark.parametrize("is_running", [True, False], ids=["running", "not_running"])
def test_proxy_of_the_trainer_keeps_its_other_models(engine: SharedEngine, is_running: bool) -> None:
    judge: Any = {"model_name": "judge", "litellm_params": {"model": "openai/x", "api_base": "http://127.0.0.1:9/v1"}}
    store, during = agl.InMemoryLightningStore(), list[Any]()
    proxy = agl.LLMProxy(0, [judge], store)
    if is_running:
        proxy.start()

    def look(*given: Any) -> float:
        during.append([entry["model_name"] for entry in proxy.model_list])
        return every_second(*given)

    fit(grpo(steps=1), Asking(look), store=store, llm_proxy=proxy)

    assert during[0] == ["judge", "tiny"]
    assert list(proxy.model_list) == [judge]
    assert proxy.is_running() == is_running
    if is_running:
        proxy.stop()


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_is_left")
def test_engine_that_dies_ends_the_run_with_its_last_words(tmp_path: Path) -> None:
    algorithm = grpo(steps=50, checkpoints=tmp_path)
    is_over = threading.Event()

    def judge(agent: Asking, task: Any, rollout: Any, said: str) -> float:
        if rollout.metadata["step"] == 1 and not is_over.is_set():
            is_over.set()
            engine = algorithm.policies[0].engine
            assert engine.process_id is not None
            os.kill(engine.process_id, signal.SIGKILL)
            while engine.is_running():
                time.sleep(0.01)
        return every_second(agent, task, rollout, said)

    with pytest.raises(EngineError, match="The engine's process has ended with code -9"):
        fit(algorithm, Asking(judge))

    kept = Checkpoints(tmp_path / "tiny").latest()
    assert kept is not None
    assert kept.step >= 1


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_is_left")
def test_model_that_cannot_be_loaded_leaves_nothing_running() -> None:
    with pytest.raises(EngineError, match=r"^There is no model 'no-such-model'"):
        fit(GRPO({"good": "tiny", "bad": "no-such-model"}, group_size=2))


# ---------------------------------------------------------------------- choices


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"group_size": 1}, "at least 2"),
        ({"tasks_per_step": 0}, "tasks_per_step is 0"),
        ({"steps": 0}, "^steps is 0"),
        ({"save_every": 0}, "save_every is 0"),
        ({"max_staleness": -1}, "max_staleness is -1"),
        ({"temperature": -0.5}, "temperature is -0.5"),
        ({"validation_tasks": 0}, "validation_tasks is 0"),
        ({"validation_failed": "zero"}, "validation_failed is 'zero'"),
        ({"resume": True}, "name the folder"),
        ({"model": {}}, "no model"),
        ({"model": {"a/b": "tiny"}}, "cannot be called 'a/b'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_choice_that_cannot_work_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        GRPO(**changes)


def test_temperature_of_the_rollouts_is_that_of_the_samples() -> None:
    algorithm = grpo(temperature=0.7, sampling=SampleSettings(advantage="rloo"))
    assert (algorithm.sampling.temperature, algorithm.sampling.advantage) == (0.7, "rloo")


def test_second_run_of_the_same_algorithm_begins_anew(engine: SharedEngine) -> None:
    algorithm = grpo(steps=1)
    fit(algorithm)
    fit(algorithm)
    assert (algorithm.progress.step, algorithm.policies[0].version) == (1, 1)


def test_without_tasks_there_is_no_training() -> None:
    with pytest.raises(ConfigurationError, match="train_dataset"):
        asyncio.run(GRPO().run())
