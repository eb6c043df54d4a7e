"""What training knows of an engine: something that serves a model to agents and takes its new weights.

The embedded engine (`embedded.EngineServer`) and vLLM are the two that come with the package; another is one class with
these methods, and one with `create` that `GRPO(engine=…)` takes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from agentlightning.utils.json_values import JsonObject

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agentlightning.engine.model import LoraOptions
    from agentlightning.engine.sampling import GenerationFuture, OnToken, Sampling
    from agentlightning.engine.weights import PublishedWeights

__all__ = ["Engine", "EngineChoice", "EngineRequest", "ServerOptions", "SleepingEngine", "TokenEngine"]


class Engine(Protocol):
    """Serves one model that is under training. Its methods block; training calls them off its event loop."""

    @property
    def address(self) -> str:
        """Where OpenAI's clients find it, such as `http://127.0.0.1:8000/v1`; EngineError before `start`."""
        ...

    def start(self) -> None:
        """Serve; returns when calls are answered. EngineError with the engine's last words if that does not happen."""
        ...

    def stop(self) -> None:
        """End what `start` began; harmless if nothing runs."""
        ...

    def is_running(self) -> bool: ...

    def status(self) -> JsonObject:
        """What the engine reports of itself; EngineError with its last words if it has ended."""
        ...

    def publish(self, version: int, weights: PublishedWeights) -> None:
        """Sample from these weights; returns when it does. Weights that do not fit are an EngineError."""
        ...

    def model_config(self) -> JsonObject:
        """Its entry in the model list of `LLMProxy`, of the version that was published last."""
        ...


@runtime_checkable
class SleepingEngine(Protocol):
    """What an engine has besides, if it can give its GPU memory to the learner while that works."""

    def sleep(self) -> None:
        """Give the memory back; no call is answered before `wake`. Does nothing where sleeping is not wanted."""
        ...

    def wake(self) -> None:
        """Take the memory again; harmless if it is awake."""
        ...


class TokenEngine(Protocol):
    """What `EngineApp` needs to serve a model: token ids in, sampled ids out."""

    max_length: int
    """Tokens of prompt and answer together."""
    version: int
    """Of the weights that are sampled from."""

    @property
    def name(self) -> str:
        """What callers call the model by default."""
        ...

    def start_serving(self) -> None:
        """Begin; called in the event loop that serves."""
        ...

    def close(self) -> None: ...

    def submit(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, on_token: OnToken | None = None
    ) -> GenerationFuture:
        """Sample from a prompt; returns at once. InvalidRequest where that cannot be done."""
        ...

    def statistics(self) -> JsonObject: ...


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
    log_level: str = "WARNING"
    """Of a child; its lines appear in the log of its parent."""


@dataclass(frozen=True)
class EngineRequest:
    """The engine that a policy needs."""

    source: str
    """The model, as `engine.checkpoint.load` takes it."""
    name: str
    """What agents call the model."""
    device: str = "auto"
    max_sequences: int = 64
    """Answers that are sampled together at most."""
    lora: LoraOptions | None = None
    """Given where adapters are trained instead of the weights."""


class EngineChoice(Protocol):
    """What `GRPO(engine=…)` takes beside the names of engines."""

    def create(self, request: EngineRequest) -> Engine:
        """An engine that is not started yet; ConfigurationError where the request cannot be met."""
        ...
