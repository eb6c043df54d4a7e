"""What one step of learning takes: peak memory and seconds of a model with random weights.

    python bench/gpu/memory_of_learning.py 1.5b
    python bench/gpu/memory_of_learning.py 1.5b --optimiser adamw8bit
    python bench/gpu/memory_of_learning.py 7b --lora --tokens 4096
    python bench/gpu/memory_of_learning.py 1.5b --whole-logits --keep-activations      as it was without them
    python bench/gpu/memory_of_learning.py 1.5b --rows 16 --tokens 16384 --padding     against packed rows
    python bench/gpu/memory_of_learning.py miniature --device cpu                      tries the script itself

Weights are made on the device, so nothing is read from a disk. Prints one JSON object and appends it to `--results`.
The loss and the length of the gradient are in it: no saving may change them, up to the rounding of 16 bits.
"""

import argparse
import importlib.metadata
import json
import math
import platform
import random
import resource
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import transformers

from agentlightning.algorithm.grpo import learner as learner_module
from agentlightning.algorithm.grpo.learner import Learner
from agentlightning.algorithm.grpo.packing import Pack, Row
from agentlightning.algorithm.grpo.samples import Sample
from agentlightning.algorithm.grpo.settings import LearnerSettings
from agentlightning.algorithm.grpo.token_logprobs import CHUNK_BYTES, TokenLogprobs, token_logprobs
from agentlightning.engine.hf import HfModel
from agentlightning.engine.model import LoraOptions
from agentlightning.errors import TrainingError

GIGABYTE = 1_000_000_000
SHAPES: dict[str, tuple[int, int, int, int, int, int]] = {
    # hidden, intermediate, layers, heads, heads of keys, vocabulary: Qwen2.5 of 0.5, 1.5 and 7 billion parameters
    "0.5b": (896, 4864, 24, 14, 2, 151936),
    "1.5b": (1536, 8960, 28, 12, 2, 151936),
    "7b": (3584, 18944, 28, 28, 4, 152064),
    "miniature": (32, 64, 2, 4, 2, 512),
}
UPDATES = 3
"""The first makes the moments; the fastest of the others counts."""
CHOSEN_SHARE = 0.5
"""Of a row's tokens: as many are given as are chosen."""


def main() -> int:
    options = arguments()
    is_on_gpu = torch.cuda.is_available() if options.device == "auto" else options.device.startswith("cuda")
    device = torch.device(("cuda" if is_on_gpu else "cpu") if options.device == "auto" else options.device)
    lora = LoraOptions(rank=16) if options.lora else None
    settings = LearnerSettings(
        learning_rate=1e-6,
        minibatches=1,
        max_batch_tokens=options.max_batch_tokens or options.tokens,
        precision=options.precision,
        optimiser=options.optimiser,
        gradient_checkpointing=not options.keep_activations,
        packing=False if options.padding or options.rows == 1 else None if is_on_gpu else True,
    )
    network = network_of(options.shape, device, torch.bfloat16 if options.lora else torch.float32)
    model = HfModel(network, name=options.shape, end_ids=frozenset([0]), lora=lora)
    learner = Learner(model, settings)
    if options.whole_logits:
        learner_module.token_logprobs = whole_logprobs  # type: ignore[assignment]
    samples = samples_of(options.tokens, options.rows, model.vocab_size)
    savings = {
        "checkpointing": learner.is_checkpointed,
        "chunks": not options.whole_logits,
        "packing": learner.is_packed,
        "8-bit moments": options.optimiser == "adamw8bit",
        "16-bit products": options.precision == "bf16",
    }
    line: dict[str, Any] = {
        "figure": "memory",
        "shape": options.shape,
        "trained": "adapters" if options.lora else "all weights",
        "tokens": options.tokens,
        "rows": options.rows,
        "savings": ", ".join(name for name, is_used in savings.items() if is_used) or "none",
        **measured(learner, samples, device),
        **({"packed_difference": packed_difference(learner, samples)} if learner.is_packed else {}),
        **({"logits_chunks": logits_chunks(model)} if is_on_gpu and not options.whole_logits else {}),
        **machine(),
    }
    text = json.dumps(line)
    print(text, flush=True)
    if options.results is not None:
        with options.results.open("a", encoding="utf-8") as file:
            file.write(text + "\n")
    return 1 if "not_run" in line else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--tokens", type=int, default=4096, help="of all rows together (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=1, help="of several lengths (default: %(default)s)")
    parser.add_argument("--max-batch-tokens", type=int, help="default: as many as there are")
    parser.add_argument("--lora", action="store_true", help="train adapters of rank 16 on weights of 16 bits")
    parser.add_argument("--optimiser", default="adamw", choices=["adamw", "adamw8bit"])
    parser.add_argument("--precision", default="bf16", choices=["full", "bf16"])
    parser.add_argument("--keep-activations", action="store_true", help="without gradient checkpointing")
    parser.add_argument("--whole-logits", action="store_true", help="log-probabilities of all tokens at once")
    parser.add_argument("--padding", action="store_true", help="pad rows, where they would lie end to end")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--results", type=Path, help="file to append to")
    return parser.parse_args()


