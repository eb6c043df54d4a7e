"""`deploy/compose.yaml`: compose accepts it, it hides its secrets, and its commands work together on one machine."""

import asyncio
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from secrets import token_urlsafe
from typing import Any

import pytest

from agentlightning.store import LightningStoreClient
from tests import warm_python
from tests.postgres import PASSWORD, free_port, new_database

yaml = pytest.importorskip("yaml")

DEPLOY = Path(__file__).parent.parent / "deploy"
START_SECONDS = 60.0
STORES = ("store-1", "store-2", "dashboard")


def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
    return loaded


KEYS = {
    "service": "image build command restart environment secrets volumes ports stop_grace_period depends_on healthcheck",
    "healthcheck": "test interval timeout start_period retries",
}


def test_services_have_keys_that_compose_knows() -> None:
    assert {name for name in compose() if not name.startswith("x-")} <= {"name", "services", "secrets", "volumes"}
    for service in compose()["services"].values():
        assert set(service) <= set(KEYS["service"].split())
        assert set(service.get("healthcheck", {})) <= set(KEYS["healthcheck"].split())


def test_services_refer_to_what_there_is() -> None:
    loaded = compose()
    services = loaded["services"]

    for service in services.values():
        assert set(service.get("depends_on", {})) <= set(services)
        assert set(service.get("secrets", [])) <= set(loaded["secrets"])
        assert {one["condition"] for one in service.get("depends_on", {}).values()} <= {"service_healthy"}
        assert all("healthcheck" in services[name] for name in service.get("depends_on", {}))


def test_every_store_server_is_probed_where_it_answers_for_its_database() -> None:
    probes = [compose()["services"][name]["healthcheck"]["test"][3] for name in STORES]
    assert all(probe.endswith("/ready") for probe in probes)


def test_secrets_come_from_files_alone() -> None:
    secret = re.compile("PASSWORD|TOKEN|KEY")
    for service in compose()["services"].values():
        for name, value in service.get("environment", {}).items():
            assert not secret.search(name) or (name.endswith("_FILE") and value.startswith("/run/secrets/"))


@pytest.fixture
def secrets(tmp_path: Path) -> Path:
    folder = tmp_path / "secrets"
    folder.mkdir()
    for name in compose()["secrets"]:
        (folder / name).write_text(PASSWORD if name == "postgres_password" else token_urlsafe(32))
    return folder


@contextmanager
def running(names: list[str], places: dict[str, str], environment: dict[str, str]) -> Iterator[None]:
    """The processes of services as compose starts and probes them, with other names of hosts, ports and files."""
    processes = []
    try:
        for name in names:
            service = compose()["services"][name]
            here = {**places, "4747": places[name]} if name in places else places
            given = {key: _local(value, here) for key, value in service["environment"].items()}
            command = ["sh", str(DEPLOY / "entrypoint.sh"), *(_local(word, here) for word in service["command"])]
            processes.append(warm_python.Popen(command, env={**environment, **given}))
            if "healthcheck" in service:
                _wait_until_healthy([_local(word, here) for word in service["healthcheck"]["test"][1:]], environment)
        yield
    finally:
        for process in reversed(processes):
            process.terminate()
        for process in processes:
            process.wait(START_SECONDS)


def _local(word: str, places: dict[str, str]) -> str:
    """A word of a command, with places of this machine in the place of the network's."""
    for name, place in places.items():
        word = word.replace(name, place)
    return word


def _wait_until_healthy(probe: list[str], environment: dict[str, str]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while subprocess.run(probe, env=environment, stderr=subprocess.DEVNULL).returncode:
        assert time.monotonic() < deadline, f"not healthy within {START_SECONDS:.0f} s: {probe}"


async def _train(url: str, token: str) -> str:
    async with LightningStoreClient(url, token=token) as client:
        rollout = await client.enqueue_rollout({"n": 1})
        (done,) = await client.wait_for_rollouts([rollout.rollout_id], timeout=START_SECONDS)
        return str(done.status)


def test_the_same_processes_work_together_on_one_machine(tmp_path: Path, secrets: Path) -> None:
    database = new_database().rpartition("@")[2]
    one, two, proxy = (str(free_port()) for _ in range(3))
    places = {
        "postgres:5432/agl": database,
        "store-1:4747": f"127.0.0.1:{one}",
        "store-2:4747": f"127.0.0.1:{two}",
        "store-1": one,
        "store-2": two,
        "4749": proxy,
        "/run/secrets": str(secrets),
        "/usr/local/bin/probe": str(DEPLOY / "probe.py"),
        "/home/agl": str(tmp_path),
        "${AGL_MODEL:?name=where}": "model=http://127.0.0.1:9/v1",
        "${AGL_AGENT:?module:agent}": "composed_agent:agent",
        "0.0.0.0": "127.0.0.1",
    }
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(tmp_path)}
    (tmp_path / "composed_agent.py").write_text(
        "import agentlightning as agl\n\n@agl.rollout\ndef agent(task):\n    return 1.0\n"
    )

    with running(["store-1", "store-2", "proxy", "runner"], places, environment):
        status = asyncio.run(_train(f"http://127.0.0.1:{one}", (secrets / "store_token").read_text()))

    assert status == "succeeded"
