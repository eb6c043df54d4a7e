"""Python programs that start at once: each is a fork of a process that has imported what most of them need.

Hundreds of tests run a command or a script as a process of its own, and most of the second or two that each takes to
start goes into imports. `Popen` and `run` take what those of `subprocess` take. A command that does not begin with
`sys.executable` is started as `subprocess` does it, and so is everything where the system is not Linux.

Use `subprocess` where the start is what is tested: which modules are imported, how much memory they take, how a process
is called.
"""

import asyncio
import atexit
import builtins
import ctypes
import gc
import importlib
import inspect
import json
import os
import runpy
import socket
import subprocess
import sys
import threading
import time
import types
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any, AnyStr, ClassVar

__all__ = ["Popen", "TorchPopen", "fork_engines", "run", "server_pids"]

ROOT = Path(__file__).parents[1]
PACKAGE = (
    *("fastapi", "uvicorn", "httpx", "openai", "opentelemetry.sdk.trace", "psutil", "websockets", "rich.live"),
    *("agentlightning.cli.proxy", "agentlightning.cli.run", "agentlightning.cli.runner", "agentlightning.cli.store"),
    *("agentlightning.store.http.server", "agentlightning.store.sqlite", "agentlightning.trainer"),
)
LARGEST_REQUEST = 2**20
PR_SET_CHILD_SUBREAPER = 36
ENGINE = ["-m", "agentlightning.engine.server"]

_servers: dict[tuple[str, ...], "_Server"] = {}
_lock = threading.RLock()  # one start at a time, and one server of a kind


