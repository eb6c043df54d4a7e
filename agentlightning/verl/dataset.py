"""Public path of verl's data sets of tasks."""

from agentlightning.algorithm.verl.dataset import AgentDataset, LoadedDataset

__all__ = ["AgentDataset", "LoadedDataset"]
