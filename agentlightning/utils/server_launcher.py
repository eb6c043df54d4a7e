"""Running an ASGI application: in the current loop, or in a thread.

The launcher binds its socket before anything is started, so a busy port is an error at once, port 0 finds a free one,
and nobody is fooled by another server answering there. `start` returns when requests are served; `stop` lets requests
in flight finish.
"""

import asyncio
import contextlib
import ctypes
import errno
import gc
import ipaddress
import logging
import signal
import socket
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from agentlightning.errors import ConfigurationError
from agentlightning.utils.deprecation import missing_name
from agentlightning.utils.loop_thread import LoopThread

if TYPE_CHECKING:
    from agentlightning.utils.uvicorn_server import StoppableServer

__all__ = [
    "UNOBSERVED",
    "tune_process",
    "ENDING_SIGNALS",
    "LaunchMode",
    "PythonServerLauncher",
    "PythonServerLauncherArgs",
    "ending_signal",
    "is_loopback",
    "reserved_socket",
]

logger = logging.getLogger(__name__)

LaunchMode = Literal["asyncio", "thread"]
Application = Callable[..., Any]

UNOBSERVED: Final[Any] = {"tracing": False, "metrics": False, "logs": False}
"""What applications give FastAPI as `telemetry`: it would make a span of every request of its own accord, and those
would be found in the traces of agents that run in the same process."""
BACKLOG = 4096
ENDING_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
CALM_THRESHOLDS: Final = (10_000, 20, 50)
"""Of the garbage collector."""
_POLL_SECONDS = 0.005
_M_MMAP_THRESHOLD = -3
_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def tune_process() -> None:
    """In a process of our own that serves: collect garbage more rarely, and give large blocks of memory back at once.

    Decoding requests makes many small objects at once. With Python's usual thresholds the collector looks through them
    every few requests, which costs a busy server a fifth of its time; it is left alone if it is rarer already, or off.
    glibc by itself soon keeps blocks of megabytes for later, in every thread that ever had some.
    """
    if 0 < gc.get_threshold()[0] < CALM_THRESHOLDS[0]:
        gc.set_threshold(*CALM_THRESHOLDS)
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # another C library
            # Blocks from this size on are given back to the system when they are freed.
            ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 256 * 1024)


def is_loopback(host: str) -> bool:
    """Whether an address can be reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass
class PythonServerLauncherArgs:
    """Where and how an application is served."""

    port: int | None = None
    """None or 0 takes a free port."""
    host: str | None = None
    """Address to bind; this machine only by default."""
    access_host: str | None = None
    """Address that others are told; by default the bound one."""
    launch_mode: LaunchMode = "asyncio"
    n_workers: int = 1
    """Must be 1."""
    healthcheck_url: str | None = None
    """Path that must answer 200 before `start` returns."""
    log_level: int | str = logging.ERROR
    access_log: bool = False
    startup_timeout: float = 60.0
    kill_unhealthy_server: bool = True
    """Whether a server that does not become healthy in time is stopped."""
    thread_join_timeout: float = 10.0
    timeout_keep_alive: int = 30
    uvicorn_options: Mapping[str, Any] = field(default_factory=dict)
    reserved: socket.socket | None = None
    """Bound to `host` and `port` already (see `reserved_socket`); it is the launcher's to close."""


