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
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from agentlightning.cli import main
from agentlightning.store import InMemoryLightningStore, LightningStoreServer, SqliteLightningStore
from tests import warm_python
from tests.dashboard.browser import LOOK_SECONDS, PATIENCE_SECONDS, Page, open_page
from tests.dashboard.conftest import finished

BROWSER = """
import os, sys
with open(sys.argv[2] + ".new", "w") as file:
    file.write(sys.argv[1])
os.replace(sys.argv[2] + ".new", sys.argv[2])
"""
ADDRESS = re.compile(r"http://127\.0\.0\.1:\d+/dashboard#token=\S+")


@pytest.fixture
def store_path(tmp_path: Path) -> Path:
    async def fill() -> None:
        async with SqliteLightningStore(tmp_path / "runs.db") as store:
            await finished(store, "one")

    asyncio.run(fill())
    return tmp_path / "runs.db"


def environment(**variables: str) -> dict[str, str]:
    """Ours without what would configure the package, and some variables more."""
    return {name: value for name, value in os.environ.items() if not name.startswith("AGL_")} | variables


@contextmanager
def running(path: Path, *options: str, **variables: str) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """The command as a process, and the address that it says."""
    command = [sys.executable, "-m", "agentlightning.cli", "dashboard", str(path), *options]
    with warm_python.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(**variables)
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = ADDRESS.search(line)
            assert found is not None, (line, process.stderr.read() if process.stderr and process.poll() else "")
            yield process, found.group()
        finally:
            process.kill()


def ask(url: str, path: str, *, token: str | None = None, body: bytes | None = None) -> Any:
    """What the server of a page answers."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
    request = urllib.request.Request(url.partition("/dashboard")[0] + path, body, headers)
    with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as answer:
        return json.load(answer)


def refusal(url: str, path: str, **options: Any) -> int:
    """The status with which the server of a page refuses."""
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(url, path, **options)
    refused.value.close()
    return refused.value.code


def token_in(url: str) -> str:
    return url.partition("#token=")[2]


def total(url: str) -> int:
    count: int = ask(url, "/v1/agl/rollouts?limit=0", token=token_in(url))["total"]
    return count


@pytest.mark.parametrize(
    ("number", "code", "words"),
    [(signal.SIGINT, 130, "agl dashboard: Stopped by Ctrl-C.\n"), (signal.SIGTERM, 0, "")],
    ids=["ctrl-c", "terminate"],
)
def test_command_serves_a_file_and_ends_with_nothing_left(
    store_path: Path, number: signal.Signals, code: int, words: str
) -> None:
    with running(store_path) as (process, url):
        with urllib.request.urlopen(url, timeout=PATIENCE_SECONDS) as page:
            assert b"Agent Lightning" in page.read()
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        assert process.wait(PATIENCE_SECONDS) == code
        assert process.stderr is not None
        assert process.stderr.read() == words

    assert children == []
    assert sorted(file.name for file in store_path.parent.iterdir()) == ["runs.db"]


def test_address_alone_permits_to_look_and_to_change_nothing(store_path: Path) -> None:
    async def write() -> None:
        async with SqliteLightningStore(store_path) as store:
            await finished(store, "two")

    body = b'{"rollouts": [{"input": "mine"}]}'
    with running(store_path, AGL_STORE_TOKEN="in-the-environment") as (_, url), running(store_path) as (_, second):
        assert token_in(url) != token_in(second)
        assert total(url) == 1
        asyncio.run(write())  # while it is shown
        for token in (None, "guessed", "in-the-environment", token_in(second)):
            assert refusal(url, "/v1/agl/rollouts", token=token) == 401
        assert refusal(url, "/v1/agl/queues/rollouts/enqueue", token=token_in(url), body=body) == 403
        assert total(url) == 2


async def test_printed_address_works_in_any_browser(store_path: Path, devtools: str) -> None:
    with running(store_path) as (_, url):
        for _ in range(2):
            async with open_page(devtools) as page:
                await page.goto(url)
                await page.until("document.querySelector('[data-count=succeeded]')?.innerText === '1'")


@contextmanager
def opened_by_command(path: Path, folder: Path) -> Iterator[tuple[str, str]]:
    """What the command says on a terminal, and what it gives to the browser, which only writes it down."""
    given, program = folder / "given", folder / "browser.py"
    program.write_text(BROWSER)
    variables = environment(DISPLAY=":0", BROWSER=f"{sys.executable} {program} %s {given}")
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", "agentlightning.cli", "dashboard", str(path)]
    with open(ours, "rb") as said, warm_python.Popen(command, stdout=theirs, env=variables) as process:
        os.close(theirs)
        try:
            line = said.readline().decode()
            deadline = time.monotonic() + PATIENCE_SECONDS
            while not given.exists():
                assert time.monotonic() < deadline
                time.sleep(LOOK_SECONDS)
            yield line, given.read_text()
            process.send_signal(signal.SIGINT)
            assert process.wait(PATIENCE_SECONDS) == 130
        finally:
            process.kill()


async def test_browser_is_given_a_file_that_leads_to_the_page_and_no_token(
    store_path: Path, tmp_path: Path, page: Page
) -> None:
    with opened_by_command(store_path, tmp_path) as (line, given):
        found = ADDRESS.search(line)
        assert found is not None
        file = Path(given.removeprefix("file://"))
        assert given.startswith("file://")
        assert f'href="{found.group()}"' in file.read_text()
        assert file.parent.stat().st_mode & 0o077 == 0
        await page.goto(given)
        await page.until("document.querySelector('[data-count=succeeded]')?.innerText === '1'")
        assert await page.ask("location.hash") == ""

    assert not file.parent.exists()


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


def test_what_is_no_store_is_refused_and_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "notes.txt"
    for content in (b"", b"something else entirely"):
        file.write_bytes(content)
        assert main(["dashboard", str(file)]) == 1
        assert "is not a store" in capsys.readouterr().err
        assert file.read_bytes() == content
    assert main(["dashboard", str(tmp_path)]) == 1
    assert "is not a store" in capsys.readouterr().err


@pytest.fixture
def address() -> Iterator[str]:
    server = LightningStoreServer(InMemoryLightningStore(), "127.0.0.1", 0, token="a-token-for-the-test")
    asyncio.run(server.start())
    yield server.endpoint
    asyncio.run(server.stop())


def test_server_is_named_with_its_page(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    for given in ("", "/", "/dashboard", "/dashboard/", "/dashboard#/rollouts?mode=val"):
        assert main(["dashboard", address + given]) == 0
        behind = given.partition("#")
        assert capsys.readouterr().out == f"The dashboard: {address}/dashboard{behind[1]}{behind[2]}\n"


def test_silent_server_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # nobody listens
        address = f"http://127.0.0.1:{unused.getsockname()[1]}"

        began = time.monotonic()
        assert main(["dashboard", address]) == 1

    assert "does not answer" in capsys.readouterr().err
    assert time.monotonic() - began < PATIENCE_SECONDS
