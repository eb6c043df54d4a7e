"""Starting a training with verl, or saying what it lacks before anything is started."""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any, Final, Protocol

from agentlightning.adapter import TraceToTrajectory, TraceToTripletBase
from agentlightning.adapter.base import TraceAdapter
from agentlightning.algorithm.verl.config import Configuration
from agentlightning.errors import ConfigurationError
from agentlightning.store.base import LightningStore
from agentlightning.types import Dataset
from agentlightning.utils.installation import install_command

if TYPE_CHECKING:
    from agentlightning.llm_proxy import LLMProxy

__all__ = ["TrainerClass", "VerlTrainer", "missing_for_verl", "run_ppo"]

_PACKAGES: Final = ("verl", "ray", "vllm")


class VerlTrainer(Protocol):
    """A loop around verl's trainer."""

    def fit(self) -> None:
        """Train until the end."""
        ...


class TrainerClass(Protocol):
    """What makes a `VerlTrainer`."""

    def __call__(
        self,
        *,
        config: Configuration,
        train_dataset: Dataset[Any] | None,
        val_dataset: Dataset[Any] | None,
        store: LightningStore | None,
        llm_proxy: "LLMProxy | None",
        adapter: TraceAdapter[Any] | None,
        daemon_cls: type | None,
    ) -> VerlTrainer: ...


def run_ppo(
    config: Configuration,
    train_dataset: Dataset[Any] | None,
    val_dataset: Dataset[Any] | None,
    store: LightningStore | None,
    llm_proxy: "LLMProxy | None",
    adapter: TraceAdapter[Any] | None,
    *,
    trainer_cls: TrainerClass | None = None,
    daemon_cls: type | None = None,
) -> None:
    """Train with verl and return when it is done.

    Raises:
        ConfigurationError: Packages, a GPU or a trainer are missing, or the adapter makes something else than triplets
            or trajectories. Nothing was started.
    """
    if store is not None and not isinstance(adapter, (TraceToTripletBase, TraceToTrajectory)):
        raise ConfigurationError(
            f"VERL learns from triplets or trajectories, but the adapter is a {type(adapter).__name__}; "
            "give the Trainer a TracerTraceToTriplet, a LlmProxyTraceToTriplet or a TraceToTrajectory."
        )
    if trainer_cls is None:
        raise ConfigurationError(_refusal())
    trainer = trainer_cls(
        config=config,
        train_dataset=train_dataset,
        val_dataset=val_dataset,
        store=store,
        llm_proxy=llm_proxy,
        adapter=adapter,
        daemon_cls=daemon_cls,
    )
    trainer.fit()


def missing_for_verl() -> list[str]:
    """What this machine lacks to run verl, in words; nothing is imported but torch, to ask for a GPU."""
    missing = [f"the package {name}" for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if importlib.util.find_spec("torch") is None:
        return [*missing, "the package torch"]
    return missing if importlib.import_module("torch").cuda.is_available() else [*missing, "a GPU that torch can use"]


def _refusal() -> str:
    missing = missing_for_verl()
    if missing:
        *first, last = missing
        listed = f"{', '.join(first)} and {last}" if first else last
        return (
            f"VERL trains with verl on GPUs, and this machine lacks {listed}; run "
            f"`{install_command('verl')}` on a machine with NVIDIA GPUs. Nothing was started. GRPO trains without verl."
        )
    return (
        "VERL composes verl's configuration and makes its batches, but comes without a loop around verl's own trainer; "
        "give one as trainer_cls, or use GRPO, which trains without verl. Nothing was started."
    )
