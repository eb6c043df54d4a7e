"""Where the time of a GRPO step goes: rollouts, learning, and giving the engine the new weights.

    python bench/gpu/step_split.py FOLDER --engine embedded --tokens 256

The reward counts letters, so that models with random weights have something to learn from in each step too. The first
step warms up; the median of the others counts.
"""

import argparse
import statistics

import results
import task
import training

WARM_UP_STEPS = 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    results.add_options(parser)
    training.add_options(parser)
    parser.add_argument("--steps", type=int, default=4, help="the first of which is not counted (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=256, help="of an answer at most (default: %(default)s)")
    options = parser.parse_args()
    what = {"engine": training.engine_label(options.engine), "model": results.label_of(options)}
    reason = training.why_not(options.engine)
    if reason is not None:
        results.add(options.results, "step_split", **what, not_run=reason)
        return
    plan = training.plan_of(options, steps=options.steps, learns_truncated=True)
    found = training.train(plan, task.LettersAgent(training.MODEL, options.tokens))
    if len(found.points) <= WARM_UP_STEPS:
        raise SystemExit(f"{len(found.points)} steps were made; more than {WARM_UP_STEPS} are needed.")
    seconds = {part: found.seconds(part)[WARM_UP_STEPS:] for part in training.PARTS}
    seconds["whole"] = found.seconds_between()[WARM_UP_STEPS - 1 :]
    tokens = [point.values.get("learner/tokens", 0.0) for point in found.points][WARM_UP_STEPS:]
    results.add(
        options.results,
        "step_split",
        **what,
        seconds={part: round(statistics.median(each), 3) for part, each in seconds.items()},
        seconds_each={part: [round(one, 3) for one in each] for part, each in seconds.items()},
        rollouts=options.tasks_per_step * options.group_size,
        tokens_per_answer=options.tokens,
        trained_tokens=statistics.median(tokens),
        learner_memory_mb=training.peak_memory_mb(),
        precision=options.precision,
    )


if __name__ == "__main__":
    main()
