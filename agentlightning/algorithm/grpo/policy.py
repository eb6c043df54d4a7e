"""Policies: models that are trained here, sampled from in engines of their own, and reached through one proxy.

The proxy stamps every call with the version of its entry, so the entry is replaced after each publication. A call that
began before it keeps the older stamp, also where its last tokens come from newer weights: at worst it looks older than
it is, and `max_staleness` holds.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from agentlightning.algorithm.grpo.samples import Batch
from agentlightning.algorithm.grpo.settings import LearnerSettings
from agentlightning.engine.base import Engine, EngineChoice, EngineRequest, SleepingEngine
from agentlightning.engine.embedded import EngineServer, check_model
from agentlightning.engine.model import LoraOptions
from agentlightning.errors import ConfigurationError
from agentlightning.llm_proxy import LLMProxy, ModelConfig
from agentlightning.store.base import LightningStore
from agentlightning.types import NamedResources
from agentlightning.types.records import CURRENT_RUN

if TYPE_CHECKING:
    from torch import Tensor

    from agentlightning.algorithm.grpo.learner import Learner
    from agentlightning.algorithm.grpo.sharded import ShardedLearner
    from agentlightning.engine.codec import ChatCodec
    from agentlightning.engine.model import CausalModel

ADAPTERS: Final = "adapters"
"""Where a checkpoint keeps trained weights that are merged into others in the model's state."""


