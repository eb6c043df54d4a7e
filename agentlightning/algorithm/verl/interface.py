"""VERL: an algorithm that trains with verl's trainer. Making one and composing its configuration needs nothing else."""

import pkgutil
from typing import TYPE_CHECKING

from agentlightning.algorithm.base import Algorithm, Tasks
from agentlightning.algorithm.verl.launch import Configuration, TaskRunnerHere, compose, run_ppo
from agentlightning.errors import ConfigurationError
from agentlightning.utils.json_values import JsonMapping

if TYPE_CHECKING:
    from agentlightning.client import AgentLightningClient

__all__ = ["VERL"]


class VERL(Algorithm):
    """Trains a model with verl: its trainer, its workers and its servers, and our store, runners and proxy.

    Args:
        config: verl's settings, nested as verl has them; they win over ours and over verl's defaults.
        trainer_cls: Refused, since verl's own trainer runs.
        daemon_cls: Refused.
    """

    def __init__(
        self,
        config: JsonMapping | None = None,
        trainer_cls: type | None = None,
        daemon_cls: type | None = None,
    ) -> None:
        for name, given in (("trainer_cls", trainer_cls), ("daemon_cls", daemon_cls)):
            if given is not None:
                raise ConfigurationError(
                    f"{name} is {getattr(given, '__name__', given)!r}; verl's own trainer runs, and nothing is put in "
                    "its place. Name a subclass of StoreAgentLoopManager in "
                    "actor_rollout_ref.rollout.agent.agent_loop_manager_class to change how rollouts are collected."
                )
        self.config: Configuration = compose(config)
        self.trainer_cls, self.daemon_cls = trainer_cls, daemon_cls
        self._task_runner: TaskRunnerHere | None = None

    def run(self, train_dataset: Tasks | None = None, val_dataset: Tasks | None = None) -> None:
        """Train; ConfigurationError, and nothing started, where something that it needs is missing.

        Without a store it makes one and serves it to runners, at `agentlightning.port`.
        """
        is_alone = self._store is None
        self._task_runner = TaskRunnerHere()
        run_ppo(
            self.config,
            train_dataset,
            val_dataset,
            store=self._store,
            llm_proxy=None if is_alone else self.get_llm_proxy(),
            adapter=None if is_alone else self.get_adapter(),
            initial_resources=self.get_initial_resources(),
            run_id=self.get_run_id(),
            task_runner=self._task_runner,
        )

    def abandon(self) -> None:
        """End verl's training too, when the trainer is stopped."""
        super().abandon()
        if self._task_runner is not None:
            self._task_runner.kill()

    def get_client(self) -> "AgentLightningClient":
        """A client of the legacy protocol, at the port of the configuration. Deprecated."""
        # legacy/ stands above this package, so it is found by name and only here.
        client: type[AgentLightningClient] = pkgutil.resolve_name("agentlightning.client:AgentLightningClient")
        return client(f"http://localhost:{self.config['agentlightning']['port']}")
