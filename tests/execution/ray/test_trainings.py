"""Trainings whose runners are actors of a Ray cluster: they survive lost nodes and processes, grow, shrink and end."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

import agentlightning as agl
from agentlightning.errors import TrainingError
from agentlightning.execution.events import ControlFlags, ExecutionEvent, ThreadingEvent
from agentlightning.store import LightningStore
from tests.e2e.server_process import free_port
from tests.execution.ray import programs
from tests.execution.ray.conftest import PATIENCE_SECONDS, living_actors, names_in

pytestmark = pytest.mark.usefixtures("no_actor_is_left")


def nodes_of(names: set[str]) -> set[str]:
    return {name.partition("-")[0] for name in names if name != "go"}


def test_runners_work_on_all_nodes_of_the_cluster(cluster: Any, tmp_path: Path) -> None:
    async def until_both_work(store: Any) -> None:
        await programs.until(lambda: len(nodes_of(names_in(tmp_path))) == 2)
        (tmp_path / "go").touch()

    trainer = programs.trainer(programs.sends(6, until_both_work), address=cluster.address, n_runners=2)

    trainer.fit(programs.waiting_agent(tmp_path))


def test_rollouts_of_a_lost_node_are_run_on_others(cluster: Any, tmp_path: Path) -> None:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    doomed = cluster.add_node(num_cpus=1)

    async def lose_the_node(store: Any) -> None:
        await programs.until(lambda: len(names_in(tmp_path)) == 2)
        lost.extend(names_in(tmp_path))
        await asyncio.to_thread(cluster.remove_node, doomed, allow_graceful=False)
        # The node's processes notice that it is gone, and end, a little later.
        await programs.until(lambda: not any(psutil.pid_exists(int(name.partition("-")[2])) for name in lost))
        (tmp_path / "go").touch()

    lost: list[str] = []
    placement = NodeAffinitySchedulingStrategy(doomed.node_id, soft=True)
    trainer = programs.trainer(
        programs.sends(8, lose_the_node), address=cluster.address, n_runners=2, placement=placement
    )

    trainer.fit(programs.waiting_agent(tmp_path))

    assert nodes_of(set(lost)) == {doomed.node_id}
    rollouts = asyncio.run(trainer.store.query_rollouts())
    attempts = [asyncio.run(trainer.store.query_attempts(rollout.rollout_id)) for rollout in rollouts]
    histories = sorted([each.status for each in of_one] for of_one in attempts)
    assert histories == [["succeeded"]] * 6 + [["unresponsive", "succeeded"]] * 2


def test_a_runner_whose_process_dies_is_started_again(cluster: Any, tmp_path: Path) -> None:
    place = str(tmp_path)

    @agl.rollout
    async def dies_once(task: Any) -> float:
        if not os.listdir(place):
            Path(place, "died").touch()
            os._exit(1)
        return 1.0

    programs.trainer(programs.sends(3), address=cluster.address).fit(dies_once)


def test_a_training_grows_and_shrinks_while_it_runs(cluster: Any, tmp_path: Path) -> None:
    async def scale(store: Any) -> None:
        await programs.until(lambda: len(names_in(tmp_path)) == 1)
        strategy.scale(3)
        await programs.until(lambda: len(names_in(tmp_path)) == 3)
        strategy.scale(1)
        (tmp_path / "go").touch()
        await programs.until(lambda: living_actors() == 1)

    trainer = programs.trainer(programs.sends(8, scale), address=cluster.address)
    strategy: Any = trainer.strategy

    trainer.fit(programs.waiting_agent(tmp_path))

    assert strategy.n_runners == 1


def test_agl_runner_works_for_the_same_training(cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port, shared = free_port(), tmp_path / "shared"
    shared.mkdir()
    monkeypatch.setenv("AGL_STORE_TOKEN", "secret-of-the-trainer")
    (tmp_path / "guest.py").write_text(
        textwrap.dedent(
            f"""\
            import pathlib, time
            def agent(task):
                pathlib.Path({str(shared)!r}, "guest").touch()
                while not pathlib.Path({str(shared)!r}, "go").exists():
                    time.sleep(0.02)
                return 1.0
            """
        )
    )

    async def until_both_work(store: Any) -> None:
        command = [sys.executable, "-m", "agentlightning.cli", "runner", "guest:agent", "--store", store.endpoint]
        guests.append(await asyncio.to_thread(subprocess.Popen, command, cwd=tmp_path, stderr=subprocess.DEVNULL))
        await programs.until(lambda: len(names_in(shared)) == 2)
        (shared / "go").touch()

    guests: list[subprocess.Popen[bytes]] = []
    try:
        trainer = programs.trainer(programs.sends(4, until_both_work), address=cluster.address, server_port=port)
        trainer.fit(programs.waiting_agent(shared))
    finally:
        for guest in guests:
            guest.send_signal(signal.SIGINT)
            guest.wait(PATIENCE_SECONDS)


def test_a_runner_that_fails_ends_the_training(cluster: Any) -> None:
    class Refusing(agl.OtelTracer):
        def init_worker(self, *args: Any, **kwargs: Any) -> None:
            raise OSError("no tracing on this node")

    trainer = programs.trainer(programs.sends(1), address=cluster.address)
    trainer.runner._tracer = Refusing()  # type: ignore[attr-defined]

    with pytest.raises(TrainingError, match="runner-0 failed: OSError: no tracing on this node"):
        trainer.fit(programs.counting_agent())


def test_an_agent_whose_module_is_missing_on_a_node_is_named(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = type(sys)("only_here")
    exec("def agent(task):\n    return 1.0\n", vars(module))
    monkeypatch.setitem(sys.modules, "only_here", module)

    with pytest.raises(TrainingError, match=r"needs the module 'only_here'.*send it along with runtime_env"):
        programs.trainer(programs.sends(1), address=cluster.address).fit(module.agent)


class Following:
    """A runner that shows by files what it sees of the flags."""

    def __init__(self, folder: Path, flags: ControlFlags) -> None:
        self.flags = flags
        self._folder = folder

    async def __call__(self, store: LightningStore, worker_id: int, event: ExecutionEvent) -> None:
        while not event.is_set():
            for name, is_set in self.flags.states().items():
                (self._folder / f"{name} is {is_set}").touch()
            await asyncio.sleep(0.02)


def test_flags_of_the_training_reach_the_runners(cluster: Any, tmp_path: Path) -> None:
    flags = ControlFlags(paused=ThreadingEvent(), stopped=ThreadingEvent(), prepared=ThreadingEvent())

    async def pause_and_resume(store: LightningStore, event: ExecutionEvent) -> None:
        await programs.until(lambda: (tmp_path / "paused is False").exists())
        flags.paused.set()
        await programs.until(lambda: (tmp_path / "paused is True").exists())
        (tmp_path / "paused is False").unlink()
        flags.paused.clear()
        await programs.until(lambda: (tmp_path / "paused is False").exists())

    strategy = agl.RayExecutionStrategy(cluster.address, runtime_env={"working_dir": None}, server_port=0)

    strategy.execute(pause_and_resume, Following(tmp_path, flags), agl.InMemoryLightningStore())


PROGRAM = """\
import sys
import agentlightning as agl
from beside import shared

