"""A model that says what it is told to, behind the same interface as any other, and a server around it."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from agentlightning.engine.model import logits_of
from agentlightning.engine.scheduler import InferenceEngine
from agentlightning.engine.server import KEEP_ALIVE_SECONDS, EngineApp
from agentlightning.engine.tiny import tokenizer
from agentlightning.engine.tiny.codec import TinyChatCodec
from agentlightning.engine.tiny.model import TinyModel, TinyShape
from agentlightning.engine.tiny.tokenizer import CALL, END
from agentlightning.utils.loop_thread import LoopThread
from agentlightning.utils.server_launcher import PythonServerLauncher, PythonServerLauncherArgs

PATIENCE_SECONDS = 60.0
SURE = 50.0
"""A logit that makes everything else impossible."""


@dataclass
class ScriptedCache:
    """Where each slot's answer began."""

    beginnings: dict[int, int] = field(default_factory=dict)


class ScriptedModel(TinyModel):
    """Says its script, whatever the prompt; after it, the end token for ever."""

    def __init__(self, script: list[int] | None = None) -> None:
        super().__init__(TinyShape(max_length=256))
        self.script = script or []

    def new_cache(self, slots: int, length: int) -> Any:
        return ScriptedCache()

    def prefill(self, ids: Any, lengths: Any, cache: Any, slots: Any, starts: Any = None) -> Any:
        for slot, length in zip(slots.tolist(), lengths.tolist(), strict=True):
            cache.beginnings[slot] = length
        return self._saying([0] * len(lengths))

    def decode(self, tokens: Any, positions: Any, cache: Any, n: int) -> Any:
        return self._saying([place - cache.beginnings[slot] + 1 for slot, place in enumerate(positions.tolist())])

    def move(self, cache: Any, sources: Any, targets: Any, length: int) -> None:
        for target, beginning in zip(targets, [cache.beginnings[source] for source in sources], strict=True):
            cache.beginnings[target] = beginning

    def _saying(self, places: list[int]) -> Any:
        logits = torch.zeros(len(places), self.vocab_size)
        for row, place in enumerate(places):
            logits[row, self.script[place] if place < len(self.script) else END] = SURE
        return logits


def saying(text: str) -> list[int]:
    """A script for an answer."""
    return [*tokenizer.encode(text), END]


def calling(text: str, before: str = "") -> list[int]:
    """A script for an answer that calls the only tool with a text."""
    return [*tokenizer.encode(before), CALL, *tokenizer.encode(text), END]


def trained_logprobs(model: Any, prompt: list[int], sampled: list[int], temperature: float = 1.0) -> list[float]:
    """Of the sampled tokens, as the training forward sees them."""
    ids = torch.tensor([prompt + sampled])
    selected = torch.zeros_like(ids, dtype=torch.bool)
    selected[0, len(prompt) - 1 : -1] = True
    with torch.no_grad():
        logits = logits_of(model, ids, torch.tensor([ids.shape[1]]), selected)
    found: list[float] = (logits / temperature).log_softmax(-1)[range(len(sampled)), sampled].tolist()
    return found


def until(is_so: Callable[[], bool], seconds: float = PATIENCE_SECONDS) -> None:
    """Wait for what another thread or process does."""
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


@dataclass
class Served:
    """A running server."""

    url: str
    app: EngineApp
    model: Any

    @property
    def base_url(self) -> str:
        return f"{self.url}/v1"


@contextmanager
def running(app: EngineApp, front: Any = None) -> Iterator[str]:
    """Serve an engine from a thread, behind `front` if there is one; yields the address."""
    thread = LoopThread("test-engine")
    arguments = PythonServerLauncherArgs(timeout_keep_alive=KEEP_ALIVE_SECONDS)

    async def start() -> tuple[PythonServerLauncher, Any]:
        engine = app.running()
        await engine.__aenter__()
        launcher = PythonServerLauncher(front or app, arguments)
        await launcher.start()
        return launcher, engine

    launcher, engine = thread.run(start())
    try:
        yield launcher.access_endpoint
    finally:
        thread.run(launcher.stop())
        thread.run(engine.__aexit__(None, None, None))
        thread.stop()


@contextmanager
def serving(model: Any, *, max_sequences: int = 16, **options: Any) -> Iterator[Served]:
    """Serve a model with the tiny model's codec."""
    app = EngineApp(InferenceEngine(model, max_sequences=max_sequences), TinyChatCodec(), **options)
    with running(app) as url:
        yield Served(url, app, model)
