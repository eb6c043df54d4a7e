"""Where things run: threads of one process, processes on one or many machines, or a Ray cluster."""

from agentlightning.execution.base import AlgorithmBundle, ExecutionStrategy, RunnerBundle
from agentlightning.execution.client_server import ClientServerExecutionStrategy
from agentlightning.execution.events import ExecutionEvent, MultiprocessingEvent, ThreadingEvent
from agentlightning.execution.ray_cluster import RayExecutionStrategy
from agentlightning.execution.shared_memory import SharedMemoryExecutionStrategy

__all__ = [
    "AlgorithmBundle",
    "ClientServerExecutionStrategy",
    "ExecutionEvent",
    "ExecutionStrategy",
    "MultiprocessingEvent",
    "RayExecutionStrategy",
    "RunnerBundle",
    "SharedMemoryExecutionStrategy",
    "ThreadingEvent",
]
