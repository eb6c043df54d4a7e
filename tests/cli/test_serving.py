"""`agl store` as a process of its own, asked over the network and ended by signals."""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agentlightning.store import LightningStoreClient, SqliteLightningStore
from tests import warm_python

TOKEN = "a-master-token-for-tests"

Start = Callable[..., tuple[subprocess.Popen[str], str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a serving command and gives its process and address; what still runs at the end is killed."""
    running: list[subprocess.Popen[str]] = []

    def begin(*arguments: str, **environment: str) -> tuple[subprocess.Popen[str], str]:
        process = warm_python.Popen(
            [sys.executable, "-m", "agentlightning.cli", *arguments],
            cwd=tmp_path,
            env={**os.environ, **environment},
            stderr=subprocess.PIPE,
            text=True,
        )
        running.append(process)
        assert process.stderr is not None
        for line in process.stderr:
            if found := re.search(r" at (http://[\w.:]+\S*?)[ .]*(?:\(|Ctrl-C)", line):
                return process, found[1]
        raise AssertionError(f"{arguments} ended with {process.wait()}")

    yield begin
    for process in running:
        process.kill()
        process.communicate()


def get(url: str, **headers: str) -> Any:
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as answer:
        return json.loads(answer.read())


@pytest.mark.claim(457, 459)
async def test_store_is_served_until_sigterm_and_keeps_what_it_was_told(start: Start, tmp_path: Path) -> None:
    process, address = start("store", "--port", "0", "--backend", "sqlite", "--path", "runs.db")
    async with LightningStoreClient(address) as client:
        rollout = await client.enqueue_rollout({"n": 1})

    process.send_signal(signal.SIGTERM)

    assert process.wait(10) == 0
    async with SqliteLightningStore(tmp_path / "runs.db") as store:
        assert (await store.get_rollout_by_id(rollout.rollout_id)) == rollout


def test_token_from_the_environment_is_asked_for(start: Start) -> None:
    _, address = start("store", "--port", "0", AGL_STORE_TOKEN=TOKEN)

    with pytest.raises(urllib.error.HTTPError, match="401"):
        get(f"{address}/health")
    assert get(f"{address}/v1/agl/statistics", Authorization=f"Bearer {TOKEN}")["total_rollouts"] == 0


async def test_several_processes_serve_one_file(start: Start) -> None:
    servers = [start("store", "--port", "0", "--path", "runs.db") for _ in range(2)]
    clients = [LightningStoreClient(address) for _, address in 4 * servers]
    for n, client in enumerate(clients):
        await client.enqueue_rollout(n)

    claims = [await client.dequeue_rollout() for client in clients]

    assert sorted(claim.input for claim in claims if claim) == list(range(8))
    for client in clients:
        await client.close()
    for process, _ in servers:
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


def test_public_address_is_served_with_a_token_or_when_told_so(start: Start) -> None:
    _, with_token = start("store", "--port", "0", "--host", "0.0.0.0", AGL_STORE_TOKEN=TOKEN)
    _, insecure = start("store", "--port", "0", "--host", "0.0.0.0", "--insecure")

    assert get(f"{with_token}/health", Authorization=f"Bearer {TOKEN}") == {"status": "ok"}
    assert get(f"{insecure}/health") == {"status": "ok"}
