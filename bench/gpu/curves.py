"""Does a model learn? GRPO on arithmetic with a calculator, one engine and one seed.

    python bench/gpu/curves.py FOLDER --engine embedded --seed 0
    python bench/gpu/curves.py FOLDER --engine http://127.0.0.1:8000 --seed 0 --rounding nearest --importance-cap none

The reward before and after is that of other tasks, sampled at temperature 1. `--rounding nearest` publishes weights of
16 bits as a plain cast makes them: with a checkpoint of 16 bits the engine's weights then stand still while the
learner's move, and learning stalls. `report.py` holds the engines against each other.
"""

import argparse
import time
from typing import Any

import results
import task
import training


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    results.add_options(parser)
    training.add_options(parser, precision="full")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--validation-tasks", type=int, default=128)
    parser.add_argument("--rounding", default="chance", choices=["chance", "nearest"], help="of published weights")
    parser.add_argument("--importance-cap", default="default", help="a number, none, or the engine's own default")
    options = parser.parse_args()
    what = {
        "engine": training.engine_label(options.engine),
        "model": results.label_of(options),
        "dtype": checkpoint_dtype(options.folder),
        "rounding": options.rounding,
        "importance_cap": options.importance_cap,
        "seed": options.seed,
        "steps": options.steps,
    }
    reason = training.why_not(options.engine)
    if reason is not None:
        results.add(options.results, "curve", **what, not_run=reason)
        return
    if options.rounding == "nearest":
        round_to_nearest()
    plan = training.plan_of(
        options,
        steps=options.steps,
        seed=options.seed,
        validation_tasks=options.validation_tasks,
        learning=() if options.importance_cap == "default" else (("importance_cap", cap_of(options.importance_cap)),),
    )
    began = time.perf_counter()
    found = training.train(plan, task.CalculatorAgent(training.MODEL))
    results.add(options.results, "curve", **what, **figures(found), seconds=round(time.perf_counter() - began, 1))


def figures(found: training.Trained) -> dict[str, Any]:
    before, after = found.algorithm.baseline, found.algorithm.result
    learned = [point.values for point in found.points if "learner/clipped_low" in point.values]
    clipped = [values["learner/clipped_low"] + values["learner/clipped_high"] for values in learned]
    return {
        "before": round(before.mean, 4),
        "after": round(after.mean, 4),
        "interval": [round(after.low, 4), round(after.high, 4)],
        "validated": after.n,
        "curve": [round(reward, 3) for reward in found.algorithm.progress.rewards],
        "clipped": [round(share, 4) for share in clipped],
        "learner_memory_mb": training.peak_memory_mb(),
    }


def checkpoint_dtype(folder: str) -> str:
    """As the model's configuration names it."""
    from transformers import AutoConfig

    return str(AutoConfig.from_pretrained(folder).dtype).removeprefix("torch.")


def cap_of(text: str) -> float | None:
    return None if text == "none" else float(text)


def round_to_nearest() -> None:
    """Publish by plain casts, as if nobody rounded by chance; training itself has no such option."""
    from agentlightning.engine import weights

    if not hasattr(weights, "round_by_chance"):
        raise SystemExit("This release of Agent Lightning does not round by chance, so there is nothing to turn off.")
    weights.round_by_chance = lambda tensor, dtype, **_: tensor.detach().to(dtype)


if __name__ == "__main__":
    main()
