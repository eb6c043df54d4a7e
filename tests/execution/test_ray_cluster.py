"""What a Ray strategy decides by itself, without a cluster; tests/execution/ray runs trainings on one."""

import asyncio
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from agentlightning.errors import ConfigurationError, InvalidToken, NotAllowed
from agentlightning.execution import RayExecutionStrategy
from agentlightning.execution.events import ControlFlags, ExecutionEvent
from agentlightning.execution.ray_runners import Control, RunnerActor
from agentlightning.store import InMemoryLightningStore, LightningStore, LightningStoreClient
from agentlightning.store.http.reader_file import reader_access
from agentlightning.trainer import Trainer

SECRET = "the-master-token"


@pytest.fixture(autouse=True)
def ray(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """In the place of Ray, which may not be installed."""
    for name in ("RAY_ADDRESS", "RAY_JOB_CONFIG_JSON_ENV_VAR", "AGL_SERVER_HOST", "AGL_SERVER_PORT", "AGL_STORE_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    stub, util = ModuleType("ray"), ModuleType("ray.util")
    util.get_node_ip_address = lambda: "192.0.2.7"  # type: ignore[attr-defined]
    stub.util = util  # type: ignore[attr-defined]
    stub.nodes = lambda: [{"NodeManagerAddress": "192.0.2.7", "Alive": True}]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", stub)
    monkeypatch.setitem(sys.modules, "ray.util", util)
    return stub


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a program."""
    main = ModuleType("__main__")
    main.__file__ = str(tmp_path / "train.py")
    monkeypatch.setitem(sys.modules, "__main__", main)
    return tmp_path


# ---------------------------------------------------------------------- configuration


def test_missing_package_is_named_with_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"strategy='ray' needs the package ray: run `pip install .*\[?ray"):
        Trainer(strategy="ray")


def test_trainer_builds_it_by_name() -> None:
    strategy: Any = Trainer(strategy="ray", n_runners=3, port=5000).strategy

    assert isinstance(strategy, RayExecutionStrategy)
    assert (strategy.n_runners, strategy.server_port, strategy.address) == (3, 5000, None)


def test_the_environment_says_what_arguments_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    monkeypatch.setenv("AGL_SERVER_HOST", "trainer")
    monkeypatch.setenv("AGL_SERVER_PORT", "1234")

    strategy = RayExecutionStrategy()

    assert (strategy.address, strategy.server_host, strategy.server_port) == ("head:6379", "trainer", 1234)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"n_runners": 0}, "n_runners must be at least 1; it is 0"),
        ({"address": "ray://head:10001"}, "start the program on a node of the cluster"),
        ({"resources": {"cpu": 1}}, "resources has 'cpu', which no node offers"),
        ({"resources": {"num_gpus": 1}}, "resources has 'num_gpus', which no node offers"),
    ],
    ids=["no runners", "a client of Ray", "a resource in small letters", "an option of Ray"],
)
def test_options_that_cannot_work_are_refused(options: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        RayExecutionStrategy(**options)


def test_scale_before_a_training_says_how_many_it_begins_with() -> None:
    strategy = RayExecutionStrategy()

    strategy.scale(5)

    assert strategy.n_runners == 5
    with pytest.raises(ConfigurationError, match="n_runners must be at least 1"):
        strategy.scale(0)


# ---------------------------------------------------------------------- what is sent to the nodes


def sent_environment(address: str | None, runtime_env: Any = None, *, connects: bool = True) -> Any:
    strategy = RayExecutionStrategy(address, runtime_env=runtime_env)
    strategy._is_own_connection = connects
    return strategy._sent_environment()


def test_the_folder_of_the_program_is_sent_to_a_cluster(program: Path) -> None:
    sent = sent_environment("auto", {"env_vars": {"A": "1"}})

    assert (sent["working_dir"], sent["env_vars"]) == (str(program), {"A": "1"})
    assert ".env" in sent["excludes"]


@pytest.mark.parametrize(
    ("address", "runtime_env", "expected"),
    [
        (None, None, None),
        ("auto", {"working_dir": None}, None),
        ("auto", {"working_dir": "elsewhere"}, {"working_dir": "elsewhere"}),
    ],
    ids=["on this machine alone", "where it is not wanted", "where another folder is given"],
)
def test_the_folder_of_the_program_stays(program: Path, address: Any, runtime_env: Any, expected: Any) -> None:
    assert sent_environment(address, runtime_env) == expected


def test_a_submitted_job_has_sent_its_folder_itself(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    assert sent_environment("auto") is None


def test_a_program_that_has_connected_to_ray_has_sent_its_folder_itself(program: Path) -> None:
    assert sent_environment("auto", connects=False) is None


@pytest.mark.parametrize("folder", ["home", "installation"])
def test_a_folder_with_more_than_a_program_in_it_is_not_sent(
    program: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    if folder == "home":
        monkeypatch.setenv("HOME", str(program / "user"))
    else:
        monkeypatch.setattr(sys, "prefix", str(program))

    assert sent_environment("auto") is None


# ---------------------------------------------------------------------- the store


async def test_a_store_asks_for_a_token_that_runners_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    async with RayExecutionStrategy(server_host="127.0.0.1")._served(InMemoryLightningStore()) as served:
        address = served.client.server_address
        async with LightningStoreClient(address, outage_seconds=0.0) as stranger:
            with pytest.raises(InvalidToken):
                await stranger.dequeue_rollout("theirs")
        async with LightningStoreClient(address, token=reader_access(address).token) as reader:
            assert list(await reader.query_rollouts()) == []
        assert await served.client.dequeue_rollout("ours") is None
        await served.client.close()


def test_nodes_are_told_this_machines_address_where_the_store_is_served_everywhere() -> None:
    server = RayExecutionStrategy("auto", server_port=5000)._server(InMemoryLightningStore(), "0.0.0.0", SECRET)
    assert server.endpoint == "http://192.0.2.7:5000"


async def test_runners_get_the_token_of_a_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGL_STORE_TOKEN", SECRET)
    strategy = RayExecutionStrategy(server_host="127.0.0.1", server_port=0)

    async with strategy._served(InMemoryLightningStore()) as served:
        with pytest.raises(NotAllowed):
            await served.client.enqueue_rollout("task")
        assert list(await served.client.query_rollouts()) == []
        await served.client.close()


@pytest.mark.parametrize(
    ("host", "store"),
    [("localhost", None), (None, "http://127.0.0.1:4747")],
    ids=["a server of ours", "the server of another"],
)
async def test_a_store_that_other_nodes_cannot_reach_is_refused(ray: Any, host: str | None, store: str | None) -> None:
    ray.nodes = lambda: [{"NodeManagerAddress": address, "Alive": True} for address in ("192.0.2.7", "192.0.2.8")]
    strategy = RayExecutionStrategy("auto", server_host=host)

    with pytest.raises(ConfigurationError, match=r"from this machine only, and Ray has nodes on 192\.0\.2\.8"):
        async with strategy._served(InMemoryLightningStore() if store is None else LightningStoreClient(store)):
            raise AssertionError("it is served")


# ---------------------------------------------------------------------- what an actor does


class Endless:
    """A runner that ends only when it is cancelled."""

    flags: ControlFlags
    was_cancelled = False

    async def __call__(self, store: LightningStore, worker_id: int, event: ExecutionEvent) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise


async def test_actor_ignores_what_was_sent_before_the_last_it_took_notice_of() -> None:
    actor = RunnerActor(0, LightningStoreClient("http://127.0.0.1:1"), None)

    await actor.apply(Control(2, {"paused": False}))
    await actor.apply(Control(1, {"paused": True}))

    assert actor._flags.states()["paused"] is False


async def test_actor_that_leaves_cancels_what_runs_after_the_grace() -> None:
    actor, runner = RunnerActor(0, LightningStoreClient("http://127.0.0.1:1"), None), Endless()
    actor._runner = runner
    working = asyncio.ensure_future(actor.work())
    await asyncio.sleep(0)

    await actor.apply(Control(1, {}, is_leaving=True, grace_seconds=0.0))
    await working

    assert runner.was_cancelled
