"""VERL: an algorithm that trains with verl's trainer. Making one and composing its configuration needs nothing else."""

import pkgutil
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from agentlightning.algorithm.base import Algorithm
from agentlightning.algorithm.verl.config import Configuration, compose
from agentlightning.algorithm.verl.launching import TrainerClass, run_ppo
from agentlightning.types import Dataset

if TYPE_CHECKING:
    from agentlightning.client import AgentLightningClient

__all__ = ["VERL"]


class VERL(Algorithm):
    """Trains a model with verl.

    Args:
        config: verl's settings, nested as verl has them; they win over ours and over verl's defaults.
        trainer_cls: The trainer, made with what `run_ppo` names; it brings verl itself.
        daemon_cls: Handed to the trainer: what collects its rollouts.
    """

    def __init__(
        self,
        config: Mapping[str, Any] | None = None,
        trainer_cls: TrainerClass | None = None,
        daemon_cls: type | None = None,
    ) -> None:
        self.config: Configuration = compose(config)
        self.trainer_cls = trainer_cls
        self.daemon_cls = daemon_cls

    def run(self, train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None) -> None:
        """Train; ConfigurationError, and nothing started, where something that it needs is missing.

        Without a store it works with clients of the v0.1 protocol, and has no proxy and no adapter.
        """
        is_v0 = self._store is None
        run_ppo(
            self.config,
            train_dataset,
            val_dataset,
            store=self._store,
            llm_proxy=None if is_v0 else self.get_llm_proxy(),
            adapter=None if is_v0 else self.get_adapter(),
            trainer_cls=self.trainer_cls,
            daemon_cls=self.daemon_cls,
        )

    def get_client(self) -> "AgentLightningClient":
        """A client of the v0.1 protocol, at the port of the configuration. Deprecated."""
        # The old house stands above this room, so its door is opened by name and only here.
        client: type[AgentLightningClient] = pkgutil.resolve_name("agentlightning.client:AgentLightningClient")
        return client(f"http://localhost:{self.config['agentlightning']['port']}")
