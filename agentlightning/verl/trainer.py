"""Public path of a class that is gone."""

from typing import Any

from agentlightning.errors import ConfigurationError


class AgentLightningTrainer:
    """Gone; verl's own trainer runs in its place."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise ConfigurationError(
            "AgentLightningTrainer is gone: verl's own PPO trainer runs, with StoreAgentLoopManager as its agent loop; "
            "train with agl.Trainer(algorithm=agl.VERL(config)).fit(agent, train, val)."
        )
