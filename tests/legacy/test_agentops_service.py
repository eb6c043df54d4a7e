"""The stand-in for AgentOps' service, in its child process."""

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
import urllib.error
import urllib.request
from typing import Any

import psutil
import pytest

from agentlightning.errors import ConfigurationError
from agentlightning.instrumentation.agentops import AgentOpsServerManager


def ask(port: int | None, path: str, method: str, data: bytes | None = None) -> Any:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data=data, method=method)
    with urllib.request.urlopen(request, timeout=10) as answer:
        return json.loads(answer.read())


def test_it_is_started_agrees_to_everything_and_is_stopped_twice() -> None:
    manager = AgentOpsServerManager(daemon=False)
    for _ in range(2):
        assert (manager.is_alive(), manager.get_port()) == (False, None)
        manager.start()
        manager.start()
        port = manager.get_port()
        assert ask(port, "/v3/auth/token", "POST", b"{}") == {"token": "dummy", "project_id": "dummy"}
        assert ask(port, "/v3/auth/token", "GET") == {"path": "v3/auth/token"}
        assert ask(port, "/v4/logs/upload/", "POST", b"x" * 100_000) == {"path": "v4/logs/upload/"}
        with pytest.raises(urllib.error.HTTPError, match="405"):
            ask(port, "/x", "DELETE")
        assert manager.server_process is not None
        os.kill(manager.server_process.pid or 0, signal.SIGINT)  # Ctrl-C is left to whoever started it
        assert ask(port, "/still", "GET") == {"path": "still"}
        manager.stop()
        manager.stop()

    assert (manager.server_process, multiprocessing.active_children()) == (None, [])


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"127.0.0.1:{port}.*already be using this port"):
            AgentOpsServerManager(port=port).start()


def has_ended(process: psutil.Process) -> bool:
    """Also if nobody has asked for its exit code yet."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("end", [signal.SIGKILL, None], ids=["killed", "finished"])
def test_it_does_not_outlive_the_process_that_started_it(end: signal.Signals | None) -> None:
    code = """
        import sys
        from agentlightning.instrumentation.agentops import AgentOpsServerManager
        if __name__ == "__main__":
            manager = AgentOpsServerManager()
            manager.start()
            print(manager.server_process.pid, flush=True)
            sys.stdin.read()
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    server = psutil.Process(int(parent.stdout.readline()))

    if end is not None:
        parent.send_signal(end)
    parent.communicate("", timeout=20)

    gone_by = time.monotonic() + 10
    while not has_ended(server):
        assert time.monotonic() < gone_by
        time.sleep(0.01)
