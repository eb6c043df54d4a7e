"""One update of the learner: seconds, starts of kernels and peak memory, here and in another checkout of the package.

    python bench/gpu/learner_update.py --checkout before=/path/to/other --checkout after=.
    python bench/gpu/learner_update.py --checkout after=. --rows 8x100 --set gradient_checkpointing=true
    python bench/gpu/learner_update.py --checkout after=. --shape miniature --device cpu --rows 4x10   tries the script

A checkout is measured in a process of its own, and several take turns within each round, so that a machine that becomes
slower is as slow for all. The model has random weights, made on the device; settings are the defaults beside precision
and what `--set` says. An update makes two steps of the optimiser. The last updates of a process count: the first ones
measure how far they move the model, and set up what libraries need. Starts of kernels are counted in one more update.
"""

import argparse
import itertools
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import results

HERE = Path(__file__).resolve()
FIGURE = "learner_update"
WARM_UPDATES = 6
"""The first five and every fifth update are measured: two passes more over an eighth of the rows."""
TIMED_UPDATES = 3
GIVEN_SHARE = 0.5
"""Of a row's tokens."""
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernelEx")


def main() -> None:
    options = arguments()
    if options.measured is not None:
        print(json.dumps(measured(json.loads(options.measured))), flush=True)
        return
    checkouts = dict(one.split("=", 1) for one in options.checkout)
    fixed = {name: getattr(options, name) for name in ("shape", "lora", "plain_norms", "set", "device")}
    cases = itertools.product(options.rows.split(","), options.precision.split(","), range(options.rounds))
    for rows, precision, turn in cases:
        for name, place in checkouts.items():
            what = {"rows": rows, "precision": precision, **fixed}
            found = in_process(Path(place).resolve(), what)
            results.add(options.results, FIGURE, checkout=name, turn=turn, **what, **found)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--checkout", action="append", default=[], metavar="NAME=FOLDER", help="with agentlightning/ in it"
    )
    parser.add_argument("--rows", default="8x100,128x100,128x280", help="rows x tokens of each (default: %(default)s)")
    parser.add_argument("--precision", default="full,bf16", help="(default: %(default)s)")
    parser.add_argument("--shape", default="135m", help="of `random_model.py` (default: %(default)s)")
    parser.add_argument("--lora", action="store_true", help="train adapters of rank 16 on weights of 16 bits")
    parser.add_argument(
        "--plain-norms", action="store_true", help="with the norms of transformers, of seven kernels each"
    )
    parser.add_argument("--set", action="append", default=[], metavar="NAME=JSON", help="a choice of LearnerSettings")
    parser.add_argument("--rounds", type=int, default=2, help="(default: %(default)s)")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--results", type=Path, default=results.RESULTS, help="file to append to")
    parser.add_argument("--measured", help=argparse.SUPPRESS)
    return parser.parse_args()


def in_process(place: Path, what: dict[str, Any]) -> dict[str, Any]:
    """The figures of one checkout, or why there are none."""
    path = os.pathsep.join([str(place), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(HERE), "--measured", json.dumps({**what, "place": str(place)})]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"not_run": "\n".join(done.stderr.splitlines()[-8:])}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


# ---------------------------------------------------------------------- in the process that measures


def measured(what: dict[str, Any]) -> dict[str, Any]:
    import torch

    import agentlightning
    from agentlightning.algorithm.grpo.learner import Learner
    from agentlightning.algorithm.grpo.settings import LearnerSettings
    from agentlightning.engine import hf_kernels

    if not Path(agentlightning.__file__).is_relative_to(what["place"]):
        raise SystemExit(f"There is no package in '{what['place']}'.")
    if what["plain_norms"]:
        hf_kernels.fuse_norms = lambda network: None
    device = torch.device(what["device"])
    is_on_gpu = device.type == "cuda"
    choices = {name: json.loads(value) for name, value in (one.split("=", 1) for one in what["set"])}
    model = model_of(what["shape"], device, with_adapters=what["lora"])
    learner = Learner(model, LearnerSettings(precision=what["precision"], learning_rate=1e-6, **choices))
    count, tokens = map(int, what["rows"].split("x"))
    samples = samples_of(count, tokens, model.vocab_size)
    seconds = []
    for _ in range(WARM_UPDATES + TIMED_UPDATES):
        began = time.perf_counter()
        metrics = learner.update(samples)
        if is_on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return {
        "seconds": round(statistics.median(seconds[WARM_UPDATES:]), 4),
        "seconds_each": [round(one, 4) for one in seconds],
        "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 3) if is_on_gpu else None,
        "loss": metrics["learner/loss"],
        "grad_norm": metrics["learner/grad_norm"],
        "is_checkpointed": learner.is_checkpointed,
        "is_packed": learner.is_packed,
        "max_batch_tokens": learner.settings.max_batch_tokens,
        **profiled(learner, samples),
    }


def model_of(shape: str, device: Any, *, with_adapters: bool) -> Any:
    import torch
    import transformers
    from random_model import POSITIONS, SHAPES, TIED

    from agentlightning.engine.hf import HfModel
    from agentlightning.engine.lora import LoraOptions

    is_llama = shape in ("135m", "miniature")
    sizes = {"max_position_embeddings": POSITIONS, "tie_word_embeddings": shape in TIED}
    config = (transformers.LlamaConfig if is_llama else transformers.Qwen2Config)(**SHAPES[shape], **sizes)
    torch.manual_seed(0)
    with device:
        dtype = torch.bfloat16 if with_adapters else torch.float32
        network = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    lora = LoraOptions(rank=16) if with_adapters else None
    return HfModel(network, name=shape, end_ids=frozenset([0]), lora=lora)


def samples_of(count: int, tokens: int, vocabulary: int) -> list[Any]:
    """Rows of one length, half of whose tokens were chosen."""
    from agentlightning.algorithm.grpo.samples import Sample

    source = random.Random(0)
    given = round(tokens * GIVEN_SHARE)
    mask = [0] * given + [1] * (tokens - given)
    logprobs = [-math.log(vocabulary) if chosen else None for chosen in mask]
    rows = [[source.randrange(vocabulary) for _ in mask] for _ in range(count)]
    return [
        Sample(ids, mask, logprobs, 1.0 if number % 2 else -1.0, 0, "g", f"row-{number}")
        for number, ids in enumerate(rows)
    ]


def profiled(learner: Any, samples: list[Any]) -> dict[str, Any]:
    """Of one more update: starts of kernels on a GPU, and of operations of torch; the time that the GPU was busy."""
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    is_on_gpu = learner.model.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_on_gpu else [])]
    with profile(activities=activities) as found:
        learner.update(samples)
        if is_on_gpu:
            torch.cuda.synchronize()
    averages = found.key_averages()
    kernels = [one for one in averages if one.device_type == DeviceType.CUDA]  # what starts them has their time too
    busy = sum(one.self_device_time_total for one in kernels)
    return {
        "launches": sum(one.count for one in averages if one.key in LAUNCHES),
        "operations": sum(one.count for one in averages if one.key.startswith("aten::")),
        "gpu_busy_seconds": round(busy / 1e6, 4) if is_on_gpu else None,
    }


if __name__ == "__main__":
    main()
