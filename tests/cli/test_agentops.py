"""`agl agentops` as a process of its own."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from tests import warm_python

COMMAND = [sys.executable, "-m", "agentlightning.cli", "agentops", "--port", "0"]


@pytest.fixture
def foreground() -> Iterator[tuple[subprocess.Popen[str], str]]:
    with warm_python.Popen(COMMAND, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        yield process, address_in(process.stderr.readline())
        process.kill()


def address_in(line: str) -> str:
    found = re.search(r" at (http://127\.0\.0\.1:\d+)", line)
    assert found is not None, line
    return found[1]


def ask(url: str, data: bytes | None = None) -> Any:
    with urllib.request.urlopen(url, data=data, timeout=10) as answer:
        return json.loads(answer.read())


def has_ended(process: psutil.Process) -> bool:
    """Also if nobody has asked for its exit code yet."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
@pytest.mark.claim(460)
def test_it_serves_until_it_is_told_to_stop(
    foreground: tuple[subprocess.Popen[str], str], number: int, code: int
) -> None:
    process, address = foreground
    assert ask(f"{address}/v3/auth/token", b"{}") == {"token": "dummy", "project_id": "dummy"}
    assert ask(f"{address}/traces", b"spans") == {"path": "traces"}

    process.send_signal(number)

    assert process.wait(10) == code


@pytest.mark.claim(461, 463)
def test_a_daemon_serves_in_the_background_and_says_its_process_id() -> None:
    done = subprocess.run([*COMMAND, "--daemon"], capture_output=True, text=True, timeout=20, check=True)
    daemon = psutil.Process(int(done.stdout))

    try:
        assert ask(f"{address_in(done.stderr)}/x") == {"path": "x"}
        assert os.getsid(daemon.pid) == daemon.pid
    finally:
        daemon.terminate()

    gone_by = time.monotonic() + 10
    while not has_ended(daemon):
        assert time.monotonic() < gone_by
        time.sleep(0.01)
