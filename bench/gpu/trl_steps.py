"""Steps an hour of one GRPO loop, in TRL's GRPOTrainer and here.

    python bench/gpu/trl_steps.py FOLDER trl --generation generate
    python bench/gpu/trl_steps.py FOLDER trl --generation vllm        vLLM in TRL's own process ("colocate")
    python bench/gpu/trl_steps.py FOLDER agl --engine embedded
    python bench/gpu/trl_steps.py FOLDER agl --engine vllm

Both train all weights of the same model on the same prompts, with the same reward (the letters of one answer), as many
rollouts a step, answers as long, optimiser steps as many, and the same learning rate, in bf16 arithmetic over weights
of 32 bits. A step is one batch of rollouts with what is learned from it. The first step warms up; the median of the
others counts.
"""

import argparse
import importlib.util
import itertools
import statistics
import tempfile
import time
from typing import Any

import results
import task
import training

WARM_UP_STEPS = 1
DATASET_TASKS = 5000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    results.add_options(parser)
    parser.add_argument("trainer", choices=["trl", "agl"])
    training.add_options(parser)
    parser.add_argument("--generation", default="generate", choices=["generate", "continuous", "vllm"], help="of TRL")
    parser.add_argument("--steps", type=int, default=12, help="the first is not counted (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=128, help="of an answer at most (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--micro-batch", type=int, help="rollouts TRL puts through the model together; all by default")
    options = parser.parse_args()
    sampler = options.generation if options.trainer == "trl" else training.engine_label(options.engine)
    what = {
        "trainer": options.trainer,
        "sampler": sampler,
        "model": results.label_of(options),
        "rollouts": options.tasks_per_step * options.group_size,
        "tokens_per_answer": options.tokens,
        "steps": options.steps,
    }
    reason = missing(options) if options.trainer == "trl" else training.why_not(options.engine)
    if reason is not None:
        results.add(options.results, "steps_per_hour", **what, not_run=reason)
        return
    seconds, rewards, parts = (*trl(options), {}) if options.trainer == "trl" else agl(options)
    results.add(
        options.results,
        "steps_per_hour",
        **what,
        steps_per_hour=round(3600 / statistics.median(seconds), 1),
        seconds_each=[round(one, 3) for one in seconds],
        **parts,
        rewards=[round(one, 4) for one in rewards],
        memory_mb=training.peak_memory_mb(),
    )


def missing(options: argparse.Namespace) -> str | None:
    """Why TRL cannot run here, in words."""
    for package in ("trl", *(["vllm"] if options.generation == "vllm" else [])):
        if importlib.util.find_spec(package) is None:
            return f"the package {package} is not installed here"
    return None


def agl(options: argparse.Namespace) -> tuple[list[float], list[float], dict[str, Any]]:
    """Seconds of each step after the warm-up, the mean rewards of all, and where the time went."""
    plan = training.plan_of(
        options,
        steps=options.steps,
        seed=options.seed,
        learns_truncated=True,
        learning=(("gradient_checkpointing", False),),
    )
    found = training.train(plan, task.LettersAgent(training.MODEL, options.tokens))
    parts: dict[str, Any] = {"runners": options.runners}
    for part in ("rollouts", "learning", "publishing"):
        parts[f"{part}_seconds"] = round(statistics.median(found.seconds(part)[WARM_UP_STEPS:]), 3)
    return found.seconds_between()[WARM_UP_STEPS - 1 :], list(found.algorithm.progress.rewards), parts


def trl(options: argparse.Namespace) -> tuple[list[float], list[float]]:
    """The same of TRL, whose steps are those of the optimiser: as many of them are one step here as minibatches."""
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOTrainer

    minibatches = training.Plan(options.folder).minibatches
    ended, rewards = [], []

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            if state.global_step % minibatches == 0:
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                ended.append(time.perf_counter())

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **others: Any) -> None:
            if logs and "reward" in logs:
                rewards.append(float(logs["reward"]))

    def reward(completions: list[Any], **columns: Any) -> list[float]:
        return [task.letters_reward(one[0]["content"]) for one in completions]

    prompts = [{"prompt": task.letters_messages(one)} for one in task.tasks(DATASET_TASKS, seed=options.seed + 1)]
    with tempfile.TemporaryDirectory(prefix="trl-") as folder:
        GRPOTrainer(
            model=options.folder,
            reward_funcs=reward,
            args=trl_config(options, minibatches, folder),
            train_dataset=Dataset.from_list(prompts),
            callbacks=[Clock()],
        ).train()
    seconds = [later - earlier for earlier, later in itertools.pairwise(ended)]
    return seconds[WARM_UP_STEPS - 1 :], rewards


def trl_config(options: argparse.Namespace, minibatches: int, folder: str) -> Any:
    """TRL's defaults, but where the two loops would differ in work."""
    from trl import GRPOConfig

    rollouts = options.tasks_per_step * options.group_size
    micro = options.micro_batch or rollouts // minibatches
    on_cpu = options.device == "cpu"
    return GRPOConfig(
        output_dir=folder,
        model_init_kwargs={"dtype": "float32"},
        learning_rate=options.rate,
        lr_scheduler_type="constant",
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=rollouts // minibatches // micro,
        generation_batch_size=rollouts,
        num_generations=options.group_size,
        max_completion_length=options.tokens,
        max_steps=options.steps * minibatches,
        gradient_checkpointing=False,
        bf16=options.precision == "bf16" and not on_cpu,
        use_cpu=on_cpu,
        use_vllm=options.generation == "vllm",
        use_transformers_continuous_batching=options.generation == "continuous",
        logging_steps=minibatches,
        save_strategy="no",
        report_to="none",
        seed=options.seed,
        disable_tqdm=True,
    )


if __name__ == "__main__":
    main()