class PythonServerLauncher:
    """Serves one application."""

    def __init__(
        self,
        app: Application,
        args: PythonServerLauncherArgs,
        serve_context: AbstractAsyncContextManager[Any] | None = None,
    ) -> None:
        """Prepare to serve; nothing is bound yet.

        Args:
            app: The ASGI application. If it has a method `begin_shutdown`, that is called before its connections are
                closed.
            args: Where and how.
            serve_context: Entered around serving, in the loop that serves.
        """
        if args.launch_mode not in get_args(LaunchMode) or args.n_workers != 1:
            raise ConfigurationError(
                f"launch_mode is {args.launch_mode!r} with n_workers={args.n_workers}; a server is one process: use "
                "launch_mode='thread', and start further servers of the same SQLite file or PostgreSQL database."
            )
        self.app = app
        self.args = args
        self.server: StoppableServer | None = None
        self._serve_context = serve_context
        self._socket: socket.socket | None = None
        self._port = args.port or 0
        self._thread: LoopThread | None = None
        self._serving: Future[None] | asyncio.Task[None] | None = None

    # ------------------------------------------------------------------ addresses

    @property
    def port(self) -> int:
        """The bound port; before `start`, the one asked for."""
        return self._port

    @property
    def endpoint(self) -> str:
        return _url(self.args.host or "127.0.0.1", self.port)

    @property
    def access_endpoint(self) -> str:
        """The address for clients; a server bound everywhere is reached on this machine unless told otherwise."""
        bound = self.args.host or "127.0.0.1"
        return _url(self.args.access_host or _EVERYWHERE.get(bound, bound), self.port)

    @property
    def health_url(self) -> str | None:
        path = self.args.healthcheck_url
        return None if path is None else f"{self.access_endpoint}/{path.lstrip('/')}"

    def is_running(self) -> bool:
        return self.server is not None and self.server.started and not self.server.should_exit

    # ------------------------------------------------------------------ life

    async def start(self) -> None:
        """Serve in the background; returns when requests are answered, raises RuntimeError if that does not happen."""
        self._bind()
        try:
            self._launch()
            await self._until_ready()
        except BaseException:
            if self.args.kill_unhealthy_server or not self._has_started():
                await self.stop()
            raise

    async def stop(self) -> None:
        """Finish requests in flight and stop; does nothing if nothing runs."""
        if self.server is not None:
            self.server.stop()
        if self._serving is not None:
            await self._until_served(self._serving)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.stop)
        if self._socket is not None:
            self._socket.close()
        self._socket = self._serving = self._thread = self.server = None

    async def reload(self) -> None:
        """Stop, then start again on the same port."""
        await self.stop()
        await self.start()

    async def run_forever(self) -> None:
        """Serve in the current loop until `stop` is called or the caller is cancelled."""
        self._bind()
        self.server = _new_server(self.app, self.args)
        self._serving = serving = asyncio.create_task(self._serve(self.server), name="agl-server")
        try:
            await asyncio.shield(serving)
        finally:
            await self.stop()

    # ------------------------------------------------------------------ parts

    def _bind(self) -> None:
        host = self.args.host or "127.0.0.1"
        try:
            reserved = self.args.reserved
            self._socket = _bound(host, self._port) if reserved is None or reserved.fileno() < 0 else reserved
            self._socket.listen(BACKLOG)
        except OverflowError as error:
            raise RuntimeError(
                f"The port is {self._port}; ports go from 0, which takes a free one, to 65535."
            ) from error
        except OSError as error:
            way_out = "Check the host and the port."
            if error.errno == errno.EADDRINUSE:
                way_out = "Another process may already be using this port; stop it or choose another port."
            raise RuntimeError(f"The server cannot listen on {host}:{self._port}: {error}. {way_out}") from error
        self._port = self._socket.getsockname()[1]

    def _launch(self) -> None:
        self.server = _new_server(self.app, self.args)
        if self.args.launch_mode == "thread":
            self._thread = LoopThread("agl-server")
            self._serving = self._thread.start_soon(self._serve(self.server))
        else:
            self._serving = asyncio.create_task(self._serve(self.server), name="agl-server")

    async def _serve(self, server: "StoppableServer") -> None:
        async with self._serve_context or contextlib.nullcontext():
            await server.serve(sockets=[self._socket] if self._socket is not None else None)

    async def _until_ready(self) -> None:
        deadline = time.monotonic() + self.args.startup_timeout
        while not self._has_started():
            has_ended = self._serving is not None and self._serving.done()
            if has_ended or time.monotonic() > deadline:
                raise RuntimeError(f"The server on {self.endpoint} did not start; its log says why.")
            await asyncio.sleep(_POLL_SECONDS)
        while self.health_url is not None:
            try:
                (await asyncio.to_thread(urllib.request.urlopen, self.health_url, timeout=5.0)).close()
                return
            except OSError as error:
                if time.monotonic() > deadline:
                    raise RuntimeError(f"The server does not answer {self.health_url}: {error}.") from error
                await asyncio.sleep(_POLL_SECONDS)

    def _has_started(self) -> bool:
        return self.server is not None and self.server.started

    async def _until_served(self, serving: "Future[None] | asyncio.Task[None]") -> None:
        future = asyncio.wrap_future(serving) if isinstance(serving, Future) else serving
        done, _ = await asyncio.wait([future], timeout=self.args.thread_join_timeout)
        if not done:
            logger.warning("The server on %s did not stop within %s s.", self.endpoint, self.args.thread_join_timeout)
            future.cancel()
        elif not future.cancelled() and (error := future.exception()) is not None:
            logger.warning("The server on %s ended with an error.", self.endpoint, exc_info=error)


def reserved_socket(host: str, port: int = 0) -> socket.socket:
    """A socket on a port, which nobody else can take until it is closed; OSError if somebody has.

    Args:
        port: 0 takes a free one. Any other may follow a server that has just ended on it, so only listening takes it:
            connections wait from now on.
    """
    reserved = _bound(host, port, shares_port=port != 0)
    try:
        if port != 0:
            reserved.listen(BACKLOG)
    except BaseException:
        reserved.close()
        raise
    return reserved


def _bound(host: str, port: int, *, shares_port: bool = True) -> socket.socket:
    """A bound socket; one that shares its port may follow a server that has just ended on it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named because asyncio sends small packets at once only on sockets that say they are TCP.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(shares_port))
        bound.bind((host, port))
    except BaseException:
        bound.close()
        raise
    return bound


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _new_server(app: Application, args: PythonServerLauncherArgs) -> "StoppableServer":
    import uvicorn

    from agentlightning.utils.uvicorn_server import StoppableServer

    # What limits the heads of requests to every server; uvicorn imports it.
    config = uvicorn.Config(
        app,
        log_level=args.log_level,
        log_config=None,
        access_log=args.access_log,
        timeout_keep_alive=args.timeout_keep_alive,
        timeout_graceful_shutdown=max(int(args.thread_join_timeout / 2), 1),
        **{"http": "agentlightning.asgi.protocol:TimedProtocol", **args.uvicorn_options},
    )
    return StoppableServer(config, getattr(app, "begin_shutdown", None))


@contextlib.contextmanager
def ending_signal(
    numbers: Sequence[signal.Signals] = ENDING_SIGNALS,
) -> "Iterator[asyncio.Future[signal.Signals]]":
    """The first of these signals, to be awaited within the block: upon it a server finishes what it has begun.

    A second Ctrl-C ends the process at once. After a SIGTERM others change nothing: `timeout` sends two of them.
    """
    loop = asyncio.get_running_loop()
    received: asyncio.Future[signal.Signals] = loop.create_future()

    def note(number: signal.Signals) -> None:
        # Blocked meanwhile: between the loop's handler and ours another SIGTERM would end the process.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        for other in numbers:
            loop.remove_signal_handler(other)
        if number == signal.SIGTERM:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        if not received.done():  # the loop may be ending already
            received.set_result(number)

    for number in numbers:
        loop.add_signal_handler(number, note, number)
    try:
        yield received
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def __getattr__(name: str) -> object:
    raise missing_name(__name__, name)
