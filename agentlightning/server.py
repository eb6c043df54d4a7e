"""Public path of the legacy server, which lives in `agentlightning.legacy`; new code uses `LightningStoreServer`.

Importing is silent: the server says that it is deprecated when it is constructed.
"""

from agentlightning.legacy.data_store import ServerDataStore
from agentlightning.legacy.server import AgentLightningServer

__all__ = ["AgentLightningServer", "ServerDataStore"]
