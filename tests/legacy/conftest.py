"""A legacy server that runs in a thread, clients, and a server that gives prepared answers."""

import json
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from agentlightning.legacy.client import AgentLightningClient
from agentlightning.legacy.server import AgentLightningServer
from agentlightning.types import PromptTemplate
from agentlightning.utils.loop_thread import LoopThread


class ServerInThread:
    """A server with a loop of its own, for tests that are not on a loop or must not block it."""

    def __init__(self, **options: Any) -> None:
        self.server = AgentLightningServer(port=0, **options)
        self._thread = LoopThread("legacy-server")

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self._thread.run(coroutine)

    @property
    def endpoint(self) -> str:
        return self.server.endpoint

    def start(self) -> None:
        self.run(self.server.start())

    def stop(self) -> None:
        self.run(self.server.stop())
        self._thread.stop()


@pytest.fixture(scope="module")
def stopping() -> Iterator[list[threading.Thread]]:
    """Threads that stop servers while the next tests run, for a server takes its time."""
    threads: list[threading.Thread] = []
    yield threads
    for thread in threads:
        thread.join()


@pytest.fixture
def serve(stopping: list[threading.Thread]) -> Iterator[Callable[..., ServerInThread]]:
    """Starts servers; all of them are told to stop at the end."""
    running: list[ServerInThread] = []

    def start(**options: Any) -> ServerInThread:
        running.append(ServerInThread(**options))
        running[-1].start()
        return running[-1]

    yield start
    for served in running:
        stopping.append(threading.Thread(target=served.stop))
        stopping[-1].start()


@pytest.fixture
def served(serve: Callable[..., ServerInThread]) -> ServerInThread:
    return serve()


@pytest.fixture
def connect() -> Iterator[Callable[..., AgentLightningClient]]:
    """Makes clients that poll quickly; all of them are closed at the end."""
    clients: list[AgentLightningClient] = []

    def make(endpoint: str, **options: Any) -> AgentLightningClient:
        clients.append(AgentLightningClient(endpoint, **{"poll_interval": 0.01, **options}))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


@pytest.fixture
def nobody() -> Iterator[str]:
    """An address where nobody listens, and nobody else can: the port is bound."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


@pytest.fixture
def resources() -> dict[str, PromptTemplate]:
    return {"prompt": PromptTemplate(template="Greet {name}.", engine="f-string")}


class CannedServer:
    """Gives prepared answers in turn, the last one for ever, and keeps the requests; without a status it hangs up."""

    def __init__(self, *answers: tuple[int | None, Any]) -> None:
        self.answers = list(answers)
        self.requests: list[tuple[str, str, dict[str, str], bytes]] = []
        canned = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                headers = {name.lower(): value for name, value in self.headers.items()}
                canned.requests.append((self.command, self.path, headers, body))
                status, answer = canned.answers.pop(0) if len(canned.answers) > 1 else canned.answers[0]
                if status is None:
                    self.close_connection = True
                    return
                content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = answer  # noqa: N815 # the names the base class calls

            def log_message(self, *args: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,))
        self._thread.start()

    def stop(self) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()


@pytest.fixture
def canned() -> Iterator[Callable[..., CannedServer]]:
    running: list[CannedServer] = []

    def start(*answers: tuple[int | None, Any]) -> CannedServer:
        running.append(CannedServer(*answers))
        return running[-1]

    yield start
    for server in running:
        server.stop()
