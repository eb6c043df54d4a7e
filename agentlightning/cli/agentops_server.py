"""`agl agentops`: a stand-in for AgentOps' service on this machine."""

import argparse
import os
import signal
import sys
from typing import TYPE_CHECKING, NoReturn

from agentlightning.cli.command import (
    argument,
    cli_command,
    port_number,
    say,
)
from agentlightning.errors import ConfigurationError
from agentlightning.legacy.agentops_service import HOST, listen, serve

if TYPE_CHECKING:
    import socket

DEFAULT_PORT = 8002


@cli_command(
    "agentops",
    description="Stand in for AgentOps' service: programs that start AgentOps are given a token, what they export "
    "is thrown away, and no network is needed. AgentOpsTracer does not need it.",
    examples="""\
examples:
  agl agentops                            serve at http://127.0.0.1:8002 until Ctrl-C
  agl agentops --port 9000 --daemon       serve in the background; its process id is printed

  AGENTOPS_API_KEY=dummy AGENTOPS_API_ENDPOINT=http://127.0.0.1:8002 \\
  AGENTOPS_EXPORTER_ENDPOINT=http://127.0.0.1:8002/traces python agent.py
""",
    arguments=(
        argument("--daemon", action="store_true", help="serve in the background, and print the process id"),
        argument("--port", type=port_number, default=DEFAULT_PORT, help="0 takes a free one"),
    ),
    log_level="INFO",
)
def main(arguments: argparse.Namespace) -> None:
    listening = listen(arguments.port)
    address = f"http://{HOST}:{listening.getsockname()[1]}"
    if arguments.daemon:
        _serve_in_background(listening, address)
        return
    say("agentops", f"Standing in for AgentOps at {address}. Ctrl-C stops it.")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))  # what is open is closed on the way out
    serve(listening)


def _serve_in_background(listening: "socket.socket", address: str) -> None:
    """The socket is bound by now, so whoever is told the address can connect."""
    if not hasattr(os, "fork"):
        raise ConfigurationError("--daemon needs a system that can fork; run `agl agentops` without it.")
    process_id = os.fork()
    if process_id == 0:
        _detach_and_serve(listening)
    listening.close()
    say("agentops", f"Standing in for AgentOps at {address} in process {process_id}; `kill {process_id}` stops it.")
    print(process_id)  # noqa: T201 # the command's own output, for scripts


def _detach_and_serve(listening: "socket.socket") -> NoReturn:
    """Serve apart from the terminal; the default of SIGTERM ends it."""
    code = 1
    try:
        os.setsid()
        os.chdir("/")
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (sys.stdin, sys.stdout, sys.stderr):
            os.dup2(nothing, stream.fileno())
        serve(listening)
        code = 0
    finally:
        os._exit(code)