def network_of(shape: str, device: torch.device, dtype: torch.dtype) -> Any:
    hidden, intermediate, layers, heads, key_heads, vocabulary = SHAPES[shape]
    config = transformers.Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        max_position_embeddings=32768,
        tie_word_embeddings=shape != "7b",
    )
    torch.manual_seed(0)
    with device:
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")


def samples_of(tokens: int, rows: int, vocabulary: int) -> list[Sample]:
    """Rows whose lengths differ by a factor of up to three, and have so many tokens together."""
    source = random.Random(0)
    shares = [1 + 2 * number / max(1, rows - 1) for number in range(rows)]
    found = []
    for number, share in enumerate(shares):
        length = max(2, round(tokens * share / sum(shares))) + 1  # after the last, nothing is predicted
        given = max(1, round(length * (1 - CHOSEN_SHARE)))
        mask = [0] * given + [1] * (length - given)
        ids = [source.randrange(vocabulary) for _ in mask]
        logprobs = [-math.log(vocabulary) if chosen else None for chosen in mask]
        found.append(Sample(ids, mask, logprobs, 1.0 if number % 2 else -1.0, 0, "g", f"row-{number}"))
    return found


def measured(learner: Learner, samples: list[Sample], device: torch.device) -> dict[str, Any]:
    """Peak memory, the seconds of an update, and what it found."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times: list[float] = []
    first: dict[str, float] = {}
    try:
        for _ in range(UPDATES):
            began = time.perf_counter()
            metrics = learner.update(samples)
            if device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
            first = first or metrics
    except TrainingError as error:
        return {"not_run": str(error)}
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else resident_bytes()
    return {
        "peak_gb": round(peak / GIGABYTE, 2),
        "reserved_gb": round(torch.cuda.max_memory_reserved() / GIGABYTE, 2) if device.type == "cuda" else None,
        "seconds": round(min(times[1:]), 3),
        "padded_tokens": first["learner/padded_tokens"],
        "loss": first["learner/loss"],
        "grad_norm": first["learner/grad_norm"],
    }


def resident_bytes() -> int:
    """Of the whole process, where there is no GPU whose allocator could be asked."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def packed_difference(learner: Learner, samples: list[Sample]) -> float:
    """How far log-probabilities of packed rows are from those of the same rows, one at a time, at most."""
    rows = sorted((Row.of(sample, learner.model) for sample in samples), key=lambda row: row.length)[:4]
    device = learner.model.device
    with torch.no_grad():
        packed = learner._logprobs(Pack.of(rows, device, end_to_end=True)).logprobs
        alone = torch.cat([learner._logprobs(Pack.of([row], device)).logprobs for row in rows])
    return round((packed - alone).abs().max().item(), 5)


def logits_chunks(model: HfModel, tokens: int = 4096) -> float:
    """What log-probabilities and their gradient by hidden states take at most, in buffers of `CHUNK_BYTES`."""
    head = model.head()
    assert head is not None
    weight = head.detach().bfloat16()
    hidden = torch.randn(tokens, weight.shape[1], device=weight.device, dtype=weight.dtype, requires_grad=True)
    chosen = torch.randint(weight.shape[0], (tokens,), device=weight.device)
    (hidden @ weight[:8].T).sum().backward()  # so that workspaces and the gradient are there before
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = token_logprobs(hidden, chosen, head=weight)
    found.logprobs.sum().backward()
    results = hidden.numel() * hidden.element_size()
    return round((torch.cuda.max_memory_allocated() - before - results) / CHUNK_BYTES, 3)


def whole_logprobs(
    hidden: torch.Tensor,
    chosen: torch.Tensor,
    temperatures: torch.Tensor | None = None,
    *,
    head: torch.Tensor,
    entropy_gradient: bool,
) -> TokenLogprobs:
    """All logits at once, as a softmax is usually written."""
    logits = torch.nn.functional.linear(hidden, head).float()
    total = logits.logsumexp(-1)
    logprobs = logits.gather(-1, chosen[:, None]).squeeze(-1) - total
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropies = torch.special.entr((logits - total[:, None]).exp()).sum(-1)
    return TokenLogprobs(logprobs, entropies)


def machine() -> dict[str, Any]:
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "transformers")},
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


if __name__ == "__main__":
    sys.exit(main())
