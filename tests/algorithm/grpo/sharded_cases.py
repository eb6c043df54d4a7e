"""Run by torchrun in two processes: the same updates by both together and by one alone, and how far they are apart.

    python -m torch.distributed.run --nproc-per-node=2 -m tests.algorithm.grpo.sharded_cases FOLDER RESULTS

FOLDER holds a model "plain" and one whose embeddings are "tied"; RESULTS is written as JSON, by case.
"""

import json
import random
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from agentlightning.algorithm.grpo.learner import Learner
from agentlightning.algorithm.grpo.samples import Sample
from agentlightning.algorithm.grpo.settings import LearnerSettings
from agentlightning.algorithm.grpo.sharded import ShardedLearner
from agentlightning.algorithm.grpo.sharded_rank import RankLearner, map_weights, parameters_of, split
from agentlightning.engine.checkpoint import load
from agentlightning.engine.hf import HfModel
from agentlightning.engine.model import LoraOptions
from tests.engine.small_llama import WORDS, save_small_llama, word_tokenizer

VOCABULARY = len(WORDS) + 5
LORA = LoraOptions(rank=3, targets=("o_proj", "down_proj", "lm_head"))


def sample(number: int, **changes: Any) -> Sample:
    """Two turns of a length of its own: short for low numbers, up to some 30 tokens for high ones."""
    source = random.Random(number)
    mask = [0] * source.randint(1, 4) + [1] * source.randint(1, 2 + 3 * number) + [0] * source.randint(0, 3) + [1]
    found = Sample(
        token_ids=[source.randrange(VOCABULARY) for _ in mask],
        loss_mask=mask,
        logprobs=[source.uniform(-3, -1.5) if chosen else None for chosen in mask],
        advantage=source.choice([-1.0, 0.5, 1.0]),
        version=0,
        group="g",
        rollout_id=f"ro-{number}",
        weight=source.choice([0.5, 1.0]),
        temperature=source.choice([1.0, 0.7]),
    )
    return replace(found, **changes)


@dataclass(frozen=True)
class Case:
    settings: dict[str, Any] = field(default_factory=dict)
    lora: LoraOptions | None = None
    dtype: str = "float64"
    model: str = "plain"
    rows: int = 7
    knows_logprobs: bool = True


CASES = {
    **{f"{aggregate} of all weights": Case({"aggregate": aggregate}) for aggregate in ("token_mean", "sequence_mean")},
    "constant of all weights": Case({"aggregate": "constant", "constant_length": 20}),
    **{f"{aggregate} of adapters": Case({"aggregate": aggregate}, LORA) for aggregate in ("token_mean", "constant")},
    "sequence_mean of adapters": Case({"aggregate": "sequence_mean"}, LORA),
    "reference": Case({"kl_coefficient": 0.1}),
    "reference of adapters": Case({"kl_coefficient": 0.1, "kl_estimator": "k1"}, LORA),
    "importance": Case({"importance_cap": 2.0, "epochs": 2}),
    "unknown log-probabilities": Case(knows_logprobs=False),
    "entropy": Case({"entropy_coefficient": 0.1, "level": "sequence"}),
    "no clip": Case({"max_grad_norm": None, "weight_decay": 0.1, "warmup_steps": 3}),
    "tied embeddings": Case(model="tied"),
    "one row": Case({"kl_coefficient": 0.1}, rows=1),
    "computed again": Case({"gradient_checkpointing": True}),
    "adapters computed again": Case({"gradient_checkpointing": True}, LORA),
    "end to end": Case({"packing": True, "kl_coefficient": 0.1}),
    "32 bits": Case({"learning_rate": 1e-4}, dtype="float32"),
}


def made(folder: Path, case: Case) -> HfModel:
    torch.manual_seed(0)  # of the adapters
    model, _ = load(str(folder / case.model), device="cpu", dtype=case.dtype, lora=case.lora)
    assert isinstance(model, HfModel)
    return model


def result(folder: Path, case: Case, weights_file: Path) -> dict[str, Any]:
    """How far the weights of both are apart after three updates, how far they moved, and the figures of the last."""
    settings = LearnerSettings(**{"learning_rate": 1e-2, "max_batch_tokens": 40, **case.settings})
    alone, together = made(folder, case), made(folder, case)
    before = {name: weight.detach().clone() for name, weight in parameters_of(alone).items()}
    if dist.get_rank() == 0:
        for name, shared in map_weights(weights_file, before).items():
            shared.copy_(before[name])
    dist.barrier()
    root = split(together, init_device_mesh("cpu", (2,)), in_16_bits=False)
    learners = Learner(alone, settings), RankLearner(together, settings, root=root, weights_file=weights_file)
    for number in range(3):
        batch = [sample(number + row) for row in range(case.rows)]
        if not case.knows_logprobs:
            batch = [replace(one, logprobs=[None] * len(one.token_ids)) for one in batch]
        figures = [learner.update(batch) for learner in learners]
    dist.barrier()
    found = map_weights(weights_file, before)
    own = {name: weight.detach() for name, weight in parameters_of(alone).items()}
    return {
        "difference": max(float((own[name] - found[name]).abs().max()) for name in own),
        "moved": max(float((own[name] - before[name]).abs().max()) for name in own),
        "figures": figures,
    }


def on_devices(folder: Path, device: str, processes: int) -> dict[str, float]:
    """A `ShardedLearner` beside a learner on one device, after three updates; as many GPUs as processes are needed."""
    source = str(save_small_llama(folder / "llama", word_tokenizer()))
    settings = LearnerSettings(learning_rate=1e-4, kl_coefficient=0.1, max_batch_tokens=40, processes=processes)
    alone, together = (load(source, device=place, dtype="float32")[0] for place in (device, "cpu"))
    before = alone.state()
    learner = Learner(alone, settings)
    sharded = ShardedLearner(together, settings, source=source, device=device, lora=None)
    sharded.start()
    try:
        for number in range(3):
            for one in (learner, sharded):
                one.update([sample(number + row) for row in range(5)])
        own, found, moments = alone.state(), together.state(), sharded.state()["optimiser"]["mean"]
    finally:
        sharded.stop()
    return {
        "processes": float(processes),
        "difference": max(float((own[name] - found[name]).abs().max()) for name in own),
        "moved": max(float((own[name] - before[name]).abs().max()) for name in own),
        "moments": float(len(moments)),
    }


def main() -> None:
    folder, results = Path(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {
        name: result(folder, case, folder / f"{number}.weights") for number, (name, case) in enumerate(CASES.items())
    }
    if dist.get_rank() == 0:
        results.write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
