"""An engine and its server in this very process: for `agl serve`, and as the child of `EngineServer`.

The child, `python -m agentlightning.engine.process`, reads its settings, a line of JSON, from its standard input, since
they hold keys and every user of the machine can read command lines. It writes one line of JSON with its port to its
standard output and errors to its standard error, and ends on SIGTERM or when its parent is gone, however that ended.
"""

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import orjson
import torch

from agentlightning.engine.checkpoint import load
from agentlightning.engine.sampling import Sampling
from agentlightning.engine.scheduler import InferenceEngine
from agentlightning.engine.server import KEEP_ALIVE_SECONDS, EngineApp
from agentlightning.engine.weights import gpu_of
from agentlightning.errors import AgentLightningError, EngineError
from agentlightning.logging import setup
from agentlightning.utils.child_process import leave_with_parent
from agentlightning.utils.server_launcher import (
    ENDING_SIGNALS,
    PythonServerLauncher,
    PythonServerLauncherArgs,
    ending_signal,
    tune_process,
)


@dataclass(frozen=True)
class ServerOptions:
    """What is served, and how."""

    model: str = "tiny"
    host: str = "127.0.0.1"
    port: int = 0
    max_sequences: int = 64
    max_length: int | None = None
    device: str = "auto"
    dtype: str = "auto"
    threads: int = 1
    """That compute one operation; more than one pays for large models on idle cores."""
    name: str | None = None
    """The name of the model in requests; its own name by default."""
    api_key: str | None = field(default=None, repr=False)
    weights_key: str | None = field(default=None, repr=False)
    """What changes the weights; None lets nobody do so."""
    weights_folders: Sequence[str] = ()
    """Where files of new weights may lie."""


@dataclass(frozen=True)
class ServedEngine:
    """A server that is ready."""

    port: int
    model_name: str
    dtype: str
    """Of the model's weights, such as "bfloat16"; new ones are published in it."""
    gpu: str | None = None
    """That the model is on."""


def serve(
    options: ServerOptions, *, on_ready: Callable[[ServedEngine], None], heeds_interrupt: bool = True
) -> signal.Signals:
    """Serve until a signal ends it, which is returned: requests in flight are finished, a second signal ends them.

    Args:
        on_ready: Called when requests are answered.
        heeds_interrupt: Whether Ctrl-C ends it, and not SIGTERM alone; a child leaves that to its parent.
    """
    tune_process()
    torch.set_num_threads(options.threads)
    model, codec = load(options.model, device=options.device, dtype=options.dtype)
    engine = InferenceEngine(model, max_sequences=options.max_sequences, max_length=options.max_length)
    app = EngineApp(
        engine,
        codec,
        name=options.name,
        api_key=options.api_key,
        weights_key=options.weights_key,
        weights_folders=options.weights_folders,
    )
    arguments = PythonServerLauncherArgs(
        host=options.host, port=options.port, timeout_keep_alive=KEEP_ALIVE_SECONDS, launch_mode="asyncio"
    )
    launcher = PythonServerLauncher(app, arguments)

    async def run() -> signal.Signals:
        with ending_signal(ENDING_SIGNALS if heeds_interrupt else (signal.SIGTERM,)) as received:
            async with app.running():
                # The first steps set up much; a model that cannot make them fails before anybody calls.
                first = engine.submit([0], Sampling(max_new_tokens=2, temperature=0.0))
                await asyncio.wait_for(asyncio.wrap_future(first), 600.0)
                try:
                    await launcher.start()
                except RuntimeError as error:
                    raise EngineError(str(error)) from error
                try:
                    dtype = str(model.dtype).removeprefix("torch.")
                    on_ready(ServedEngine(launcher.port, app.name, dtype, gpu_of(model.device)))
                    return await received
                finally:
                    await launcher.stop()

    try:
        import uvloop
    except ImportError:  # there is none for Windows
        return asyncio.run(run())
    return uvloop.run(run())


def main() -> int:
    """Serve as a child; returns the exit code."""
    # Standard output is for the line with the port; what else is printed goes to standard error.
    announcements = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    settings = orjson.loads(sys.stdin.buffer.readline())
    parent, folders = settings.pop("parent"), settings["weights_folders"]
    setup(settings.pop("log_level"))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent sends SIGTERM

    def remove_folders() -> None:  # the parent made them for its weights, and cannot remove them any more
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)

    def announce(served: ServedEngine) -> None:
        os.write(announcements, orjson.dumps(served) + b"\n")
        os.close(announcements)

    leave_with_parent(remove_folders, is_orphaned=lambda: os.getppid() != parent)
    try:
        serve(ServerOptions(**settings), on_ready=announce, heeds_interrupt=False)
    except AgentLightningError as error:
        print(error, file=sys.stderr)  # noqa: T201 # to the parent, which raises it
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
