"""Another path of the strategy that runs roles in processes."""

from agentlightning.execution.client_server import ClientServerExecutionStrategy as InterProcessExecutionStrategy

__all__ = ["InterProcessExecutionStrategy"]
