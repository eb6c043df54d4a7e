"""Whole trainings as a user runs them: with a model, over threads and processes, interrupted, killed and resumed."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

import agentlightning as agl
from agentlightning.store import SqliteLightningStore
from tests import warm_python
from tests.e2e.server_process import free_port, left_behind
from tests.e2e.training_script import PATIENT
from tests.stub_model.script import Script
from tests.stub_model.server import StubModel, running
from tests.trainer.trainings import until

SCRIPT = Path(__file__).parent / "training_script.py"
ROOT = Path(__file__).parents[2]
PATIENCE_SECONDS = 60.0


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    assert left_behind() == []


# ---------------------------------------------------------------------- loops with a model


@agl.rollout
def answering(task: str, llm: agl.LLM) -> float:
    """Asks the model with OpenAI's SDK."""
    with openai.OpenAI(base_url=llm.endpoint, api_key="none", max_retries=0) as client:
        reply = client.chat.completions.create(model=llm.model, messages=[{"role": "user", "content": task}])
    return float(task in (reply.choices[0].message.content or ""))


@agl.rollout
async def answering_async(task: str, llm: agl.LLM) -> float:
    async with openai.AsyncOpenAI(base_url=llm.endpoint, api_key="none", max_retries=0) as client:
        reply = await client.chat.completions.create(model=llm.model, messages=[{"role": "user", "content": task}])
    return float(task in (reply.choices[0].message.content or ""))


def threads(n_runners: int) -> Any:
    return agl.SharedMemoryExecutionStrategy(n_runners=n_runners, main_thread="algorithm")


def processes(n_runners: int) -> Any:
    return agl.ClientServerExecutionStrategy(n_runners=n_runners, server_port=free_port())


@pytest.fixture
def model() -> Iterator[StubModel]:
    with running(Script(lambda request: f"I heard: {request.text}")) as served:
        yield served


@pytest.mark.parametrize(
    ("agent", "place", "n_runners", "concurrency"),
    [
        (answering, processes, 2, 4),
        (answering_async, threads, 2, 1),
    ],
    ids=["plain-cs-2x4", "async-shm-2"],
)
def test_model_calls_arrive_under_the_right_rollout(
    model: StubModel, agent: Any, place: Any, n_runners: int, concurrency: int
) -> None:
    tasks = [f"question number {number:03d}" for number in range(16)]
    trainer = agl.Trainer(
        algorithm=agl.Baseline(max_queue_length=16),
        strategy=place(n_runners),
        runner={"max_concurrency": concurrency},
        initial_resources={"llm": agl.LLM(endpoint=model.openai_url, model="stub-model")},
        progress="off",
    )

    trainer.fit(agent, tasks)

    asyncio.run(check_calls(trainer.store, tasks))
    assert len(model.requests) == len(tasks)


async def check_calls(store: agl.LightningStore, tasks: list[str]) -> None:
    rollouts = await store.query_rollouts()
    assert sorted(str(rollout.input) for rollout in rollouts) == tasks
    for rollout in rollouts:
        spans = list(await store.query_spans(rollout.rollout_id))
        assert (rollout.status, agl.find_final_reward(spans)) == ("succeeded", 1.0)
        asked = [task for task in tasks if any(task in str(span.attributes) for span in spans)]
        assert asked == [rollout.input]
        assert len([span for span in spans if agl.is_reward_span(span)]) == 1
        triplets = agl.TracerTraceToTriplet().adapt(spans)
        assert [triplet.reward for triplet in triplets] == [1.0]


# ---------------------------------------------------------------------- a training as a program


