"""`agl dashboard`: a file or a server, shown in the browser."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from agentlightning.cli import main
from agentlightning.store import InMemoryLightningStore, LightningStoreServer, SqliteLightningStore
from tests.dashboard.conftest import finished

PATIENCE_SECONDS = 30.0


@pytest.fixture
def store_path(tmp_path: Path) -> Path:
    async def fill() -> None:
        async with SqliteLightningStore(tmp_path / "runs.db") as store:
            await finished(store, "one")

    asyncio.run(fill())
    return tmp_path / "runs.db"


@contextmanager
def running(path: Path, *options: str) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """The command as a process, and the address that it says."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AGL_")}
    command = [sys.executable, "-m", "agentlightning.cli", "dashboard", str(path), *options]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.search(r"http://127\.0\.0\.1:\d+/dashboard", line)
            assert found is not None, (line, process.stderr.read() if process.stderr and process.poll() else "")
            yield process, found.group()
        finally:
            process.kill()


def total(url: str) -> int:
    with urllib.request.urlopen(
        url.replace("/dashboard", "/v1/agl/rollouts?limit=0"), timeout=PATIENCE_SECONDS
    ) as answer:
        count: int = json.load(answer)["total"]
        return count


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "terminate"])
def test_command_serves_a_file_and_ends_with_nothing_left(store_path: Path, number: signal.Signals) -> None:
    with running(store_path) as (process, url):
        with urllib.request.urlopen(url, timeout=PATIENCE_SECONDS) as page:
            assert b"Agent Lightning" in page.read()
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        assert process.wait(PATIENCE_SECONDS) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""

    assert children == []
    assert sorted(file.name for file in store_path.parent.iterdir()) == ["runs.db"]


def test_file_is_shown_while_another_process_writes_to_it(store_path: Path) -> None:
    async def write() -> None:
        async with SqliteLightningStore(store_path) as store:
            await finished(store, "two")

    with running(store_path) as (_, url):
        assert total(url) == 1
        asyncio.run(write())
        assert total(url) == 2


def test_chosen_port_is_used_and_a_taken_one_refused(store_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        assert main(["dashboard", str(store_path), "--port", str(port)]) == 1

    assert str(port) in capsys.readouterr().err


def test_missing_file_is_not_created(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dashboard", str(tmp_path / "missing.db")]) == 1

    assert "There is no store" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"something else entirely"], ids=["empty", "text"])
def test_what_is_no_store_is_refused_and_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    file = tmp_path / "notes.txt"
    file.write_bytes(content)

    assert main(["dashboard", str(file)]) == 1

    assert "is not a store" in capsys.readouterr().err
    assert file.read_bytes() == content


def test_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dashboard", str(tmp_path)]) == 1

    assert "is not a store" in capsys.readouterr().err


@pytest.fixture
def address() -> Iterator[str]:
    server = LightningStoreServer(InMemoryLightningStore(), "127.0.0.1", 0, token="a-token-for-the-test")
    asyncio.run(server.start())
    yield server.endpoint
    asyncio.run(server.stop())


@pytest.mark.parametrize("given", ["", "/", "/dashboard", "/dashboard/"])
def test_server_is_named_with_its_page(address: str, given: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dashboard", address + given]) == 0

    assert capsys.readouterr().out == f"The dashboard: {address}/dashboard\n"


def test_silent_server_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # nobody listens
        address = f"http://127.0.0.1:{unused.getsockname()[1]}"

        began = time.monotonic()
        assert main(["dashboard", address]) == 1

    assert "does not answer" in capsys.readouterr().err
    assert time.monotonic() - began < PATIENCE_SECONDS


def test_help_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["dashboard", "--help"])

    assert "agl dashboard runs.db" in capsys.readouterr().out
