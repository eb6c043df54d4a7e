"""The store server of a training lets in its own runners, and readers of the same user."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.errors import InvalidToken, NotAllowed
from agentlightning.execution import ClientServerExecutionStrategy
from agentlightning.litagent import LitAgent
from agentlightning.store import InMemoryLightningStore, LightningStore, LightningStoreClient
from agentlightning.store.http.reader_file import reader_access, reader_token_file, runtime_folder
from agentlightning.store.http.tokens import Scope, verify_token
from tests import warm_python
from tests.e2e.server_process import free_port
from tests.trainer.trainings import Halving, over_processes, rewards_of

pytestmark = pytest.mark.usefixtures("nothing_is_left")
MASTER = "the-master-token-of-a-server"


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A runtime folder for the test alone."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def during(work: Any) -> Any:
    """An algorithm that sends two tasks, and does something while its store is served."""

    @agl.algo
    async def algorithm(*, store: LightningStore) -> None:
        await asyncio.to_thread(asyncio.run, work(store))
        sent = [(await store.enqueue_rollout(number)).rollout_id for number in (1, 2)]
        assert len(await store.wait_for_rollouts(rollout_ids=sent, timeout=30)) == 2

    return algorithm


async def test_strangers_neither_take_nor_send_rollouts_of_a_fit() -> None:
    async def intrude(store: Any) -> None:
        async with LightningStoreClient(store.endpoint, outage_seconds=0.0) as stranger:
            for call in (stranger.enqueue_rollout("theirs"), stranger.dequeue_rollout("theirs")):
                with pytest.raises(InvalidToken, match=r"set AGL_STORE_TOKEN here .*\$\(agl tokens new\)"):
                    await call

    trainer = over_processes(store=InMemoryLightningStore(), algorithm=during(intrude))
    await asyncio.to_thread(trainer.fit, Halving())

    assert {rollout.input for rollout in await trainer.store.query_rollouts()} == {1, 2}


@pytest.mark.parametrize("options", [{"start_method": "spawn"}, {"main_process": "runner"}], ids=str)
def test_own_runners_are_let_in_however_they_are_started(options: dict[str, Any], tmp_path: Path) -> None:
    strategy = ClientServerExecutionStrategy(server_port=free_port(), **options)
    trainer = over_processes(strategy=strategy, store=tmp_path / "runs.db")

    trainer.fit(Halving(), [1, 2])

    assert sorted(reward or 0.0 for reward in rewards_of(trainer.store)) == [0.5, 1.0]


class Nosy(LitAgent[Any]):
    """Writes down what its process shows of itself."""

    def rollout(self, task: Any, resources: Any, rollout: Any) -> float:
        process = Path("/proc/self")
        shown = (process / "cmdline").read_text() + (process / "environ").read_text()
        Path(task).write_text(json.dumps([dict(os.environ), shown]))
        return 1.0


def test_an_agent_does_not_find_the_token_in_its_environment(tmp_path: Path) -> None:
    tokens: list[str] = []

    @agl.algo
    async def algorithm(*, store: Any) -> None:
        tokens.append(store._token)
        rollout = await store.enqueue_rollout(str(tmp_path / "seen"))
        assert await store.wait_for_rollouts(rollout_ids=[rollout.rollout_id], timeout=30)

    over_processes(algorithm=algorithm).fit(Nosy())

    assert len(tokens[0]) > 30
    assert tokens[0] not in (tmp_path / "seen").read_text()


def test_a_program_of_a_fit_gets_a_token_for_its_attempt(tmp_path: Path) -> None:
    seen = tmp_path / "token"
    save = f"import os; open({str(seen)!r}, 'w').write(os.environ['AGL_STORE_TOKEN'])"
    tokens: list[str] = []

    @agl.algo
    async def algorithm(*, store: Any) -> None:
        tokens.append(store._token)
        rollout = await store.enqueue_rollout("task")
        assert await store.wait_for_rollouts(rollout_ids=[rollout.rollout_id], timeout=30)

    over_processes(algorithm=algorithm).fit(agl.CommandAgent([sys.executable, "-c", save], reward_from="exit_code"))

    assert verify_token(tokens[0], seen.read_text(), 0.0).kind == "attempt"


def test_the_user_s_own_token_is_the_server_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGL_STORE_TOKEN", MASTER)

    async def join(store: Any) -> None:
        async with LightningStoreClient(store.endpoint, token=MASTER) as guest:
            await guest.enqueue_rollout(4)

    trainer = over_processes(store=InMemoryLightningStore(), algorithm=during(join))
    trainer.fit(Halving())

    assert sorted(reward or 0.0 for reward in rewards_of(trainer.store)) == [0.5, 1.0, 2.0]


# ---------------------------------------------------------------------- readers of the same user


def agl_command(*words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "agentlightning.cli", *words]
    return warm_python.run(command, env=dict(os.environ), timeout=60)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_commands_that_read_need_no_token_for_a_training_of_the_same_user(host: str, runtime: Path) -> None:
    shown: list[Any] = []

    async def look(store: Any) -> None:
        address = f"http://{host}:{store.port}"
        shown.append(agl_command("store", "status", address, "--json"))
        shown.append(agl_command("why", address))
        shown.append(agl_command("dashboard", address, "--no-browser"))
        shown.append(agl_command("runner", "--store", address, "os:getcwd"))

    over_processes(algorithm=during(look)).fit(Halving())
    status, why, dashboard, runner = shown

    assert json.loads(status.stdout)["total_runs"] == 1
    assert "is 'running'" in why.stdout
    assert "#token=agl1." in dashboard.stdout
    assert runner.returncode != 0
    assert list(runtime.glob("*/*.token")) == []


async def test_the_file_of_a_reader_opens_nothing_but_reading() -> None:
    async def read(store: Any) -> None:
        access = reader_access(store.endpoint)
        async with LightningStoreClient(access.address, token=access.token) as reader:
            assert list(await reader.query_rollouts()) == []
            with pytest.raises(NotAllowed):
                await reader.enqueue_rollout("theirs")
            with pytest.raises(NotAllowed):
                await reader.dequeue_rollout("theirs")

    await asyncio.to_thread(over_processes(algorithm=during(read)).fit, Halving())


def test_a_reader_s_file_is_the_user_s_alone_and_goes_with_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGL_FILE_MODE", "0644")

    with reader_token_file("localhost", 4321, MASTER):
        (path,) = runtime_folder().glob("*")
        mode, access = path.stat().st_mode & 0o777, reader_access("http://localhost:4321")

    assert (mode, access.address) == (0o600, "http://127.0.0.1:4321")
    assert verify_token(MASTER, access.token or "", 0.0) == Scope("reader")
    assert list(runtime_folder().glob("*")) == []


@pytest.mark.parametrize("fault", ["loose", "link", "elsewhere", "other host", "loose folder"])
def test_a_file_that_others_could_have_written_is_not_used(fault: str, tmp_path: Path) -> None:
    with reader_token_file("localhost", 4321, MASTER):
        path = runtime_folder() / "4321.token"
        if fault == "loose":
            path.chmod(0o640)
        elif fault == "link":
            path.rename(tmp_path / "planted")
            path.symlink_to(tmp_path / "planted")
        elif fault == "loose folder":
            path.parent.chmod(0o777)
        host, port = ("127.0.0.2" if fault == "other host" else "127.0.0.1"), 4321 + (fault == "elsewhere")

        assert reader_access(f"http://{host}:{port}").token is None


def test_the_file_of_a_killed_training_is_replaced_and_not_removed_by_another() -> None:
    stale = reader_token_file("localhost", 4321, "the-token-of-a-killed-server")
    stale.__enter__()

    with reader_token_file("localhost", 4321, MASTER):
        stale.__exit__(None, None, None)
        assert verify_token(MASTER, reader_access("http://127.0.0.1:4321").token or "", 0.0).kind == "reader"


def test_a_stale_file_does_no_harm_to_an_open_server_and_another_explains_it() -> None:
    port = free_port()

    async def status(token: str | None) -> str:
        server = agl.LightningStoreServer(InMemoryLightningStore(), "127.0.0.1", port, token=token)
        await server.start()
        try:
            done = await asyncio.to_thread(agl_command, "store", "status", f"http://127.0.0.1:{port}")
            return done.stdout + done.stderr
        finally:
            await server.stop()

    with reader_token_file("127.0.0.1", port, "the-token-of-a-killed-server"):
        assert "rollouts" in asyncio.run(status(None))
        assert "set AGL_STORE_TOKEN to a token of this server" in asyncio.run(status(MASTER))


def test_a_folder_that_cannot_be_used_only_warns(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "file"))

    with reader_token_file("localhost", 4321, MASTER):
        assert reader_access("http://127.0.0.1:4321").token is None
    assert "need AGL_STORE_TOKEN" in caplog.text


# ---------------------------------------------------------------------- two trainings at once

SCRIPT = """
import sys, agentlightning as agl
name, n = sys.argv[1], 12

@agl.rollout
def agent(task):
    assert task["of"] == name
    return 1.0 if name == "left" else 0.0

trainer = agl.Trainer(store=f"{name}.db", algorithm=agl.Baseline(), n_runners=2, progress="off")
trainer.fit(agent, [{"of": name, "n": i} for i in range(n)])
"""


def test_nothing_crosses_between_two_trainings_on_the_default_port(tmp_path: Path) -> None:
    (tmp_path / "training.py").write_text(SCRIPT)
    command = [sys.executable, "training.py"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    both = [
        warm_python.Popen([*command, name], cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
        for name in ("left", "right")
    ]

    outputs = [process.communicate(timeout=120)[1] for process in both]

    assert [process.returncode for process in both] == [0, 0], outputs
    for name, reward in (("left", 1.0), ("right", 0.0)):
        store = agl.SqliteLightningStore(tmp_path / f"{name}.db")
        assert {rollout.input["of"] for rollout in asyncio.run(store.query_rollouts())} == {name}
        assert rewards_of(store) == [reward] * 12
        asyncio.run(store.close())
