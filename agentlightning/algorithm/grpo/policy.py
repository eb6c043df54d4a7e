"""A policy: a model that is trained here, and sampled from in a process of its own."""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentlightning.algorithm.grpo.samples import Sample
from agentlightning.algorithm.grpo.settings import LearnerSettings
from agentlightning.llm_proxy import ModelConfig

if TYPE_CHECKING:
    from agentlightning.algorithm.grpo.learner import Learner
    from agentlightning.engine.codec import ChatCodec
    from agentlightning.engine.model import CausalModel
    from agentlightning.engine.serving import EngineServer

__all__ = ["Policy"]

logger = logging.getLogger(__name__)


class Policy:
    """One model under training. `version` counts its updates; the engine is told after each."""

    def __init__(
        self,
        name: str,
        source: str,
        settings: LearnerSettings,
        *,
        device: str = "auto",
        max_sequences: int = 64,
        lora: Any = None,
    ) -> None:
        self.name = name
        """What agents call the model."""
        self.source = source
        self.settings = settings
        self.version = 0
        self._device = device
        self._max_sequences = max_sequences
        self._lora = lora
        self._learner: Learner | None = None
        self._model: CausalModel | None = None
        self._codec: ChatCodec | None = None
        self._engine: EngineServer | None = None

    @property
    def learner(self) -> "Learner":
        assert self._learner is not None
        return self._learner

    @property
    def model(self) -> "CausalModel":
        assert self._model is not None
        return self._model

    @property
    def codec(self) -> "ChatCodec":
        assert self._codec is not None
        return self._codec

    async def start(self) -> None:
        """Load the model, and start its engine beside; both take seconds."""
        await asyncio.gather(asyncio.to_thread(self._start_engine), asyncio.to_thread(self._load))

    def _start_engine(self) -> None:
        from agentlightning.engine.serving import EngineServer

        engine = EngineServer(self.source, max_sequences=self._max_sequences, device=self._device, name=self.name)
        engine.start()
        self._engine = engine

    def _load(self) -> None:
        from agentlightning.algorithm.grpo.learner import Learner
        from agentlightning.engine.loading import load

        self._model, self._codec = load(self.source, device=self._device, lora=self._lora)
        self._learner = Learner(self._model, self.settings)

    async def stop(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            await asyncio.to_thread(engine.stop)

    def model_config(self) -> ModelConfig:
        """The entry of the proxy's list of models."""
        assert self._engine is not None
        entry = self._engine.model_config()
        return ModelConfig(model_name=entry["model_name"], litellm_params=entry["litellm_params"])

    async def update(self, samples: Sequence[Sample]) -> dict[str, float]:
        """One step of learning, off the event loop, and the engine gets what was learned."""
        began = time.perf_counter()
        metrics = await asyncio.to_thread(self.learner.update, samples)
        learned = time.perf_counter()
        self.version += 1
        await self.publish()
        metrics["seconds/learning"] = learned - began
        metrics["seconds/publishing"] = time.perf_counter() - learned
        return metrics

    async def publish(self) -> None:
        """Give the engine the weights of this moment."""
        assert self._engine is not None
        await asyncio.to_thread(self._engine.publish, self.version, self.model.state())

    def export(self, folder: Path) -> None:
        """Leave the model in a folder of its own, as `agl serve` and `engine.loading` take it."""
        from agentlightning.engine.checkpoint import save_model

        save_model(self.model, self.codec, folder, {"version": self.version, "source": self.source})

    async def restore(self, model_state: Mapping[str, Any], learner_state: Mapping[str, Any], version: int) -> None:
        """Go on from a checkpoint."""
        self.model.load_state(model_state)
        self.learner.load_state(learner_state)
        self.version = version
        await self.publish()
