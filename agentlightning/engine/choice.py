"""The engines that `GRPO(engine=…)` knows by name: the embedded one, vLLM, and a vLLM that runs already."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentlightning.engine import serving
from agentlightning.engine.vllm.options import VllmOptions
from agentlightning.errors import ConfigurationError

if TYPE_CHECKING:
    from agentlightning.engine.base import Engine, EngineChoice, EngineRequest

__all__ = ["EMBEDDED", "EmbeddedOptions", "engine_choice"]

EMBEDDED = "embedded"


@dataclass(frozen=True)
class EmbeddedOptions:
    """The engine of this package, in a child process; it loads the model that it is to serve, and no other."""

    def create(self, request: EngineRequest) -> Engine:
        """An engine that is not started yet."""
        return serving.EngineServer(
            request.source, max_sequences=request.max_sequences, device=request.device, name=request.name
        )


def engine_choice(engine: str | EngineChoice) -> EngineChoice:
    """The options behind a name; ConfigurationError that lists the names for one that is not known."""
    if not isinstance(engine, str):
        if callable(getattr(engine, "create", None)):
            return engine
    elif engine == EMBEDDED:
        return EmbeddedOptions()
    elif engine == "vllm":
        return VllmOptions()
    elif engine.startswith(("http://", "https://")):
        return VllmOptions(address=engine)
    raise ConfigurationError(
        f"engine is {engine!r}; it must be '{EMBEDDED}', 'vllm', the address of a running vLLM such as "
        "'http://127.0.0.1:8000', VllmOptions(…), or another object with the method `create` of EngineChoice."
    )
