"""A stand-in for AgentOps' service on this machine: it gives out a token and says yes to everything.

For programs that start AgentOps themselves and must reach no network: point AGENTOPS_API_ENDPOINT at it. It is a plain
WSGI application on the standard library's server, so it needs no Flask, and one process.
"""

import json
import multiprocessing
import signal
import socket
import urllib.request
from collections.abc import Iterable
from multiprocessing.process import BaseProcess
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from agentlightning.errors import ConfigurationError, TracingError
from agentlightning.utils.child_process import end_process, leave_with_parent

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

HOST: Final = "127.0.0.1"
START_SECONDS: Final = 10.0
"""How long a server may take to answer for the first time."""


def agentops_local_server() -> "WSGIApplication":
    """The application: a token for who asks for one, and the path for an answer to any other GET or POST."""
    return _application


def _application(environ: "WSGIEnvironment", start_response: "StartResponse") -> Iterable[bytes]:
    method, path = environ["REQUEST_METHOD"], environ.get("PATH_INFO") or "/"
    length = environ.get("CONTENT_LENGTH") or "0"
    if length.isdigit():  # bytes that were sent and not read would be reset by the end of the connection
        environ["wsgi.input"].read(int(length))
    body = {"path": path.lstrip("/")}
    if (method, path) == ("POST", "/v3/auth/token"):
        body = {"token": "dummy", "project_id": "dummy"}
    content = json.dumps(body).encode()
    status = "200 OK" if method in ("GET", "POST") else "405 Method Not Allowed"
    start_response(status, [("Content-Type", "application/json"), ("Content-Length", str(len(content)))])
    return [content]


# ---------------------------------------------------------------------- serving


def listen(port: int | None = None) -> socket.socket:
    """A socket that takes connections on this machine; on a free port, if none is named. ConfigurationError if the
    port is taken."""
    try:
        return socket.create_server((HOST, port or 0), backlog=128)
    except (OSError, OverflowError) as error:
        raise ConfigurationError(
            f"Cannot listen on {HOST}:{port}: {error}. Another process may already be using this port; stop it, or "
            "choose another from 0, which takes a free one, to 65535."
        ) from error


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _QuietHandler(WSGIRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Nothing: exporters call several times a second."""


def serve(listening: socket.socket) -> None:
    """Serve on a socket until the process is told to end, or KeyboardInterrupt."""
    server = _Server(listening.getsockname()[:2], _QuietHandler, bind_and_activate=False)
    server.socket.close()
    server.socket = listening
    server.server_name, server.server_port = HOST, listening.getsockname()[1]
    server.setup_environ()
    server.set_app(_application)
    with server:
        server.serve_forever()


def _serve_in_child(listening: socket.socket) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for whoever started us, who then stops us
    leave_with_parent()
    serve(listening)


class AgentOpsServerManager:
    """Runs the stand-in in a child process, which ends when this process does, however that ends."""

    def __init__(self, daemon: bool = True, port: int | None = None) -> None:
        """Nothing is started yet.

        Args:
            daemon: Whether this process may end while the server runs; otherwise it waits for `stop` first.
            port: None takes a free one when the server is started.
        """
        self.daemon = daemon
        self.server_port = port
        """The port that is served, or that was asked for."""
        self.server_process: BaseProcess | None = None
        """None unless the server was started."""
        self._asked_port = port

    def start(self) -> None:
        """Serve; returns when the server answers. Harmless if it runs.

        ConfigurationError (a ValueError) if the port is taken, TracingError (a RuntimeError) if the server does not
        answer within 10 s.
        """
        if self.is_alive():
            return
        with listen(self._asked_port) as listening:
            self.server_port = listening.getsockname()[1]
            context = multiprocessing.get_context("spawn")  # a server in a fork would hold our files and locks
            process = context.Process(
                target=_serve_in_child, args=(listening,), name="AgentLightning-AgentOpsServer", daemon=self.daemon
            )
            self.server_process = process
            process.start()
        # The request waits in the backlog until the child serves. Whatever proxy the environment names, this machine is
        # reached without one.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            opener.open(f"http://{HOST}:{self.server_port}/health", timeout=START_SECONDS).close()
        except OSError as error:
            self.stop()
            raise TracingError(
                f"The stand-in for AgentOps' service did not answer on port {self.server_port}."
            ) from error

    def is_alive(self) -> bool:
        return self.server_process is not None and self.server_process.is_alive()

    def get_port(self) -> int | None:
        """The port that is served; None if the server does not run."""
        return self.server_port if self.is_alive() else None

    def stop(self) -> None:
        """End the server, with force after 5 s; harmless if it does not run."""
        if self.server_process is not None:
            end_process(self.server_process)
        self.server_process = None