class Policy:
    """One model under training. `version` counts its updates; the engine is told after each."""

    def __init__(
        self,
        name: str,
        source: str,
        settings: LearnerSettings,
        *,
        engine: EngineChoice | None = None,
        device: str = "auto",
        max_sequences: int = 64,
        lora: LoraOptions | None = None,
    ) -> None:
        self.name = name
        """What agents call the model."""
        self.source = source
        self.settings = settings
        self.version = 0
        self._choice = engine
        """None is our own engine."""
        self._device = device
        self._max_sequences = max_sequences
        self._lora = lora
        self._learner: Learner | ShardedLearner | None = None
        self._codec: ChatCodec | None = None
        self._engine: Engine | None = None
        self._running: list[Engine | ShardedLearner] = []

    @property
    def learner(self) -> "Learner | ShardedLearner":
        assert self._learner is not None
        return self._learner

    @property
    def model(self) -> "CausalModel":
        return self.learner.model

    @property
    def codec(self) -> "ChatCodec":
        assert self._codec is not None
        return self._codec

    @property
    def engine(self) -> Engine:
        assert self._engine is not None
        return self._engine

    @property
    def is_embedded(self) -> bool:
        """Whether the engine is our own, which loads this model itself; any other may hold other weights of it."""
        return self._choice is None

    async def start(self) -> None:
        """Load the model, and start its engine: at once if that is ours, which takes seconds, and else before it."""
        if self.is_embedded:
            check_model(self.source)
            await undisturbed(asyncio.to_thread(self._start_engine), asyncio.to_thread(self.load))
        else:
            # vLLM measures the free memory of the GPU while it starts; what is loaded meanwhile counts as its own.
            await self.start_engine()
            await undisturbed(asyncio.to_thread(self.load))
        await undisturbed(asyncio.to_thread(self.plan_memory))

    async def start_engine(self) -> None:
        """Start the engine alone: the model answers, and cannot learn."""
        if self.is_embedded:
            check_model(self.source)
        await undisturbed(asyncio.to_thread(self._start_engine))

    def _start_engine(self) -> None:
        most, device = self._max_sequences, self._device
        engine: Engine
        if self._choice is None:
            engine = EngineServer(self.source, name=self.name, device=device, max_sequences=most)
        else:
            request = EngineRequest(self.source, self.name, device=device, max_sequences=most, lora=self._lora)
            engine = self._choice.create(request)
        engine.start()
        self._engine = engine
        self._running.append(engine)

    def plan_memory(self) -> None:
        """Have a learner choose by the memory that is free beside the engine; several processes have done so."""
        from agentlightning.algorithm.grpo.learner import Learner

        # An engine that sleeps has memory now that will be free for learning: the first update asks then.
        if not getattr(self._choice, "sleep", False) and isinstance(self._learner, Learner):
            self._learner.plan_memory()

    def load(self) -> None:
        """Load the model, and make its learner; several processes train a model in the computer's memory."""
        import torch

        from agentlightning.algorithm.grpo.learner import Learner
        from agentlightning.engine.checkpoint import load

        device = self._device
        # Small steps are lost in weights of 16 bits; adapters have 32 in any case.
        dtype = "float32" if self._lora is None else "auto"
        self.version = 0
        if self.settings.processes == 1:
            model, self._codec = load(self.source, device=device, dtype=dtype, lora=self._lora)
            self._learner = Learner(model, self.settings)
            return
        from agentlightning.algorithm.grpo.sharded import ShardedLearner  # it loads much of torch.distributed

        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if dtype == "auto":
            dtype = "bfloat16" if device == "cuda" else "float32"
        model, self._codec = load(self.source, device="cpu", dtype=dtype, lora=self._lora)
        sharded = ShardedLearner(model, self.settings, source=self.source, device=device, lora=self._lora)
        sharded.start()
        self._learner = sharded
        self._running.append(sharded)

    async def stop(self) -> None:
        running, self._running, self._engine = self._running, [], None
        await undisturbed(*(asyncio.to_thread(one.stop) for one in running))

    def check(self) -> None:
        """EngineError with the engine's last words if its process has ended."""
        if not self.engine.is_running():
            self.engine.status()

    def model_config(self, overrides: Mapping[str, Mapping[str, Any]]) -> ModelConfig:
        """The entry of the proxy's list of models, with the overrides of `ServedPolicies`."""
        entry = self.engine.model_config()
        own = {resources_id: dict(one) for resources_id, one in overrides.items()}
        info = {**entry.get("model_info", {}), "overrides": own}
        return ModelConfig(model_name=entry["model_name"], litellm_params=entry["litellm_params"], model_info=info)

    async def update(self, batch: Batch) -> dict[str, float]:
        """One step of learning, off the event loop; the engine does not know of it before `publish`."""
        began = time.perf_counter()
        metrics = await asyncio.to_thread(self.learner.update, batch.samples, batch.sampled)
        self.version += 1
        metrics["seconds/learning"] = time.perf_counter() - began
        return metrics

    async def publish(self) -> dict[str, float]:
        """Give the engine the weights of this moment."""
        from agentlightning.engine.weights import PublishedWeights

        began = time.perf_counter()
        seed, copy = self.settings.seed or 0, self.learner.rounded_copy
        weights = PublishedWeights(self.model, seed=seed, version=self.version, copy=copy)
        await asyncio.to_thread(self.engine.publish, self.version, weights)
        return {"seconds/publishing": time.perf_counter() - began}

    def sleep(self) -> None:
        """Have the engine give its GPU memory to the learner, where it is to."""
        if isinstance(self.engine, SleepingEngine):
            self.engine.sleep()

    def wake(self) -> None:
        """Give it its memory back, with what torch only keeps for later."""
        if isinstance(self.engine, SleepingEngine):
            import torch

            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            self.engine.wake()

    def export(self, folder: Path) -> None:
        """Leave the model in a folder of its own, as `agl serve` and `engine.checkpoint` take it."""
        from agentlightning.engine.checkpoint import save_model

        save_model(self.model, self.codec, folder, {"version": self.version, "source": self.source})

    def learner_state(self) -> dict[str, Any]:
        """What a checkpoint keeps beside the model's state: the learner's, and the adapters where there are some."""
        from agentlightning.algorithm.grpo.checkpoints import adapters_of

        adapters = adapters_of(self.model)
        return {**self.learner.state(), **({ADAPTERS: adapters} if adapters else {})}

    def restore(self, model_state: "Mapping[str, Tensor]", learner_state: Mapping[str, Any], version: int) -> None:
        """Go on from a checkpoint; the engine does not know of it before `publish`."""
        adapters = learner_state.get(ADAPTERS)
        if adapters is None:
            self.model.load_state(model_state)
        else:
            for name, weight in self.model.trainable().items():
                weight.data.copy_(adapters[name])
        self.learner.load_state(learner_state)
        self.version = version


