"""Where things run: threads of one process, or processes on one or many machines."""

from agentlightning.execution.base import AlgorithmBundle, ExecutionStrategy, RunnerBundle
from agentlightning.execution.client_server import ClientServerExecutionStrategy
from agentlightning.execution.events import ExecutionEvent, MultiprocessingEvent, ThreadingEvent
from agentlightning.execution.shared_memory import SharedMemoryExecutionStrategy

__all__ = [
    "AlgorithmBundle",
    "ClientServerExecutionStrategy",
    "ExecutionEvent",
    "ExecutionStrategy",
    "MultiprocessingEvent",
    "RunnerBundle",
    "SharedMemoryExecutionStrategy",
    "ThreadingEvent",
]