class Popen(subprocess.Popen[AnyStr]):
    """A program that is a fork of the server with these modules, and a child of this process."""

    modules: ClassVar[tuple[str, ...]] = PACKAGE

    def _execute_child(self, *arguments: Any) -> None:
        method = super()._execute_child  # subprocess has no public seam below its pipes
        given = inspect.signature(method).bind(*arguments).arguments
        command = [os.fspath(word) for word in given["args"]]
        if sys.platform != "linux" or command[0] != sys.executable:
            method(*arguments)
            return
        files = [given[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        request = {
            "arguments": command[1:],
            "folder": os.getcwd() if given["cwd"] is None else os.fspath(given["cwd"]),
            "environment": dict(os.environ if given["env"] is None else given["env"]),
            "is_session": given["start_new_session"],
            "parent": os.getpid(),
        }
        with _lock:
            if self.modules not in _servers:
                _servers[self.modules] = _Server.started(self.modules)
            self.pid = _servers[self.modules].start(request, [fd if fd >= 0 else n for n, fd in enumerate(files)])
        self._child_created = True
        self._close_pipe_fds(*(given[name] for name in _PIPES))


class TorchPopen(Popen[AnyStr]):
    """The same for programs that need torch, whose import takes longer than all others."""

    modules: ClassVar[tuple[str, ...]] = (*PACKAGE, "torch", "agentlightning.algorithm.grpo", "agentlightning.engine")


def fork_engines() -> Any:
    """The module `subprocess` for asyncio, with which an engine's process is a fork of one that has imported torch."""
    return SimpleNamespace(**{**vars(subprocess), "Popen": _start})


def _start(command: list[str], **options: Any) -> "subprocess.Popen[Any]":
    is_engine = list(command[:3]) == [sys.executable, *ENGINE]
    return (TorchPopen if is_engine else subprocess.Popen)(command, **options)


_PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")


def run(
    command: list[str],
    *,
    kind: type[Popen[Any]] = Popen,
    stdin: str | None = None,
    timeout: float | None = None,
    check: bool = False,
    **options: Any,
) -> "subprocess.CompletedProcess[str]":
    """Run a program to its end; what it prints is captured as text unless `options` say where it goes."""
    streams = {"stdin": subprocess.DEVNULL if stdin is None else subprocess.PIPE}
    streams |= dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    with kind(command, **{**streams, "text": True, **options}) as process:
        try:
            printed, errors = process.communicate(stdin, timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(command, process.returncode, printed, errors)
    if check:
        done.check_returncode()
    return done


def server_pids() -> set[int]:
    return {server.pid for server in _servers.values()}


class _Server:
    """The process that is forked; it ends when this one does."""

    def __init__(self, requests: socket.socket, pid: int) -> None:
        self._requests = requests
        self.pid = pid

    @classmethod
    def started(cls, modules: tuple[str, ...]) -> "_Server":
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # One with more modules than the package's is itself a fork of the package's.
        popen: type[subprocess.Popen[bytes]] = subprocess.Popen if modules == PACKAGE else Popen
        with theirs:
            process = popen(
                [sys.executable, "-c", f"from tests.warm_python import serve; serve({modules})"],
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
                },
                stdin=theirs,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        server = cls(ours, process.pid)
        atexit.register(server._stop, process)
        return server

    def start(self, request: dict[str, Any], files: list[int]) -> int:
        """The process id of a program, which is a child of this process from its first instruction on."""
        prctl = ctypes.CDLL(None).prctl
        prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            socket.send_fds(self._requests, [json.dumps(request).encode()], files)
            return int(self._requests.recv(LARGEST_REQUEST))
        finally:
            prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)

    def _stop(self, process: "subprocess.Popen[bytes]") -> None:
        self._requests.close()
        process.wait()


# ---------------------------------------------------------------------- in the server and in the programs


def serve(modules: tuple[str, ...]) -> None:
    """Fork for every request that comes over the standard input, which is a socket."""
    descriptor = os.dup(0)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in modules:
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    _serve(socket.socket(fileno=descriptor), modules)


def _serve(requests: socket.socket, modules: tuple[str, ...]) -> None:
    """Returns in the server when there will be no more requests, and in a program at its end."""
    with requests:
        while True:
            message, files, _, _ = socket.recv_fds(requests, LARGEST_REQUEST, 3)
            if not message:
                return
            between = os.fork()
            if between == 0:
                if os.fork():
                    os._exit(0)
                break
            os.waitpid(between, 0)
            for file in files:
                os.close(file)
        request = json.loads(message)
        if "torch" in modules and request["arguments"][:2] != ENGINE:
            _stand_by(requests, files, modules)
        _move(request, files)
        requests.send(str(os.getpid()).encode())
    _run_program(request["arguments"])


def _stand_by(requests: socket.socket, files: list[int], modules: tuple[str, ...]) -> None:
    """Keep a fork of this process as it is before its program runs, of which the program's own engines are forks."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid:
        theirs.close()
        _servers[modules] = _Server(ours, pid)
        asyncio.unix_events.subprocess = fork_engines()  # type: ignore[attr-defined] # as the tests' own process has it
        return
    ours.close()
    requests.close()
    for file in files:
        os.close(file)
    server = os.getpid()
    _serve(theirs, modules)
    if os.getpid() == server:
        os._exit(0)
    sys.exit()  # an engine has ended; what follows is the program of another process


def _move(request: dict[str, Any], files: list[int]) -> None:
    """Take the place of a program that was started in the usual way."""
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    if request["is_session"]:
        os.setsid()
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    while os.getppid() != request["parent"]:
        time.sleep(0.0005)


def _run_program(arguments: list[str]) -> None:
    """What the interpreter does with its command line and its environment."""
    actions = [action for action in os.environ.get("PYTHONWARNINGS", "").split(",") if action]
    is_unbuffered = "PYTHONUNBUFFERED" in os.environ
    while arguments[0] in ("-u", "-W"):
        is_unbuffered |= arguments[0] == "-u"
        actions += arguments[1:2] if arguments[0] == "-W" else []
        arguments = arguments[2 if arguments[0] == "-W" else 1 :]
    sys.warnoptions[:] = actions
    warnings._processoptions(actions)  # it is what the interpreter calls
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=stream is sys.stderr or os.isatty(1), write_through=is_unbuffered)
    added = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    kind, *rest = arguments
    if kind == "-m":
        sys.path[:] = [os.getcwd(), *added, *sys.path[1:]]
        sys.argv = rest
        runpy._run_module_as_main(rest[0])  # it is what the interpreter calls
    elif kind == "-c":
        sys.path[:] = ["", *added, *sys.path[1:]]
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    else:
        sys.path[:] = [str(Path(kind).resolve().parent), *added, *sys.path[1:]]
        sys.argv = arguments
        main.__file__ = kind
        exec(compile(Path(kind).read_bytes(), kind, "exec"), main.__dict__)
