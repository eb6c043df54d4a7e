"""`agl runner`: joins a training from another machine, works for it, and leaves."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from agentlightning.store import LightningStoreClient
from agentlightning.types import AttemptedRollout, RolloutConfig
from tests import warm_python
from tests.e2e.server_process import ServerProcess, left_behind
from tests.runner.working import RESOURCES

PATIENCE_SECONDS = 60.0
AGENTS = """
import os, pathlib, time
from agentlightning import LitAgent, rollout

class Halving(LitAgent):
    def rollout(self, task, resources, rollout):
        part = pathlib.Path(f"begun-{task['n']}.part")
        part.write_text(str(os.getpid()))
        part.replace("begun")
        time.sleep(task.get("seconds", 0))
        return task["n"] / 2

agent = Halving()

@rollout
async def prompted(task, prompt_template):
    return 0.5

"""


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("AGL_CURRENT_ROLE", "AGL_SERVER_HOST", "AGL_SERVER_PORT", "AGL_MANAGED_STORE", "AGL_STORE_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    yield
    assert left_behind() == []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "user_agents.py").write_text(AGENTS)
    return tmp_path


class Joining:
    """The command as a process group of its own."""

    def __init__(self, folder: Path, *arguments: str, **environment: str) -> None:
        self._output = folder / f"output-{len(list(folder.glob('output-*')))}"
        with self._output.open("w") as output:
            self.process = warm_python.Popen(
                [sys.executable, "-m", "agentlightning.cli", "runner", *arguments],
                cwd=folder,
                env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **environment},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def printed(self) -> str:
        return self._output.read_text()

    def interrupt(self) -> None:
        os.killpg(self.process.pid, signal.SIGINT)

    def end(self) -> tuple[int, str]:
        return self.process.wait(timeout=PATIENCE_SECONDS), self.printed()

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@pytest.fixture
def join(folder: Path) -> Iterator[Callable[..., Joining]]:
    joined: list[Joining] = []

    def start(*arguments: str, **environment: str) -> Joining:
        joined.append(Joining(folder, *arguments, **environment))
        return joined[-1]

    yield start
    for one in joined:
        one.kill()


async def enqueue(store: LightningStoreClient, *tasks: Any, config: RolloutConfig | None = None) -> list[str]:
    await store.add_resources(RESOURCES)
    return [(await store.enqueue_rollout(task, config=config or RolloutConfig())).rollout_id for task in tasks]


async def attempts_of(store: LightningStoreClient, ids: list[str]) -> list[AttemptedRollout]:
    done = await store.wait_for_rollouts(rollout_ids=ids, timeout=PATIENCE_SECONDS)
    assert len(done) == len(ids)
    rollouts = [await store.get_rollout_by_id(rollout_id) for rollout_id in ids]
    return [rollout for rollout in rollouts if isinstance(rollout, AttemptedRollout)]


@pytest.mark.slow
async def test_it_works_for_a_store_and_leaves_with_ctrl_c(join: Any) -> None:
    options = ("--max-concurrency", "4", "--n-runners", "2")
    with ServerProcess() as server:
        async with LightningStoreClient(server.url) as store:
            ids = await enqueue(store, *({"n": number} for number in range(6)))
            runner = join("--store", server.url, "--name", "guest", *options, "user_agents:agent")
            rollouts = await attempts_of(store, ids)
            runner.interrupt()
            code, printed = await asyncio.to_thread(runner.end)

    assert {rollout.status for rollout in rollouts} == {"succeeded"}
    assert {(rollout.attempt.worker_id or "").rpartition("-")[0].partition("-")[0] for rollout in rollouts} == {"guest"}
    assert (code, "Traceback" in printed) == (130, False), printed
    assert f"guest works for {server.url}" in printed


@pytest.mark.slow
@pytest.mark.parametrize(("number", "expected_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
async def test_a_signal_lets_what_runs_finish(
    join: Any, folder: Path, number: signal.Signals, expected_code: int
) -> None:
    with ServerProcess() as server:
        async with LightningStoreClient(server.url) as store:
            ids = await enqueue(store, {"n": 1, "seconds": 1.0}, {"n": 2, "seconds": 1.0})
            runner = join("--store", server.url, "user_agents:agent")
            await until((folder / "begun").exists)  # what is only claimed by then is given back
            os.killpg(runner.process.pid, number)
            code, _ = await asyncio.to_thread(runner.end)
            statuses = [rollout.status for rollout in await store.query_rollouts(rollout_ids=ids)]

    assert (code, sorted(statuses)) == (expected_code, ["queuing", "succeeded"])


@pytest.mark.slow
async def test_a_second_ctrl_c_leaves_at_once_and_gives_back(join: Any, folder: Path) -> None:
    config = RolloutConfig(max_attempts=2, retry_condition=["unresponsive"])
    with ServerProcess() as server:
        async with LightningStoreClient(server.url) as store:
            (rollout_id,) = await enqueue(store, {"n": 1, "seconds": 500.0}, config=config)
            runner = join("--store", server.url, "user_agents:agent")
            await until((folder / "begun").exists)
            runner.interrupt()
            await until(lambda: "Ctrl-C again leaves at once" in runner.printed())  # two at once would be one
            runner.interrupt()
            began = time.monotonic()
            _, printed = await asyncio.to_thread(runner.end)
            took = time.monotonic() - began
            rollout = await store.get_rollout_by_id(rollout_id)

    assert took < 20
    assert rollout is not None
    assert rollout.status == "requeuing", printed
    assert "Traceback" not in printed, printed


@pytest.mark.slow
async def test_what_does_not_finish_in_the_time_that_is_left_is_given_back(join: Any, folder: Path) -> None:
    config = RolloutConfig(max_attempts=2, retry_condition=["unresponsive"])
    with ServerProcess() as server:
        async with LightningStoreClient(server.url) as store:
            (rollout_id,) = await enqueue(store, {"n": 1, "seconds": 500.0}, config=config)
            runner = join("--store", server.url, "--grace", "0.5", "--n-runners", "2", "user_agents:agent")
            await until((folder / "begun").exists)
            while len(await store.query_workers()) < 2:  # until then the command may still start the second process
                await asyncio.sleep(0.05)
            runner.interrupt()
            code, printed = await asyncio.to_thread(runner.end)
            rollout = await store.get_rollout_by_id(rollout_id)

    assert rollout is not None
    assert (code, rollout.status) == (130, "requeuing"), printed
    assert "in 0.5 s at the latest; Ctrl-C again leaves at once" in printed
    assert "Traceback" not in printed, printed


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.05)


@pytest.mark.slow
async def test_a_token_lets_it_in(join: Any) -> None:
    token = "a-token-of-some-length-0123456789"
    with ServerProcess(token=token) as server:
        async with LightningStoreClient(server.url, token=token) as store:
            ids = await enqueue(store, {"n": 1})
            options = ("--store", server.url, "--max-rollouts", "1")
            runner = join(*options, "user_agents:prompted", AGL_STORE_TOKEN=token)
            rollouts = await attempts_of(store, ids)
            code, printed = await asyncio.to_thread(runner.end)

    assert ([rollout.status for rollout in rollouts], code) == (["succeeded"], 0)
    assert token not in printed


@pytest.mark.slow
def test_a_runner_process_that_is_killed_leaves_no_other(join: Any) -> None:
    with ServerProcess() as server:
        runner = join("--store", server.url, "--n-runners", "2", "--grace", "1", "user_agents:agent")
        family: list[psutil.Process] = []
        deadline = time.monotonic() + PATIENCE_SECONDS
        while len(family) < 2:
            assert time.monotonic() < deadline
            family = psutil.Process(runner.process.pid).children(recursive=True)
            time.sleep(0.05)
        os.kill(runner.process.pid, signal.SIGKILL)
        runner.end()
        _, alive = psutil.wait_procs(family, timeout=20)

    assert alive == []
