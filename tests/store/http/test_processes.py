"""`agl store` with processes of its own, ended the way a terminal or a service manager does: all of them at once."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from agentlightning.cli import main
from tests import warm_python

DEQUEUE = "/v1/agl/queues/rollouts/dequeue-one"


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """A command that serves a file, in a process group of its own, and its address."""
    command = ["store", "--port", "0", "--path", str(tmp_path / "runs.db")]
    process = warm_python.Popen(
        [sys.executable, "-m", "agentlightning.cli", *command],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stderr is not None
    found = next(match for line in process.stderr if (match := re.search(r"http://[\d.]+:\d+", line)))
    yield process, found[0]
    process.kill()
    process.communicate()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
async def test_signal_to_the_whole_group_lets_calls_in_flight_end(
    number: signal.Signals, code: int, serving: tuple["subprocess.Popen[str]", str]
) -> None:
    process, address = serving
    asking = [
        asyncio.create_task(asyncio.to_thread(requests.post, f"{address}{DEQUEUE}", json={"wait": 60}))
        for _ in range(4)
    ]
    while sum(_waiting(address) for _ in range(8)) == 0:
        await asyncio.sleep(0.01)

    os.killpg(process.pid, number)
    while number == signal.SIGTERM and process.poll() is None:  # signals that come again do not cut the end short
        process.send_signal(number)
        await asyncio.sleep(0.005)
    _, written = await asyncio.to_thread(process.communicate, timeout=20)
    answers = await asyncio.gather(*asking, return_exceptions=True)

    assert process.returncode == code
    assert "Traceback" not in written
    assert [getattr(answer, "status_code", answer) for answer in answers] == [503] * 4


def _waiting(address: str) -> int:
    """How many calls wait in the process that happens to answer."""
    text = requests.get(f"{address}/metrics", timeout=10).text
    found = re.search(r"^agl_server_waiting_calls (\d+)", text, re.MULTILINE)
    return int(found[1]) if found else 0


def test_public_address_without_a_token_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AGL_STORE_TOKEN", raising=False)
    for host in ("0.0.0.0", "::", "192.0.2.1", "store.example"):
        assert main(["store", "--host", host, "--port", "0"]) != 0
        assert "agl tokens new" in capsys.readouterr().err
