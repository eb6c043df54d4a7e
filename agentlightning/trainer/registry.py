"""Short names for the parts a trainer can build, and the import paths they stand for."""

from collections.abc import Mapping
from types import MappingProxyType

__all__ = ["ExecutionStrategyRegistry"]

ExecutionStrategyRegistry: Mapping[str, str] = MappingProxyType(
    {
        "shm": "agentlightning.execution.shared_memory.SharedMemoryExecutionStrategy",
        "cs": "agentlightning.execution.client_server.ClientServerExecutionStrategy",
        "ray": "agentlightning.execution.ray_cluster.RayExecutionStrategy",
    }
)
"""Execution strategies: `shm` runs everything in threads of one process, `cs` puts runners into processes, and `ray`
onto the nodes of a Ray cluster."""
