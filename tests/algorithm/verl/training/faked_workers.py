"""verl's PPO trainer on a CPU: its loop, TransferQueue and replay buffer are real, its workers and servers are not.

verl makes the class that `trainer.checkpoint_callback_class` names before it sets the trainer up, in the process of the
trainer: there the set-up is replaced. What the workers are asked is written to a file, for the test to read.
"""

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transfer_queue as tq
from tensordict import TensorDict
from transformers import AutoTokenizer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.workers.rollout.replica import TokenOutput

PATH = f"{__name__}.FakedWorkers"
LOGPROB = -1.5


class FakedWorkers:
    """A checkpoint callback, so that verl makes it in time."""

    def __init__(self, config: Any) -> None:
        PPOTrainerSync._setup = _setup

    def on_save(self, **given: Any) -> None:
        pass


class FakedModel:
    """Answers with a word at random; sampled tokens, log-probabilities and versions are as verl's servers give them."""

    def __init__(self, tokenizer: Any, notes: Path) -> None:
        self.version = 0
        self.is_asleep = False
        self._tokenizer = tokenizer
        self._notes = notes
        self._random = random.Random(7)

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]) -> TokenOutput:
        _note(self._notes, call={"id": request_id, "prompt": len(prompt_ids), **sampling_params}, asleep=self.is_asleep)
        sampling_params.clear()  # as verl's servers do, which take entries out of it
        word = self._random.choice(["red", "blue"])
        token_ids = [*self._tokenizer.encode(word, add_special_tokens=False), self._tokenizer.eos_token_id]
        steps = dict.fromkeys(("global_steps", "min_global_steps", "max_global_steps"), self.version)
        log_probs = [LOGPROB] * len(token_ids)
        return TokenOutput(token_ids=token_ids, log_probs=log_probs, stop_reason="completed", extra_fields=steps)


class FakedActor:
    """The worker group of the actor."""

    def __init__(self, notes: Path) -> None:
        self._dispatch_info = {"actor": [0]}
        self._notes = notes

    def compute_log_prob(self, batch: Any) -> Any:
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["input_ids"])
        lengths = data["input_ids"].offsets().diff().tolist()
        rows = [torch.full((length,), LOGPROB) for length in lengths]
        nested = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        fields = TensorDict({"log_probs": nested, "entropy": nested.clone()}, batch_size=len(batch))
        return tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)

    def update_actor(self, batch: Any) -> dict[str, Any]:
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id)
        rows = []
        for number, (key, tag) in enumerate(zip(batch.keys, batch.tags, strict=True)):
            if tag.get("is_padding"):
                continue
            row = {name: data[name][number] for name in data.keys()}  # noqa: SIM118 # a TensorDict iterates over rows
            rows.append({"key": key, "tag": tag, "fields": {name: _plain(value) for name, value in row.items()}})
        _note(self._notes, update=rows)
        return {"metrics": {"mfu": [0.0], "pg_loss": [0.0], "grad_norm": [1.0]}}


def _setup(self: Any) -> None:
    """What `PPOTrainer._setup` makes, without GPUs."""
    notes = Path(self.config.faked_notes)
    self.tokenizer = AutoTokenizer.from_pretrained(self.config.actor_rollout_ref.model.path)
    self.tokenizer.pad_token, self.processor = self.tokenizer.eos_token, None
    self._init_dataloader()
    self._init_dump_executor()
    model = FakedModel(self.tokenizer, notes)
    self.actor_rollout_wg = FakedActor(notes)
    self.resource_pool_manager = SimpleNamespace(get_n_gpus=lambda: 1)
    self.reward_loop_manager = SimpleNamespace(reward_loop_worker_handles=[])
    self.llm_server_manager = SimpleNamespace(get_client=lambda: model)
    self.teacher_model_manager = self.distillation_config = None

    def update_weights(version: int = 0) -> None:
        model.version, model.is_asleep = version, False

    def sleep_replicas() -> None:
        model.is_asleep = True

    self.checkpoint_manager = SimpleNamespace(update_weights=update_weights, sleep_replicas=sleep_replicas)
    self.replay_buffer.poll_interval = 0.1
    self._load_checkpoint()


def _plain(value: Any) -> Any:
    value = getattr(value, "data", value) if not isinstance(value, torch.Tensor) else value
    return value.tolist() if isinstance(value, torch.Tensor) else value


def _note(notes: Path, **what: Any) -> None:
    with notes.open("a") as file:
        file.write(json.dumps(what, default=str) + "\n")
