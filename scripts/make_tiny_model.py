"""Make the weights of the tiny model anew, as they travel in the package.

The same machine, version of torch and seed give the same file, bit for bit; its digest is printed at the end. On one
core it takes three to four minutes.
"""

import argparse
import hashlib
import time
from pathlib import Path
from typing import Final

import torch

from agentlightning.engine.tiny.files import SHIPPED_FOLDER, WEIGHTS_FILE, save_tiny
from agentlightning.engine.tiny.pretraining import Pretraining, pretrain

STEPS_BETWEEN_LINES: Final = 100


class Progress:
    """Prints a line now and then; its calls are the reports of `pretrain`."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._started = time.monotonic()
        self._losses: list[float] = []

    def __call__(self, step: int, loss: float) -> None:
        self._losses.append(loss)
        if len(self._losses) == STEPS_BETWEEN_LINES or step + 1 == self._steps:
            mean = sum(self._losses) / len(self._losses)
            seconds = time.monotonic() - self._started
            print(f"step {step + 1:5} of {self._steps}   loss {mean:.4f}   {seconds:6.1f} s", flush=True)
            self._losses.clear()


def main() -> None:
    defaults = Pretraining()
    parser = argparse.ArgumentParser(description="Make the weights of the tiny model.")
    parser.add_argument(
        "--folder", type=Path, default=SHIPPED_FOLDER, help="where they are written (default: the package)"
    )
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument("--steps", type=int, default=defaults.steps)
    options = parser.parse_args()

    torch.set_num_threads(1)
    settings = Pretraining(seed=options.seed, steps=options.steps)
    model = pretrain(settings, report=Progress(settings.steps))
    made = {
        "seed": settings.seed,
        "steps": settings.steps,
        "torch": str(torch.__version__),
        "license": "MIT",
        "origin": "trained by agentlightning.engine.tiny.pretraining on generated tasks",
    }
    save_tiny(model, options.folder, extra=made)
    digest = hashlib.sha256((options.folder / WEIGHTS_FILE).read_bytes()).hexdigest()
    print(f"{options.folder / WEIGHTS_FILE}: {sum(weight.numel() for weight in model.state().values()):,} numbers")
    print(f"sha256 {digest}")


if __name__ == "__main__":
    main()
