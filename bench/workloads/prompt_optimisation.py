"""How far APO or GEPA takes a prompt on the simulated model, through the real Trainer, store and proxy.

usage: prompt_optimisation.py [--algorithm apo|gepa] [--seeds N] [--first N] [--faults SHARE] [--json]

For each seed: the score of the seed prompt and of the best prompt on tasks that the optimisation has not seen, the gain
it reports with its interval, and what it spent.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.algorithm.prompts.climbing import climb, evolve

LOW, HIGH = 0.4, 0.9


def measured(algorithm: str, seed: int, faults: float) -> dict[str, Any]:
    began = time.perf_counter()
    done = climb(seed, faults=faults) if algorithm == "apo" else evolve(seed, faults=faults)
    gain = done.result.gain
    return {
        "seed": seed,
        "before": done.seed_test_score,
        "after": done.best_test_score,
        "gain": None if gain is None else [gain.mean, gain.low, gain.high, gain.n],
        "best": done.result.best_version,
        "rollouts": int(done.result.spent["rollouts"]),
        "model_calls": int(done.result.spent["model_calls"]),
        "seconds": round(time.perf_counter() - began, 1),
    }


def told(row: dict[str, Any]) -> str:
    gain = "none"
    if row["gain"] is not None:
        mean, low, high, pairs = row["gain"]
        gain = f"{mean:+.2f} [{low:+.2f}, {high:+.2f}] of {pairs}"
    return (
        f"{row['seed']:>4}{row['before']:>8.3f}{row['after']:>8.3f}  {gain:28}{row['best']:>6}{row['rollouts']:>10}"
        f"{row['model_calls']:>7}{row['seconds']:>9.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--algorithm", choices=["apo", "gepa"], default="apo")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--faults", type=float, default=0.0, help="share of the optimiser's answers that go wrong")
    parser.add_argument("--json", action="store_true", help="print the figures as one line of JSON")
    options = parser.parse_args()
    rows = []
    if not options.json:
        print(f"{'seed':>4}{'before':>8}{'after':>8}  {'gain, interval, pairs':28}{'best':>6}{'rollouts':>10}", end="")
        print(f"{'calls':>7}{'seconds':>9}")
    for seed in range(options.first, options.first + options.seeds):
        rows.append(measured(options.algorithm, seed, options.faults))
        if not options.json:
            print(told(rows[-1]), flush=True)
    climbed = sum(row["before"] < LOW and row["after"] > HIGH for row in rows)
    if options.json:
        print(json.dumps({"climbed": climbed, "runs": rows}))
    else:
        print(f"{climbed} of {len(rows)} climbed from below {LOW} to above {HIGH}.")


if __name__ == "__main__":
    main()
