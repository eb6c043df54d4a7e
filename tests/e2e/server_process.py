"""`agl store` as a process that can be killed and started again on its port."""

import http.client
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

import psutil
from typing_extensions import Self

from tests import warm_python

__all__ = ["LASTING", "ServerProcess", "free_port", "left_behind"]

START_SECONDS = 20.0
STOP_SECONDS = 15.0
FIRST_PORT, LAST_PORT = 20_000, 30_000
"""Below the ports that the system gives to outgoing connections: one of those could take the port of a dead server."""
LASTING: set[int] = set()
"""Ids of processes that several tests share, such as a browser; they and their children stay."""


def free_port() -> int:
    """A port on which nothing listens and which no outgoing connection will take."""
    while True:
        port = random.randint(FIRST_PORT, LAST_PORT)
        with socket.socket() as trial:
            try:
                trial.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


class ServerProcess:
    """One server, over as many lives as it takes."""

    def __init__(self, path: Path | None = None, *, token: str | None = None, log: Path | None = None) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._path = path
        self._token = token
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self.kill()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def log_text(self) -> str:
        return "" if self._log is None else self._log.read_text()

    @property
    def open_connections(self) -> int:
        """Established TCP connections that the server still holds."""
        held = psutil.Process(self.pid).net_connections("tcp")
        return sum(connection.status != psutil.CONN_LISTEN for connection in held)

    @property
    def descriptors(self) -> int:
        return psutil.Process(self.pid).num_fds()

    @property
    def memory_bytes(self) -> int:
        resident: int = psutil.Process(self.pid).memory_info().rss
        return resident

    def start(self) -> None:
        """Return when the server answers."""
        store = ["--backend", "memory"] if self._path is None else ["--backend", "sqlite", "--path", str(self._path)]
        command = [sys.executable, "-m", "agentlightning.cli", "store", *store]
        command += ["--port", str(self.port), "--log-level", "ERROR"]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("AGL_")}
        if self._token is not None:
            environment["AGL_STORE_TOKEN"] = self._token
        with open(self._log or os.devnull, "ab") as log:
            process = warm_python.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self._process = process
        deadline = time.monotonic() + START_SECONDS
        while not self.is_healthy():
            assert process.poll() is None, f"the server ended with {process.returncode}"
            assert time.monotonic() < deadline, "the server does not answer"
            time.sleep(0.02)

    def is_healthy(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=2)
        headers = {} if self._token is None else {"Authorization": f"Bearer {self._token}"}
        try:
            connection.request("GET", "/health", headers=headers)
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    def kill(self) -> None:
        """SIGKILL: no goodbye."""
        self._end(signal.SIGKILL)

    def terminate(self) -> int:
        """SIGTERM; returns the exit code."""
        return self._end(signal.SIGTERM)

    def _end(self, number: signal.Signals) -> int:
        process, self._process = self._process, None
        assert process is not None
        process.send_signal(number)
        try:
            return process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise


def left_behind() -> list[psutil.Process]:
    """Processes that this one started and that still run; multiprocessing's own helper stays as long as we do."""
    lasting = {child.pid for pid in LASTING for child in psutil.Process(pid).children(recursive=True)}
    lasting |= warm_python.server_pids() | LASTING
    others = [child for child in psutil.Process().children(recursive=True) if child.pid not in lasting]
    return [child for child in others if "resource_tracker" not in " ".join(child.cmdline())]