@agl.rollout
async def agent(task):
    import asyncio, os
    (shared / "sent").write_text(" ".join(os.listdir()))
    print("the agent prints", flush=True)
    await asyncio.sleep(3600)

@agl.algo
async def algorithm(*, store):
    sent = await store.enqueue_rollout(input=1)
    await store.wait_for_rollouts(rollout_ids=[sent.rollout_id])

if __name__ == "__main__":
    strategy = agl.RayExecutionStrategy(sys.argv[1], server_port=0, graceful_timeout=0.5)
    store = agl.SqliteLightningStore(str(shared / "runs.db"))
    agl.Trainer(algorithm=algorithm, strategy=strategy, store=store, progress="off").fit(agent)
"""


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, 0)], ids=["Ctrl-C", "SIGTERM"]
)
def test_a_signal_ends_the_training_and_its_actors(cluster: Any, tmp_path: Path, number: int, code: int) -> None:
    folder, shared = tmp_path / "program", tmp_path / "shared"
    folder.mkdir()
    shared.mkdir()
    (folder / "train.py").write_text(PROGRAM)
    (folder / "beside.py").write_text(f"import pathlib\nshared = pathlib.Path({str(shared)!r})\n")
    command = [sys.executable, str(folder / "train.py"), cluster.address]
    program = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (shared / "sent").exists() and time.monotonic() < deadline and program.poll() is None:
        time.sleep(0.05)
    program.send_signal(number)
    printed, _ = program.communicate(timeout=PATIENCE_SECONDS)

    assert program.returncode == code, printed
    assert "the agent prints" in printed
    assert {"train.py", "beside.py"} <= set((shared / "sent").read_text().split())
    store = agl.SqliteLightningStore(str(shared / "runs.db"))
    assert [run.status for run in asyncio.run(store.query_runs())] == ["stopped"]
    assert [rollout.status for rollout in asyncio.run(store.query_rollouts())] == ["requeuing"]
