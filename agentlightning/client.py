"""Public path of the legacy client, which lives in `agentlightning.legacy`; new code uses `LightningStoreClient`.

Importing is silent: each class says that it is deprecated when it is constructed.
"""

from agentlightning.legacy.client import AgentLightningClient
from agentlightning.legacy.dev_task_loader import DevTaskLoader
from agentlightning.legacy.results import rollout_from_result

__all__ = ["AgentLightningClient", "DevTaskLoader", "rollout_from_result"]
