"""Do engine and learner give a token the same log-probability after many updates of a 16-bit model?

    python bench/gpu/agreement.py FOLDER --precision bf16

The embedded engine and the learner in one process. The engine samples answers in 16 bits, the learner learns from them
(the letters of an answer are its reward) and publishes its weights, rounded by chance. Measured on tokens that the
engine sampled with the last weights: the mean difference between its log-probabilities and the learner's.
"""

import argparse
import statistics
import time
from typing import Any

import results
import task

SAMPLE_TOKENS = 80
TASKS, GROUP = 8, 8
PATIENCE_SECONDS = 120.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    results.add_options(parser)
    parser.add_argument("--precision", default="bf16", choices=["full", "bf16"], help="of the learner's arithmetic")
    parser.add_argument("--updates", type=int, default=50, help="(default: %(default)s)")
    parser.add_argument("--rate", type=float, default=1e-5, help="learning rate (default: %(default)s)")
    parser.add_argument("--keep-activations", action="store_true", help="without gradient checkpointing")
    options = parser.parse_args()

    import torch

    from agentlightning.algorithm.grpo import Learner, LearnerSettings
    from agentlightning.engine.checkpoint import load
    from agentlightning.engine.scheduler import InferenceEngine
    from agentlightning.engine.weights import PublishedWeights

    learned, codec = load(options.folder, device=options.device, dtype="float32")
    served, _ = load(options.folder, device=options.device, dtype="bfloat16")
    learner = Learner(
        learned,
        LearnerSettings(
            learning_rate=options.rate,
            precision=options.precision,
            max_batch_tokens=32768,
            gradient_checkpointing=False if options.keep_activations else None,
        ),
    )
    asked = task.tasks(TASKS * (options.updates + 1), seed=1)
    with InferenceEngine(served) as engine:
        before = difference(learner, sampled(engine, codec, asked[:TASKS], version=0))
        seconds, rewards = [], []
        for version in range(1, options.updates + 1):
            samples = sampled(engine, codec, asked[version * TASKS :][:TASKS], version=version - 1)
            rewards.append(statistics.fmean(one.reward for one in samples))
            began = time.perf_counter()
            learner.update([one.sample for one in samples])
            seconds.append(time.perf_counter() - began)
            published = PublishedWeights(learned, seed=0, version=version).tensors(torch.bfloat16)
            engine.load_weights(version, dict(published)).result(PATIENCE_SECONDS)
        last = sampled(engine, codec, asked[:TASKS], version=options.updates)
        after = difference(learner, last)
    results.add(
        options.results,
        "agreement",
        model=results.label_of(options),
        precision=options.precision,
        updates=options.updates,
        rate=options.rate,
        checkpointed=learner.is_checkpointed,
        packed=learner.is_packed,
        before=round(before, 4),
        after=round(after, 4),
        tokens=sum(len(one.sample.token_ids) - one.sample.loss_mask.count(0) for one in last),
        rewards=[round(rewards[0], 3), round(statistics.fmean(rewards[-5:]), 3)],
        update_seconds=round(statistics.median(seconds), 4),
        memory_mb=round(torch.cuda.max_memory_allocated() / 1e6) if torch.cuda.is_available() else None,
    )


class Scored:
    """An answer as a sample, and what it was worth."""

    def __init__(self, sample: Any, reward: float) -> None:
        self.sample, self.reward = sample, reward


def sampled(engine: Any, codec: Any, asked: list[task.Task], version: int) -> list[Scored]:
    """Answers to these tasks in groups, with their advantages."""
    from agentlightning.algorithm.grpo.samples import Sample
    from agentlightning.engine.sampling import Sampling

    prompts = [codec.render(task.letters_messages(one)) for one in asked for _ in range(GROUP)]
    futures = [
        engine.submit(prompt, Sampling(max_new_tokens=SAMPLE_TOKENS, seed=version * len(prompts) + number))
        for number, prompt in enumerate(prompts)
    ]
    answers = [future.result(PATIENCE_SECONDS) for future in futures]
    rewards = [task.letters_reward(codec.decode(answer.token_ids)) for answer in answers]
    found = []
    for number, (prompt, answer, reward) in enumerate(zip(prompts, answers, rewards, strict=True)):
        start = number - number % GROUP
        group = rewards[start : start + GROUP]
        sample = Sample(
            token_ids=prompt + answer.token_ids,
            loss_mask=[0] * len(prompt) + [1] * len(answer.token_ids),
            logprobs=[None] * len(prompt) + answer.logprobs,
            advantage=(reward - statistics.fmean(group)) / (statistics.pstdev(group) + 1e-6),
            version=version,
            group=str(start),
            rollout_id=f"ro-{number}",
        )
        found.append(Scored(sample, reward))
    return found


def difference(learner: Any, scored: list[Scored]) -> float:
    """Mean absolute difference of the log-probabilities of sampled tokens, learner against engine."""
    from agentlightning.algorithm.grpo.packing import Row

    rows = [Row.of(one.sample, learner.model) for one in scored]
    found = [
        (logprobs.float() - row.engine_logprobs.float()).abs().tolist() for row, logprobs in learner.evaluated(rows)
    ]
    return statistics.fmean(value for row in found for value in row)


if __name__ == "__main__":
    main()
