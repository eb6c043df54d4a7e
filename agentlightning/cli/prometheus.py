"""`agl prometheus`: one page with the figures of several processes, for Prometheus to read.

Processes that count with prometheus_client and share a folder named in PROMETHEUS_MULTIPROC_DIR write their figures
there; this command adds them up and shows them. A store server alone does not need it: it has its own /metrics.
"""

import argparse
import importlib.util
import logging
import os
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from agentlightning.cli.command import Command, CommandParser, port_number, say
from agentlightning.errors import ConfigurationError
from agentlightning.utils.installation import install_command

__all__ = ["COMMAND", "main"]

logger = logging.getLogger(__name__)

DEFAULT_PORT = 4748
DEFAULT_PATH = "/v1/prometheus"
FOLDER = "PROMETHEUS_MULTIPROC_DIR"

EXAMPLES = """\
examples:
  PROMETHEUS_MULTIPROC_DIR=/tmp/agl-figures agl prometheus
  curl http://127.0.0.1:4748/v1/prometheus
"""


def _add_arguments(parser: CommandParser) -> None:
    parser.add_argument("--host", default="127.0.0.1", help="address to bind")
    parser.add_argument("--port", type=port_number, default=DEFAULT_PORT, help="0 takes a free one")
    parser.add_argument("--metrics-path", default=DEFAULT_PATH, help="path of the figures")


def _run(arguments: argparse.Namespace) -> None:
    folder = os.environ.get(FOLDER)
    if not folder or not Path(folder).is_dir():
        raise ConfigurationError(f"{FOLDER} must name the folder in which the processes count; it is {folder!r}.")
    if importlib.util.find_spec("prometheus_client") is None:
        raise ConfigurationError(f"The package prometheus_client is missing: run `{install_command('prometheus')}`.")
    try:
        server = _Server((arguments.host, arguments.port), arguments.metrics_path.rstrip("/"))
    except OSError as error:
        raise ConfigurationError(
            f"Cannot listen on {arguments.host}:{arguments.port} ({error.strerror}); choose another --host or --port."
        ) from error
    with server:
        address = f"http://{arguments.host}:{server.server_port}{server.metrics_path}"
        say("prometheus", f"Showing the figures in {folder} at {address}. Ctrl-C stops it.")
        server.serve_forever()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], metrics_path: str) -> None:
        super().__init__(address, _Page)
        self.metrics_path = metrics_path


class _Page(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:  # the name http.server looks for
        path = self.path.split("?")[0].rstrip("/")
        if path == "/health":
            self._answer(200, b'{"status":"ok"}', "application/json")
        elif path == self.server.metrics_path:
            self._answer(200, _figures(), "text/plain; version=0.0.4; charset=utf-8")
        else:
            self._answer(404, f"The figures are at {self.server.metrics_path}.\n".encode(), "text/plain")

    def log_message(self, format: str, *args: object) -> None:
        logger.debug(format, *args)

    def _answer(self, status: int, body: bytes, media_type: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", media_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _figures() -> bytes:
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.multiprocess import MultiProcessCollector

    registry = CollectorRegistry()
    MultiProcessCollector(registry)  # type: ignore[no-untyped-call] # it has no types
    figures: bytes = generate_latest(registry)
    return figures


COMMAND = Command(
    name="prometheus",
    description=f"Show the figures of all processes that share the folder {FOLDER}.",
    examples=EXAMPLES,
    add_arguments=_add_arguments,
    run=_run,
    log_level="INFO",
)
main = COMMAND.main
