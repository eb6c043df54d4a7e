"""Steps an hour where a few rollouts take ten times as long: the calculator agent, trained with `max_staleness=2`.

One rollout in twenty waits ten times as long as the others before its first call. Prints one JSON line: seconds from
the first step to the last, steps an hour, the mean reward of the last steps, and validation after training with its
interval.

    python bench/workloads/stragglers.py --steps 24 --seconds 1

It runs under any revision of the package that is first on PYTHONPATH, so two of them can be held against each other in
turns.
"""

import argparse
import asyncio
import json
import logging
import random
import sys
import time
from pathlib import Path
from typing import Any

logging.disable(logging.WARNING)
ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT / "examples" / "calc_x")]

import calc_agent  # noqa: E402 # found in the example's folder
import tasks  # noqa: E402

import agentlightning as agl  # noqa: E402
from agentlightning.algorithm.grpo import GRPO, LearnerSettings  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--seconds", type=float, default=1.0, help="that most rollouts wait")
    parser.add_argument("--share", type=float, default=0.05, help="of rollouts that wait ten times as long")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    chance = random.Random(arguments.seed)

    class Waiting(agl.LitAgent[Any]):
        def rollout(self, task: Any, resources: Any, rollout: Any) -> float:
            if rollout.mode == "train":
                time.sleep(arguments.seconds * (10 if chance.random() < arguments.share else 1))
            return calc_agent.solve(task)

    algorithm = GRPO(
        "tiny",
        group_size=4,
        tasks_per_step=8,
        steps=arguments.steps,
        max_staleness=2,
        learning=LearnerSettings(threads=1),
        seed=arguments.seed,
    )
    store = agl.InMemoryLightningStore()
    runner = {"type": "agentlightning.LitAgentRunner", "max_concurrency": 128}
    trainer = agl.Trainer(algorithm=algorithm, store=store, strategy="shm", runner=runner, progress="off")
    trainer.fit(Waiting(), tasks.tasks(1000, held_out=False), val_dataset=tasks.tasks(64, held_out=True))
    points = [point for point in asyncio.run(ended_steps(store)) if "seconds/rollouts" in point.values]
    seconds = points[-1].time - points[0].time
    assert algorithm.result is not None
    figures = {
        "steps": len(points),
        "seconds": round(seconds, 2),
        "steps_per_hour": round(3600 * (len(points) - 1) / seconds),
        "last_rewards": [round(reward, 3) for reward in algorithm.progress.rewards[-5:]],
        "validation": [
            round(value, 3) for value in (algorithm.result.mean, algorithm.result.low, algorithm.result.high)
        ],
    }
    print(json.dumps(figures), flush=True)


async def ended_steps(store: agl.LightningStore) -> list[Any]:
    (run,) = await store.query_runs()
    return list(await store.query_metrics(run.run_id))


if __name__ == "__main__":
    main()