class Training:
    """The script as a process group of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "store.db"
        self.port = free_port()
        self.process: subprocess.Popen[str] | None = None
        self.seen: dict[int, psutil.Process] = {}

    def start(self, *options: str, **environment: str) -> None:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("AGL_")}
        with open(self.folder / "errors.log", "a") as errors:
            self.process = warm_python.Popen(
                [sys.executable, "-W", "ignore", str(SCRIPT), f"sqlite:///{self.path}", str(self.port), *options],
                cwd=self.folder,
                env={**clean, "PYTHONPATH": str(ROOT), **environment},
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def family(self) -> list[psutil.Process]:
        """Every process of the training that was ever seen, and still runs."""
        try:
            parent = psutil.Process(self.pid)
            for process in (parent, *parent.children(recursive=True)):
                self.seen[process.pid] = process
        except psutil.NoSuchProcess:
            pass
        return [p for p in self.seen.values() if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]

    def begun(self) -> list[str]:
        """The numbers of the tasks that an agent began, each as often as it did."""
        log = self.folder / "begun.log"
        return [line.split()[0] for line in log.read_text().splitlines()] if log.exists() else []

    def runner_pids(self) -> set[int]:
        log = self.folder / "begun.log"
        return {int(line.split()[1]) for line in log.read_text().splitlines()} if log.exists() else set()

    def end(self, seconds: float = PATIENCE_SECONDS) -> tuple[int, str]:
        assert self.process is not None
        printed, _ = self.process.communicate(timeout=seconds)
        return self.process.returncode, printed

    def errors(self) -> str:
        return (self.folder / "errors.log").read_text()

    def kill_all(self) -> None:
        if self.process is None:
            return
        for process in self.family():
            process.kill()
        if self.process.returncode is None:
            self.process.communicate()


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    training = Training(tmp_path)
    yield training
    training.kill_all()


def attempts_in(path: Path) -> dict[str, list[str]]:
    """The statuses of the attempts of every rollout."""

    async def read() -> dict[str, list[str]]:
        async with SqliteLightningStore(path) as store:
            ids = [rollout.rollout_id for rollout in await store.query_rollouts()]
            return {i: [attempt.status for attempt in await store.query_attempts(i)] for i in ids}

    return asyncio.run(read())


def runs_in(path: Path) -> list[str]:
    async def read() -> list[str]:
        async with SqliteLightningStore(path) as store:
            return [run.status for run in await store.query_runs()]

    return asyncio.run(read())


@pytest.mark.slow
@pytest.mark.parametrize("options", [("--hang",), ("--restarts", "1"), ("--awaited",)], ids=str)
def test_ctrl_c_stops_everything_in_the_stated_time(training: Training, options: tuple[str, ...]) -> None:
    training.start("--tasks", "40", "--seconds", "0.2", *options)
    until(lambda: len(training.begun()) >= 4)
    training.family()

    os.killpg(training.pid, signal.SIGINT)
    began = time.monotonic()
    code, printed = training.end()
    took = time.monotonic() - began
    until(lambda: not training.family())

    assert took < 4 * 1.0 + 8.0  # the grace, three stronger signals, and a machine that does other things too
    assert runs_in(training.path) == ["stopped"]
    assert "all done" not in printed
    assert code == -signal.SIGINT, training.errors()[-2000:]
    assert "fit returned" not in printed


@pytest.mark.slow
@pytest.mark.claim(167)
def test_ctrl_c_stops_threads_too(training: Training) -> None:
    training.start("--tasks", "40", "--seconds", "0.2", "--strategy", "shm", "--hang")
    until(lambda: len(training.begun()) >= 4)

    os.killpg(training.pid, signal.SIGINT)
    code, printed = training.end()

    assert (code, printed) == (-signal.SIGINT, "")
    assert runs_in(training.path) == ["stopped"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "count", "is_grouped"),
    [
        (("--hang",), 1, True),
        (("--hang",), 2, False),
        (("--strategy", "shm"), 2, True),
        (("--restarts", "1"), 1, False),
        (("--restarts", "1"), 2, True),
        (("--awaited",), 1, True),
    ],
    ids=["hang", "hang-twice-one", "shm-twice", "restarts-one", "restarts-twice", "awaited"],
)
def test_sigterm_stops_everything_and_closes_the_run(
    training: Training, options: tuple[str, ...], count: int, is_grouped: bool
) -> None:
    training.start("--tasks", "40", "--seconds", "0.2", *options)
    until(lambda: len(training.begun()) >= 4)
    training.family()

    for _ in range(count):
        (os.killpg if is_grouped else os.kill)(training.pid, signal.SIGTERM)
    code, printed = training.end()
    until(lambda: not training.family())

    assert runs_in(training.path) == ["stopped"]
    assert "Traceback" not in training.errors(), training.errors()[-2000:]
    # `fit` returns, except in `await trainer.run`, whose coroutine returns likewise.
    assert (code, printed.splitlines()) == (0, ["fit returned"])


@pytest.mark.slow
def test_what_hung_when_a_training_was_interrupted_is_not_left_running(training: Training) -> None:
    training.start("--tasks", "2", "--hang", "--grace", "1")
    until(lambda: "0" in training.begun())

    os.killpg(training.pid, signal.SIGINT)
    training.end()

    assert attempts_in(training.path)["task-0"][0] not in ("preparing", "running")


@pytest.mark.slow
@pytest.mark.parametrize("options", [("--hang",), ("--restarts", "1")], ids=str)
def test_a_parent_that_is_killed_leaves_no_orphans(training: Training, options: tuple[str, ...]) -> None:
    training.start("--tasks", "100", "--seconds", "0.2", *options)
    until(lambda: len(training.begun()) >= 4)
    training.family()

    os.kill(training.pid, signal.SIGKILL)
    training.end()

    until(lambda: not training.family())


@pytest.mark.slow
@pytest.mark.parametrize(("n_runners", "restarts"), [(2, 0), (1, 1)])
def test_a_runner_that_dies_in_mid_rollout_is_recovered(training: Training, n_runners: int, restarts: int) -> None:
    training.start("--die", "--runners", str(n_runners), "--restarts", str(restarts), "--seconds", "0.05")

    code, printed = training.end()

    attempts = attempts_in(training.path)
    assert attempts.pop("task-1") == ["unresponsive", "succeeded"]
    assert all(statuses == ["succeeded"] for statuses in attempts.values())
    assert "all done ['succeeded']" in printed
    assert code == 0


@pytest.mark.slow
def test_a_training_whose_last_runner_died_raises(training: Training) -> None:
    training.start("--die", "--runners", "1")

    code, printed = training.end()

    assert (code, "Subprocesses failed: runner-0" in printed) == (3, True)


@pytest.mark.slow
def test_a_training_that_was_killed_is_resumed(training: Training) -> None:
    training.start("--tasks", "16", "--seconds", "0.1")
    until(lambda: len(training.begun()) >= 6)
    training.family()
    os.kill(training.pid, signal.SIGKILL)
    training.end()
    until(lambda: not training.family())
    before = attempts_in(training.path)
    finished = [rollout_id for rollout_id, statuses in before.items() if statuses == ["succeeded"]]
    assert finished
    training.port = free_port()

    training.start("--tasks", "16", "--seconds", "0.1")
    code, printed = training.end()

    after = attempts_in(training.path)
    assert (code, printed.splitlines()[0]) == (0, "all done ['succeeded']")
    assert len(after) == 16
    assert all(after[rollout_id] == ["succeeded"] for rollout_id in finished)
    assert all(statuses.count("succeeded") == 1 for statuses in after.values())
    assert all(training.begun().count(rollout_id.removeprefix("task-")) == 1 for rollout_id in finished)
    assert PATIENT.max_attempts >= max(map(len, after.values()))


@pytest.mark.slow
def test_the_two_roles_are_played_by_two_programs(training: Training, tmp_path: Path) -> None:
    training.start("--tasks", "6", AGL_CURRENT_ROLE="algorithm")
    runner = Training(tmp_path)
    runner.port = training.port
    runner.path = tmp_path / "other.db"
    runner.start("--tasks", "6", AGL_CURRENT_ROLE="runner")
    try:
        code, printed = training.end()
        runner.family()
        os.killpg(runner.pid, signal.SIGINT)
        runner_code, _ = runner.end()
    finally:
        runner.kill_all()

    assert (code, printed.splitlines()) == (0, ["all done ['succeeded']", "fit returned"])
    assert runner_code == -signal.SIGINT
    assert runner.pid not in training.runner_pids()  # two runners, each in a process of its own
    assert not runner.family()
