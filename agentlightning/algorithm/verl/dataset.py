"""Tasks as verl's data set: verl shuffles and batches them, and hands each to the agent loop as it is."""

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch.utils.data import Dataset

from agentlightning.algorithm.verl.launch import read_rows
from agentlightning.errors import ConfigurationError
from agentlightning.utils.json_values import JsonObject

TASK: Final = "task"
"""Column of verl's batch in which a task travels, as {"input": task}: verl's columns hold no bare None."""


class AgentDataset(Dataset[JsonObject]):
    """The rows of files, made by verl with the arguments of its own data sets.

    A row may be anything. Of one that is a mapping, `data_source` and `reward_model` go to verl's metrics.
    """

    def __init__(
        self,
        data_files: str | Sequence[str],
        tokenizer: Any = None,
        config: Any = None,
        processor: Any = None,
        max_samples: int = -1,
    ) -> None:
        rows = read_rows([data_files] if isinstance(data_files, str) else list(data_files))
        self.rows: Sequence[object] = rows if max_samples < 0 else rows[:max_samples]
        if not self.rows:
            raise ConfigurationError(f"The data files {data_files!r} have no rows; verl needs at least one.")

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> JsonObject:
        row = self.rows[index]
        known = row if isinstance(row, dict) else {}
        reward_model = known.get("reward_model")
        return {
            TASK: {"input": row},
            "raw_prompt": [],  # verl counts the rows of a batch by it
            "index": index,
            "data_source": str(known.get("data_source") or "agent"),
            "reward_model": reward_model if isinstance(reward_model, dict) else {},
            "dummy_tensor": torch.zeros(1, dtype=torch.uint8),  # a batch of verl's has one tensor at least
        }


class LoadedDataset(AgentDataset):
    """The rows of a data set that is in memory."""

    def __init__(self, dataset: Sequence[Any]) -> None:
        self.rows = dataset
