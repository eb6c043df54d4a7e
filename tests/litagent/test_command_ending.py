"""Nothing of a program is left when its rollout is over, however it ended. Real processes, looked for by their ids."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from agentlightning.litagent.command import CommandAgent
from agentlightning.runner import LitAgentRunner
from agentlightning.tracer import OtelTracer
from agentlightning.utils.child_process import CapturedProcess, ProgramPlan
from tests import warm_python
from tests.litagent.workbench import RESOURCES, Outcome, Workbench, is_alive
from tests.runner.working import until

pytestmark = pytest.mark.usefixtures("no_process_is_left")

PATIENCE_SECONDS = 20.0

STUBBORN = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open("pids", "a").write(f"{os.getpid()}\\n")
time.sleep(1000)
"""

DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        open("pids", "a").write(f"{os.getpid()}\\n")
        time.sleep(1000)
    os._exit(0)
os.wait()
while not os.path.exists("pids") or not os.path.getsize("pids"):
    time.sleep(0.01)
"""

RUNNER = """
import asyncio, sys
from agentlightning.litagent.command import CommandAgent
from agentlightning.store import InMemoryLightningStore
from agentlightning.runner import LitAgentRunner
from agentlightning.tracer import OtelTracer

async def main():
    runner = LitAgentRunner(OtelTracer(instrument=False))
    with runner.run_context(agent=CommandAgent(sys.argv[1:]), store=InMemoryLightningStore()):
        await runner.step("task", resources={})

asyncio.run(main())
"""

INTERRUPTED = """
import os, subprocess, time

class Interrupted(subprocess.Popen):
    def __init__(self, args, **options):
        super().__init__(args, **options)
        if "agl-guard" not in args:
            while not os.path.exists("pids") or not os.path.getsize("pids"):
                time.sleep(0.01)
            raise KeyboardInterrupt

