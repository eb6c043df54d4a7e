"""Fresh servers on free ports of this machine, each in a process of its own, and the memory that they take."""

import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from agentlightning.store.http.tokens import Scope, ScopeKind, sign_token
from agentlightning.utils.server_launcher import reserved_socket

TOKEN = "the-operators-token-0123456789"
PROXY_KEY = "the-proxys-key-0123456789"
START_SECONDS = 60.0
SAMPLE_SECONDS = 0.05
LEGACY = """
import asyncio, sys
from agentlightning.server import AgentLightningServer
asyncio.run(AgentLightningServer("127.0.0.1", int(sys.argv[1])).run_forever())
"""


@dataclass
class Server:
    """One running server."""

    kind: str
    port: int
    process: subprocess.Popen[bytes]
    log: Path
    key: str | None = None
    idle_bytes: int = 0
    peak_bytes: int = 0
    _is_watched: bool = field(default=True, repr=False)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def memory(self) -> int:
        return int(psutil.Process(self.process.pid).memory_info().rss)

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def headers(self, token: str | None = None) -> dict[str, str]:
        shown = token or self.key
        return {} if shown is None else {"Authorization": f"Bearer {shown}"}

    def watch(self) -> None:
        """Note how much memory it takes at most."""
        with suppress(psutil.Error):
            while self._is_watched and self.is_alive:
                self.peak_bytes = max(self.peak_bytes, self.memory)
                time.sleep(SAMPLE_SECONDS)

    def stop(self) -> None:
        self._is_watched = False
        self.process.kill()
        self.process.wait()


@dataclass
class Site:
    """The servers of one attack; the first is the one that is attacked."""

    servers: dict[str, Server]
    kind: str
    folder: Path

    @property
    def target(self) -> Server:
        return self.servers[self.kind]


def signed(
    kind: ScopeKind, rollout_id: str | None = None, attempt_id: str | None = None, *, ends_at: float | None = None
) -> str:
    """A token of the store with a narrower scope."""
    return sign_token(TOKEN, Scope(kind, rollout_id, attempt_id), expires_at=ends_at)


def free_port() -> int:
    with reserved_socket("127.0.0.1") as reserved:
        return int(reserved.getsockname()[1])


@contextmanager
def running(kind: str, *, is_locked: bool = True, backend: str = "sqlite") -> Iterator[Site]:
    """A fresh server of that kind, with the store and the models that it needs."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="agl-attack-")))
        site = Site({}, kind, folder)

        def start(name: str, arguments: list[str], key: str | None = None, **environment: str) -> Server:
            port = free_port()
            command = [sys.executable, *(part.replace("PORT", str(port)) for part in arguments)]
            log = folder / f"{name}.log"
            clean = {name: value for name, value in os.environ.items() if not name.startswith("AGL_")}
            with log.open("wb") as stream:
                process = subprocess.Popen(
                    command, stdout=stream, stderr=stream, env={**clean, **environment}, cwd=folder
                )
            server = site.servers[name] = Server(name, port, process, log, key)
            stack.callback(server.stop)
            await_health(server)
            server.idle_bytes = server.peak_bytes = server.memory
            threading.Thread(target=server.watch, daemon=True).start()
            return server

        agl = ["-m", "agentlightning.cli"]
        if kind in ("store", "proxy"):
            path = ["--path", str(folder / "runs.db")] if backend == "sqlite" else []
            locked = {"AGL_STORE_TOKEN": TOKEN} if is_locked else {}
            store = start(
                "store",
                [*agl, "store", "--backend", backend, *path, "--port", "PORT", "--log-level", "ERROR"],
                TOKEN if is_locked else None,
                **locked,
            )
        if kind == "proxy":
            models = start("models", [str(Path(__file__).with_name("models.py")), "PORT"])
            locked = {"AGL_STORE_TOKEN": TOKEN, "AGL_PROXY_API_KEY": PROXY_KEY} if is_locked else {}
            options = ["--model", f"m={models.url}/v1", "--store", store.url, "--retries", "0"]
            arguments = [*agl, "proxy", *options, "--port", "PORT", "--log-level", "ERROR"]
            start("proxy", arguments, PROXY_KEY if is_locked else None, **locked)
        if kind == "engine":
            locked = {"AGL_PROXY_API_KEY": PROXY_KEY} if is_locked else {}
            arguments = [*agl, "serve", "tiny", "--port", "PORT", "--log-level", "ERROR"]
            start("engine", arguments, PROXY_KEY if is_locked else None, **locked)
        if kind == "legacy":
            locked = {"AGL_STORE_TOKEN": TOKEN} if is_locked else {}
            start("legacy", ["-W", "ignore", "-c", LEGACY, "PORT"], TOKEN if is_locked else None, **locked)
        yield site


def await_health(server: Server) -> None:
    """Wait until a server answers, if only to refuse."""
    deadline = time.monotonic() + START_SECONDS
    while server.is_alive and time.monotonic() < deadline:
        try:
            request = urllib.request.Request(f"{server.url}/health", headers=server.headers())
            with urllib.request.urlopen(request, timeout=5):
                return
        except urllib.error.HTTPError:
            return
        except OSError:
            time.sleep(0.05)
    raise RuntimeError(f"The {server.kind} did not start:\n{server.log.read_text(errors='replace')[-2000:]}")
