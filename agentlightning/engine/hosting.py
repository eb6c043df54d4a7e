"""An engine and its server in this very process: what `agl serve` and the child of `EngineServer` have in common."""

import asyncio
import signal
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from agentlightning.engine.loading import load
from agentlightning.engine.sampling import Sampling
from agentlightning.engine.scheduler import InferenceEngine
from agentlightning.engine.server import KEEP_ALIVE_SECONDS, EngineApp
from agentlightning.engine.shared_weights import gpu_of
from agentlightning.errors import EngineError
from agentlightning.utils.child_process import calm_collector
from agentlightning.utils.server_launcher import PythonServerLauncher, PythonServerLauncherArgs
from agentlightning.utils.signals import ENDING_SIGNALS, ending_signal

__all__ = ["Hosted", "Hosting", "host"]

_WARM_UP_TOKENS: Final = 2
WARM_UP_SECONDS: Final = 600.0


@dataclass(frozen=True)
class Hosting:
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
    """What callers call the model; its own name by default."""
    api_key: str | None = field(default=None, repr=False)
    weights_key: str | None = field(default=None, repr=False)
    """What changes the weights; None lets nobody do so."""
    weights_folders: Sequence[str] = ()
    """Where files of new weights may lie."""


@dataclass(frozen=True)
class Hosted:
    """What came of it."""

    port: int
    model_name: str
    dtype: str
    """Of the model's weights, such as "bfloat16"; new ones are published in it."""
    gpu: str | None = None
    """That the model is on."""


def host(hosting: Hosting, *, on_ready: Callable[[Hosted], None], heeds_interrupt: bool = True) -> signal.Signals:
    """Serve until a signal ends it, which is returned: requests in flight are finished, a second signal ends them.

    Args:
        on_ready: Called when requests are answered.
        heeds_interrupt: Whether Ctrl-C ends it, and not SIGTERM alone; a child leaves that to its parent.
    """
    calm_collector()
    torch.set_num_threads(hosting.threads)
    model, codec = load(hosting.model, device=hosting.device, dtype=hosting.dtype)
    engine = InferenceEngine(model, max_sequences=hosting.max_sequences, max_length=hosting.max_length)
    app = EngineApp(
        engine,
        codec,
        name=hosting.name,
        api_key=hosting.api_key,
        weights_key=hosting.weights_key,
        weights_folders=hosting.weights_folders,
    )
    return _run(_serve(app, engine, hosting, on_ready, heeds_interrupt=heeds_interrupt))


async def _serve(
    app: EngineApp,
    engine: InferenceEngine,
    hosting: Hosting,
    on_ready: Callable[[Hosted], None],
    *,
    heeds_interrupt: bool,
) -> signal.Signals:
    arguments = PythonServerLauncherArgs(
        host=hosting.host, port=hosting.port, timeout_keep_alive=KEEP_ALIVE_SECONDS, launch_mode="asyncio"
    )
    launcher = PythonServerLauncher(app, arguments)
    with ending_signal(ENDING_SIGNALS if heeds_interrupt else (signal.SIGTERM,)) as received:
        async with app.running():
            await _warm_up(engine)
            try:
                await launcher.start()
            except RuntimeError as error:
                raise EngineError(str(error)) from error
            try:
                dtype = str(engine.model.dtype).removeprefix("torch.")
                on_ready(Hosted(launcher.port, app.name, dtype, gpu_of(engine.model.device)))
                return await received
            finally:
                await launcher.stop()


async def _warm_up(engine: InferenceEngine) -> None:
    """The first steps set up much; a model that cannot make them says so before anybody calls."""
    sampling = Sampling(max_new_tokens=_WARM_UP_TOKENS, temperature=0.0)
    await asyncio.wait_for(asyncio.wrap_future(engine.submit([0], sampling)), WARM_UP_SECONDS)


def _run(serving: Coroutine[Any, Any, signal.Signals]) -> signal.Signals:
    try:
        import uvloop
    except ImportError:  # there is none for Windows
        return asyncio.run(serving)
    return uvloop.run(serving)
