"""A store server in a process of its own, as long as it is needed.

It knows the standard library only, so that servers of any release can be run by it.
"""

import asyncio
import contextlib
import multiprocessing
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

START_SECONDS = 180.0
STOP_SECONDS = 15.0
POLL_SECONDS = 0.05
CALLER_SECONDS = 1.0
"""How often a server looks whether its caller still lives."""
FILES = 10_000
"""Connections and other files that a process with a thousand clients may have open; many systems allow 1,024."""

BuildServer = Callable[[int], Any]
"""Makes a server for a port; it is called in the server's process, and so must be a function of a module."""


@dataclass(frozen=True)
class Server:
    """A server that runs."""

    url: str
    pid: int


@asynccontextmanager
async def running(build: BuildServer) -> AsyncIterator[Server]:
    """A server that lives as long as this context."""
    context = multiprocessing.get_context("spawn")
    ready, stop, port = context.Event(), context.Event(), free_port()
    process = context.Process(target=serve, args=(build, port, ready, stop))
    process.start()
    try:
        await asyncio.to_thread(wait_until_ready, process, ready)
        assert process.pid is not None
        yield Server(f"http://127.0.0.1:{port}", process.pid)
    finally:
        stop.set()
        await asyncio.to_thread(process.join, STOP_SECONDS)
        if process.is_alive():
            process.kill()
            process.join()


def serve(build: BuildServer, port: int, ready: Any, stop: Any) -> None:
    """What the server's process does, until it is told to stop."""
    allow_many_files()

    async def run() -> None:
        server = build(port)
        await server.start()
        ready.set()
        await asyncio.to_thread(wait_until_told, stop)
        await server.stop()

    asyncio.run(run())


def wait_until_told(stop: Any) -> None:
    """Return when the server is to stop, or when the process that would tell it is gone."""
    caller = multiprocessing.parent_process()
    while not stop.wait(CALLER_SECONDS):
        if caller is not None and not caller.is_alive():
            return


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def wait_until_ready(process: Any, ready: Any) -> None:
    """Return when the server is up; a server that died will never be."""
    deadline = time.monotonic() + START_SECONDS
    while not ready.wait(POLL_SECONDS):
        if not process.is_alive() or time.monotonic() > deadline:
            raise SystemExit("The store server did not start.")


def allow_many_files() -> None:
    """Raise this process's limit of open files, as far as the system lets it."""
    with contextlib.suppress(ImportError):  # Windows has no such limit
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
        if soft != resource.RLIM_INFINITY and soft < most:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
