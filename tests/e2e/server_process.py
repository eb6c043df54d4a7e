"""`agl store` as a process that can be killed and started again on its port.

A parent loads the package once; each life of the server is a fork of it, which starts in a fraction of the time.
"""

import http.client
import json
import os
import queue
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import IO

import psutil
from typing_extensions import Self

__all__ = ["ServerProcess", "free_port", "left_behind"]

START_SECONDS = 20.0
STOP_SECONDS = 15.0
FIRST_PORT, LAST_PORT = 20_000, 30_000
"""Below the ports that the system gives to outgoing connections: one of those could take the port of a dead server."""


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


PARENT = """
import json, os, sys
import fastapi, uvicorn
import agentlightning.cli.store as command, agentlightning.store.http.server, agentlightning.store.sqlite

for line in sys.stdin:
    told = json.loads(line)
    child = os.fork()
    if child == 0:
        log = os.open(told["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.exit(command.main(told["arguments"]))
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
"""Prints the process id of each server, and its exit code when it has ended."""


class ServerProcess:
    """One server, over as many lives as it takes."""

    def __init__(self, path: Path | None = None, *, token: str | None = None, log: Path | None = None) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._path = path
        self._token = token
        self._log = log
        self._parent: subprocess.Popen[str] | None = None
        self._printed: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._pid: int | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pid is not None:
            self.kill()
        if self._parent is not None:
            assert self._parent.stdin is not None
            self._parent.stdin.close()
            self._parent.wait(STOP_SECONDS)

    @property
    def pid(self) -> int:
        assert self._pid is not None
        return self._pid

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
        parent = self._parent = self._parent or self._started_parent()
        arguments = [*store, "--port", str(self.port), "--log-level", "ERROR"]
        assert parent.stdin is not None
        parent.stdin.write(json.dumps({"arguments": arguments, "log": str(self._log or os.devnull)}) + "\n")
        parent.stdin.flush()
        self._pid = int(self._printed.get(timeout=START_SECONDS))
        deadline = time.monotonic() + START_SECONDS
        while not self.is_healthy():
            assert self._printed.empty(), f"the server ended with {self._printed.get()}"
            assert time.monotonic() < deadline, "the server does not answer"
            time.sleep(0.02)

    def _started_parent(self) -> "subprocess.Popen[str]":
        environment = {name: value for name, value in os.environ.items() if not name.startswith("AGL_")}
        if self._token is not None:
            environment["AGL_STORE_TOKEN"] = self._token
        pipe = subprocess.PIPE
        parent = subprocess.Popen([sys.executable, "-c", PARENT], stdin=pipe, stdout=pipe, env=environment, text=True)
        assert parent.stdout is not None

        def read(lines: IO[str]) -> None:
            with lines:
                for line in lines:
                    self._printed.put(line)

        threading.Thread(target=read, args=(parent.stdout,), daemon=True).start()
        return parent

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
        pid, self._pid = self.pid, None
        os.kill(pid, number)
        try:
            return int(self._printed.get(timeout=STOP_SECONDS))
        except queue.Empty:
            os.kill(pid, signal.SIGKILL)
            raise


def left_behind() -> list[psutil.Process]:
    """Processes that this one started and that still run; multiprocessing's own helper stays as long as we do."""
    children = psutil.Process().children(recursive=True)
    return [child for child in children if "resource_tracker" not in " ".join(child.cmdline())]