subprocess.Popen = Interrupted
"""


def shell(script: str, folder: Path, **options: Any) -> CommandAgent:
    return CommandAgent(["sh", "-c", script], cwd=folder, **options)


def pids(folder: Path) -> list[int]:
    file = folder / "pids"
    return [int(line) for line in file.read_text().split()] if file.exists() else []


class Awaited(CommandAgent):
    """Its time begins to run when so many processes have said that they are ready."""

    def __init__(self, command: list[str], folder: Path, *, count: int = 1) -> None:
        super().__init__(command, cwd=folder, timeout_seconds=0.1)
        self.folder = folder
        self.count = count

    async def start_program(self, plan: ProgramPlan) -> CapturedProcess:
        program = await super().start_program(plan)
        try:
            await until(self.is_ready)
        except BaseException:
            await program.end(grace_seconds=0)
            raise
        return program

    def is_ready(self) -> bool:
        return len(pids(self.folder)) == self.count


class AwaitedStop(Awaited):
    """Its program is ready when it has stopped itself."""

    def is_ready(self) -> bool:
        return super().is_ready() and psutil.Process(pids(self.folder)[0]).status() == psutil.STATUS_STOPPED


def nothing_lives(folder: Path, count: int) -> bool:
    found = pids(folder)
    return len(found) == count and not any(map(is_alive, found))


# ---------------------------------------------------------------------- time


async def test_a_program_that_takes_too_long_is_ended(workbench: Workbench, tmp_path: Path) -> None:
    agent = Awaited(["sh", "-c", "echo begun; echo hint >&2; echo $$ > pids; sleep 1000"], tmp_path)

    outcome = await workbench.run(agent)

    assert outcome.attempt.status == "timeout"
    assert "did not end within 0.1 s and was killed. The end of its stderr:\nhint" in outcome.message
    assert outcome.text("stdout") == "begun\n"
    assert nothing_lives(tmp_path, 1)


async def test_a_program_is_asked_before_it_is_killed(workbench: Workbench, tmp_path: Path) -> None:
    script = "trap 'echo bye; exit 0' TERM; echo $$ > pids; while :; do sleep 0.05; done"
    outcome = await workbench.run(Awaited(["sh", "-c", script], tmp_path))
    assert outcome.text("stdout") == "bye\n"


async def test_a_program_that_does_not_listen_is_killed_with_its_children(workbench: Workbench, tmp_path: Path) -> None:
    code = f"import os\nos.fork()\nos.fork()\n{STUBBORN}"
    outcome = await workbench.run(Awaited([sys.executable, "-c", code], tmp_path, count=4))
    assert "did not end within 0.1 s" in outcome.message
    assert nothing_lives(tmp_path, 4)


async def test_a_stopped_program_is_ended(workbench: Workbench, tmp_path: Path) -> None:
    outcome = await workbench.run(AwaitedStop(["sh", "-c", "echo $$ > pids; kill -STOP $$"], tmp_path))
    assert "did not end" in outcome.message
    assert nothing_lives(tmp_path, 1)


# ---------------------------------------------------------------------- what it leaves behind


async def test_children_that_outlive_the_program_are_ended(workbench: Workbench, tmp_path: Path) -> None:
    agent = shell("sleep 1000 & echo $! > pids; sleep 1000 & echo $! >> pids; echo 0.5", tmp_path)
    begun = time.monotonic()

    outcome = await workbench.run(agent)

    assert (outcome.error, outcome.reward) == (None, 0.5)
    assert nothing_lives(tmp_path, 2)
    assert time.monotonic() - begun < PATIENCE_SECONDS


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="known by its environment, which only Linux shows")
async def test_a_daemon_that_left_the_group_is_ended(workbench: Workbench, tmp_path: Path) -> None:
    outcome = await workbench.run(CommandAgent([sys.executable, "-c", DAEMON], cwd=tmp_path))
    assert outcome.error is None
    assert nothing_lives(tmp_path, 1)


async def test_the_temporary_files_are_removed(workbench: Workbench, tmp_path: Path) -> None:
    agent = shell("dirname $AGL_REWARD_FILE > folder; chmod 500 $(dirname $AGL_REWARD_FILE); exit 1", tmp_path)
    await workbench.run(agent)
    assert not Path((tmp_path / "folder").read_text().strip()).exists()


# ---------------------------------------------------------------------- the runner goes


async def stopped(workbench: Workbench, agent: CommandAgent, folder: Path, *, times: int = 1) -> Outcome:
    """Run an agent, and cancel the runner when the program has begun."""
    runner = LitAgentRunner[Any](OtelTracer(instrument=False), heartbeat_interval=0)
    await workbench.store.add_resources(RESOURCES)
    rollout = await workbench.store.enqueue_rollout("task")
    with runner.run_context(agent=agent, store=workbench.store):
        running = asyncio.create_task(runner.iter())
        await until(lambda: bool(pids(folder)))
        for _ in range(times):
            running.cancel()
            await asyncio.sleep(0.05)
        with pytest.raises(asyncio.CancelledError):
            await running
    attempt = await workbench.store.get_latest_attempt(rollout.rollout_id)
    assert attempt is not None
    return Outcome(attempt, list(await workbench.store.query_spans(rollout.rollout_id)), None)


async def test_a_cancelled_runner_takes_the_program_along(workbench: Workbench, tmp_path: Path) -> None:
    agent = shell("sleep 1000 & echo begun; sleep 0.5; echo $! $$ > pids; wait", tmp_path)
    outcome = await stopped(workbench, agent, tmp_path)
    assert (outcome.attempt.status, outcome.text("stdout")) == ("unresponsive", "begun\n")
    assert nothing_lives(tmp_path, 2)


@pytest.mark.parametrize("moment", [0, 1, 2, 5])
async def test_cancelled_while_it_starts_nothing_is_left(workbench: Workbench, tmp_path: Path, moment: int) -> None:
    rollout = await workbench.store.start_rollout("task")
    agent = shell("echo $$ > pids; sleep 1000", tmp_path)

    running = asyncio.create_task(agent.rollout_async("task", {}, rollout))
    for _ in range(moment):
        await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running

    await until(lambda: not any(map(is_alive, pids(tmp_path))))


def started_runner(folder: Path, code: str) -> "subprocess.Popen[bytes]":
    """A runner as a process, whose agent is a program with a child."""
    command = [sys.executable, "-c", code, "sh", "-c", "sleep 1000 & echo $$ $! > pids; wait"]
    environment = {**os.environ, "TMPDIR": str(folder)}
    return warm_python.Popen(command, cwd=folder, env=environment, stderr=subprocess.DEVNULL)


async def test_ctrl_c_while_a_program_starts_leaves_nothing(tmp_path: Path) -> None:
    runner = started_runner(tmp_path, INTERRUPTED + RUNNER)

    assert await asyncio.to_thread(runner.wait) != 0
    await until(lambda: nothing_lives(tmp_path, 2))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
async def test_a_runner_process_that_is_ended_takes_the_program_along(tmp_path: Path, number: signal.Signals) -> None:
    runner = started_runner(tmp_path, RUNNER)

    await until(lambda: len(pids(tmp_path)) == 2)
    runner.send_signal(number)
    await asyncio.to_thread(runner.wait)

    await until(lambda: nothing_lives(tmp_path, 2))
