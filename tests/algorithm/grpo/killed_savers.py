"""A program: processes that save checkpoints without pause are killed at random moments, one after another.

Prints one JSON object per kill: the last step that was surely saved, and what was found afterwards. It is a program of
its own because processes are forked, which is safe only where there are no threads.
"""

import json
import os
import random
import select
import signal
import sys
import time

import torch

from agentlightning.algorithm.grpo.checkpoints import Checkpoints

KILLS = 20
LONGEST_SECONDS = 0.08


def state(step: int) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((300, 300), float(step)), "bias": torch.full((7,), float(step))}


def save_for_ever(checkpoints: Checkpoints, first: int, told: int) -> None:
    """Every step is saved twice, as a run does that ends on an interval."""
    for step in range(first, first + 100_000):
        for _ in range(2):
            checkpoints.save(
                step,
                model_state=state(step),
                learner_state={"moment": torch.full((300, 300), float(step))},
                progress={"position": step},
                is_best=step % 3 == 0,
            )
        os.write(told, f"{step}\n".encode())


def killed(checkpoints: Checkpoints, first: int, delay: float) -> int:
    """Start a saver, kill it some time after its first save, and tell what it saved last."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            save_for_ever(checkpoints, first, writing)
        finally:
            os._exit(1)
    os.close(writing)
    try:
        assert select.select([reading], [], [], 60)[0], "the saver saved nothing in a minute"
        time.sleep(delay)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    with os.fdopen(reading, encoding="ascii") as lines:
        return int(lines.read().split()[-1])


def main(folder: str, seed: int) -> None:
    torch.set_num_threads(1)
    source, checkpoints, first = random.Random(seed), Checkpoints(folder, keep=1), 1
    for _ in range(KILLS):
        saved = killed(checkpoints, first, source.uniform(0, LONGEST_SECONDS))
        unfinished = sum(name.startswith(".unfinished-") for name in os.listdir(folder))
        found = checkpoints.latest()
        is_right = found is not None and (
            found.progress == {"position": found.step}
            and all(torch.equal(found.model_state()[name], value) for name, value in state(found.step).items())
            and bool((found.learner_state()["moment"] == found.step).all())
        )
        report = {"saved": saved, "found": found and found.step, "is_right": is_right, "unfinished": unfinished}
        print(json.dumps(report), flush=True)
        first = saved + 1


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