class ServedPolicies:
    """What `serve` begins ends with its stack."""

    def __init__(self, policies: Sequence[Policy], overrides: Mapping[str, dict[str, Any]]) -> None:
        """Prepare. `overrides` are sampling parameters, by id of the resources, used whatever agents ask for."""
        self._policies = policies
        self._overrides = overrides
        self._proxy: LLMProxy | None = None
        self._others: list[Any] = []
        """Entries of the proxy that are not ours."""
        self._ours: list[Any] = []

    @property
    def proxy(self) -> LLMProxy:
        assert self._proxy is not None
        return self._proxy

    async def serve(
        self, stack: AsyncExitStack, given: LLMProxy | None, store: LightningStore, *, is_training: bool
    ) -> None:
        """Start the engines, and have a proxy serve them beside its other models.

        Args:
            stack: Undoes all of it.
            given: The trainer's proxy; without one, we have our own.
            is_training: Load what learns as well.
        """
        for policy in self._policies:
            stack.push_async_callback(policy.stop)
        starts = [policy.start if is_training else policy.start_engine for policy in self._policies]
        if all(policy.is_embedded for policy in self._policies):
            await undisturbed(*(start() for start in starts))
        else:
            for start in starts:  # one after the other: each measures how much memory of the GPU is left
                await start()
        self._proxy = proxy = LLMProxy(store=store) if given is None else given
        before = list(proxy.model_list)
        stack.callback(proxy.update_model_list, before)
        names = {policy.name for policy in self._policies}
        self._others = [entry for entry in before if entry["model_name"] not in names]
        await self._announce()
        if not proxy.is_running():
            proxy.start()
            stack.push_async_callback(proxy.stop)

    def resources(
        self, initial: NamedResources | None, temperature: float | None, *, is_lasting: bool = False
    ) -> NamedResources:
        """What agents run with: the models, and whatever the user put beside them.

        Args:
            temperature: None leaves it to agents.
            is_lasting: The models are served beyond the end of the run.
        """
        resources: NamedResources = dict(initial or {})
        sampling = {} if temperature is None else {"temperature": temperature}
        for policy in self._policies:
            # The resource under which agents find a model that is trained alone.
            name = "main_llm" if len(self._policies) == 1 else policy.name
            served = self.proxy.as_resource(model=policy.name, sampling_parameters=sampling)
            # Also behind a proxy that outlives the run, the model ends with it.
            resources[name] = served.model_copy(update={"run_id": None if is_lasting else CURRENT_RUN.get()})
        return resources

    async def publish_first(self, *, is_restored: bool) -> None:
        """Give engines the weights that training begins with, unless they have loaded the same themselves."""
        for policy in self._policies:
            if is_restored or not policy.is_embedded:
                await undisturbed(self.publish(policy))

    async def publish(self, policy: Policy) -> dict[str, float]:
        """Give a policy's engine its new weights, and have the proxy stamp calls with their version."""
        figures = await policy.publish()
        await self._announce()
        return figures

    @asynccontextmanager
    async def learning(self) -> AsyncIterator[None]:
        """A block in which no call comes, so that engines that share a GPU with the learner may sleep."""
        try:
            await undisturbed(*(asyncio.to_thread(policy.sleep) for policy in self._policies))
            yield
        finally:
            await undisturbed(*(asyncio.to_thread(policy.wake) for policy in self._policies))

    async def _announce(self) -> None:
        ours = [policy.model_config(self._overrides) for policy in self._policies]
        if ours != self._ours:
            await asyncio.to_thread(self.proxy.update_model_list, [*self._others, *ours])
            self._ours = ours


def sources_by_name(model: str | Mapping[str, str]) -> dict[str, str]:
    """Models by the names under which agents call them."""
    named = {"tiny" if model == "tiny" else "policy": model} if isinstance(model, str) else dict(model)
    if not named:
        raise ConfigurationError("There is no model to train; name at least one.")
    for name in named:
        if not name or name in (".", "..") or "/" in name or "\\" in name:
            raise ConfigurationError(
                f"A policy cannot be called '{name}': its checkpoints are in a folder of its name."
            )
    return named


def training_sampling(temperature: float) -> dict[str, Any]:
    """How answers are sampled to learn from them, whatever agents ask for.

    A seed would make the rollouts of a task the same, and log-probabilities are those of the whole distribution.
    """
    return {"temperature": temperature, "top_p": None, "top_k": None, "seed": None}


async def undisturbed(*work: Coroutine[Any, Any, Any]) -> None:
    """Do several things to their end: neither a failure of one nor a cancellation leaves another running."""
    together = asyncio.gather(*work, return_exceptions=True)
    try:
        results = await asyncio.shield(together)
    except asyncio.CancelledError:
        await together
        raise
    for result in results:
        if isinstance(result, BaseException):
            raise result
