"""Where a Trainer keeps things in the first hour: a server that runs already, a taken port, a file in a new folder."""

import asyncio
import logging
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.execution import client_server
from tests import warm_python
from tests.e2e.server_process import ServerProcess, free_port

TOKEN = "a-secret-token-of-some-length"


@pytest.fixture(autouse=True)
def environment_of_a_newcomer(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AGL_CURRENT_ROLE", "AGL_SERVER_HOST", "AGL_SERVER_PORT", "AGL_MANAGED_STORE", "AGL_STORE_TOKEN"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(token=TOKEN) as running:
        yield running


@pytest.fixture
def taken_port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The default port, which another program has; a port of this test's own, for others may test the same."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        monkeypatch.setattr(client_server, "DEFAULT_PORT", holder.getsockname()[1])
        yield holder.getsockname()[1]


def one(task: Any) -> float:
    return 1.0


def trainer(**options: Any) -> agl.Trainer:
    algorithm = agl.Baseline(polling_interval=0.1)
    return agl.Trainer(algorithm=algorithm, initial_resources={}, progress="off", **options)


def statuses_of(store: agl.LightningStore, name: str) -> list[str]:
    return [r.status for r in asyncio.run(store.query_rollouts()) if r.input == name]


# ---------------------------------------------------------------------- a server that runs already


def a_client(server: ServerProcess) -> agl.LightningStoreClient:
    return agl.LightningStoreClient(server.url, token=TOKEN)


@pytest.mark.parametrize("wrap", [lambda store: store, agl.LightningStoreThreaded], ids=["client", "wrapped"])
def test_a_trainer_uses_the_store_of_a_server_that_runs(server: ServerProcess, wrap: Any, taken_port: int) -> None:
    name = f"by {wrap}"

    trainer(store=wrap(a_client(server)), n_runners=2, port=taken_port).fit(one, train_dataset=[name, name])

    assert statuses_of(a_client(server), name) == ["succeeded"] * 2


def test_runner_and_algorithm_meet_at_a_server_that_runs(server: ServerProcess) -> None:
    program = (
        "import agentlightning as agl\n"
        f"store = agl.LightningStoreClient({server.url!r}, token={TOKEN!r})\n"
        "agl.Trainer(store=store, strategy={'type': 'cs', 'role': 'runner'}, max_rollouts=1).fit("
        "lambda task: 1.0)\n"
    )
    with warm_python.Popen([sys.executable, "-c", program]) as runner:
        strategy = {"type": "cs", "role": "algorithm", "server_port": free_port()}
        trainer(store=a_client(server), strategy=strategy).fit(one, train_dataset=["by role"])

        assert runner.wait(30) == 0
    assert statuses_of(a_client(server), "by role") == ["succeeded"]


# ---------------------------------------------------------------------- ports


def test_a_default_port_that_is_taken_is_replaced_with_a_word(
    taken_port: int, caplog: pytest.LogCaptureFixture
) -> None:
    store = agl.InMemoryLightningStore()

    with caplog.at_level(logging.WARNING):
        trainer(store=store).fit(one, train_dataset=["task"])

    assert statuses_of(store, "task") == ["succeeded"]
    (line,) = caplog.messages
    assert line.startswith(f"Port {taken_port} is taken, so this training serves its store on port ")


@pytest.mark.parametrize("way", ["port", "server_port", "AGL_SERVER_PORT", "role"])
def test_a_port_that_others_know_is_not_replaced(taken_port: int, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"port": {"port": taken_port}, "role": {"strategy": {"type": "cs", "role": "algorithm"}}}
    options["server_port"] = {"strategy": {"type": "cs", "server_port": taken_port}}
    if way == "AGL_SERVER_PORT":
        monkeypatch.setenv(way, str(taken_port))

    with pytest.raises(RuntimeError, match="stop it or choose another port"):
        trainer(**options.get(way, {})).fit(one, train_dataset=["task"])


# ---------------------------------------------------------------------- files


@pytest.mark.parametrize("address", ["sqlite:///run/deep/runs.db", "run/deep/runs.db"])
def test_a_store_in_a_new_folder_makes_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.chdir(tmp_path)

    trainer(store=address, strategy="shm").fit(one, train_dataset=["task"])

    assert (tmp_path / "run" / "deep" / "runs.db").is_file()


def test_a_store_below_a_file_is_refused_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")

    with pytest.raises(agl.errors.ConfigurationError, match="cannot be made: File exists"):
        trainer(store=str(tmp_path / "notes" / "runs.db"))
