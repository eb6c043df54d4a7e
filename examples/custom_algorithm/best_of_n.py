"""Best of n: an algorithm of one's own, which learns from the best of several tries at each task. No model, no network.

Each step sends every task of a batch n times with the prompt so far, and adds the best answers to the prompt as
examples for the next step. A step that is interrupted leaves no work in the queue, and a run that was stopped goes on
from its checkpoint. `docs/how-to/write-an-algorithm.md` leads through it.
"""

import argparse
import json
import random
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import agentlightning as agl
from agentlightning.algorithm.batches import Batches, FinishedRollout, retried_config, score_of
from agentlightning.algorithm.utils import report_metrics

# ---------------------------------------------------------------------- the algorithm


class BestOfN(agl.Algorithm):
    """Puts the best answers into the prompt as examples."""

    def __init__(self, *, n: int = 8, steps: int = 3, tasks_per_step: int = 4, checkpoint: Path | None = None) -> None:
        self.n, self.steps, self.tasks_per_step, self.checkpoint = n, steps, tasks_per_step, checkpoint
        self.curve: list[float] = []
        """The mean reward of each step."""

    async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
        store = self.get_store()
        batches = Batches(store, retried_config(timeout_seconds=60))  # lost and hanging attempts are tried again
        first_step, examples = self._restored()
        for step in range(first_step, self.steps):
            places = range(step * self.tasks_per_step, (step + 1) * self.tasks_per_step)
            tasks = [train_dataset[place % len(train_dataset)] for place in places]
            update = await store.add_resources({"prompt": prompt_with(examples)})
            sent = await batches.send(tasks, copies=self.n, resources_id=update.resources_id)
            finished = await batches.gather(sent)  # interrupted, it withdraws what is not over
            best = best_of_groups(finished)
            examples += [answer_of(one) for one in best if one.own_reward == 1.0]
            self.curve.append(score_of(finished).reward.mean)
            best_mean = sum(one.own_reward or 0.0 for one in best) / len(best)
            await report_metrics(self, step, {"reward/mean": self.curve[-1], "reward/best_of_n": best_mean})
            self._save(step + 1, examples)
        await store.add_resources({"prompt": prompt_with(examples)})  # the latest resources are the result

    def _restored(self) -> tuple[int, list[str]]:
        if self.checkpoint is None or not self.checkpoint.exists():
            return 0, []
        saved = json.loads(self.checkpoint.read_text(encoding="utf-8"))
        return saved["step"], saved["examples"]

    def _save(self, step: int, examples: list[str]) -> None:
        if self.checkpoint is not None:
            beside = self.checkpoint.with_suffix(".new")
            beside.write_text(json.dumps({"step": step, "examples": examples}), encoding="utf-8")
            beside.replace(self.checkpoint)  # whole or not at all


def best_of_groups(finished: Sequence[FinishedRollout]) -> list[FinishedRollout]:
    """The best rollout of each task; one that failed is the best of nothing."""
    groups: dict[str, list[FinishedRollout]] = defaultdict(list)
    for one in finished:
        groups[one.group].append(one)
    return [max(group, key=lambda one: one.own_reward or 0.0) for group in groups.values()]


# ---------------------------------------------------------------------- the prompt and the agent


def prompt_with(examples: Sequence[str]) -> agl.PromptTemplate:
    shown = "\n".join(["Convert miles to kilometres.", *examples[-8:], "{miles} miles ->"])
    return agl.PromptTemplate(template=shown, engine="f-string")


def answer_of(finished: FinishedRollout) -> str:
    """What the agent emitted."""
    return next(text for span in finished.spans if (text := agl.get_message_value(span)) is not None)


@agl.rollout
def convert(task: float, prompt_template: agl.PromptTemplate) -> float:
    """Answer in the way of the last example, or in any way; 1 for one decimal and the unit."""
    *examples, question = prompt_template.format(miles=task).splitlines()
    style = examples[-1].rpartition("-> ")[2] if len(examples) > 1 else random.choice(["1.6", "2 km", "1.6 km"])
    number, _, unit = style.partition(" ")
    answer = f"{task * 1.609344:.{len(number.partition('.')[2])}f} {unit}".strip()
    agl.emit_message(f"{question} {answer}")
    return float(answer == f"{task * 1.609344:.1f} km")


def main() -> None:
    parser = argparse.ArgumentParser(description="Learn from the best of several tries at each task.")
    parser.add_argument("--checkpoint", type=Path, metavar="FILE", help="where a run that is stopped goes on from")
    algorithm = BestOfN(checkpoint=parser.parse_args().checkpoint)
    agl.Trainer(algorithm=algorithm, strategy="shm", progress="off").fit(convert, [float(n) for n in range(1, 13)])
    for step, reward in enumerate(algorithm.curve):
        print(f"step {step}: mean reward {reward:.2f}")


if __name__ == "__main__":
    main()
