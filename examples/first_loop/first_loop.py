"""The smallest complete loop: an agent works, rewards come back, the better prompt is kept. No model, no network.

The agent converts miles to kilometres by following its prompt to the letter. The algorithm does not know which prompt
is good. It publishes each candidate, has workers run the tasks with it, reads the rewards and keeps the best one. The
two sides never meet: everything passes through the store.
"""

import argparse
import asyncio
import re
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

import agentlightning as agl
from agentlightning.semconv import AGL_REWARD

KM_PER_MILE = 1.609344
WORKERS = 4
CLAIM_WAIT_SECONDS = 5.0
PATIENCE_SECONDS = 60.0

CANDIDATES = (
    "How many kilometres are {miles} miles?",
    "Convert {miles} miles to kilometres. Round to one decimal and name the unit.",
    "Convert {miles} miles to kilometres. Round to a whole number and name the unit.",
)
TASKS = [{"miles": miles, "expected": f"{miles * KM_PER_MILE:.1f} km"} for miles in (0.5, 1.0, 3.1, 6.2, 13.1, 26.2)]


# ---------------------------------------------------------------------- the agent


def answer(prompt: str) -> str:
    """Do what the prompt says, and nothing it does not say."""
    (miles,) = re.findall(r"[\d.]+(?= miles)", prompt)
    kilometres = float(miles) * KM_PER_MILE
    if "one decimal" in prompt:
        number = f"{kilometres:.1f}"
    elif "whole number" in prompt:
        number = f"{kilometres:.0f}"
    else:
        number = str(kilometres)
    return f"{number} km" if "name the unit" in prompt else number


def grade(given: str, expected: str) -> float:
    """Half for the right number, half for the right unit."""
    given_number, _, given_unit = given.partition(" ")
    number, _, unit = expected.partition(" ")
    return 0.5 * (float(given_number) == float(number)) + 0.5 * (given_unit == unit)


# ---------------------------------------------------------------------- the workers


async def work(store: agl.LightningStore, worker_id: str) -> None:
    """Claim rollouts, run the agent, report; what the agent raises is recorded and the worker goes on."""
    while True:
        claim = await store.dequeue_rollout(worker_id, wait=CLAIM_WAIT_SECONDS)
        if claim is None:
            continue
        ids = (claim.rollout_id, claim.attempt.attempt_id)
        try:
            await run_agent(store, claim)
        except Exception as error:  # noqa: BLE001 # a failed attempt is data, not a crash
            await store.update_attempt(*ids, status="failed", metadata={"error": str(error)})
        else:
            await store.update_attempt(*ids, status="succeeded")


async def run_agent(store: agl.LightningStore, claim: agl.AttemptedRollout) -> None:
    """One attempt: take the prompt this rollout is bound to, answer, and leave the answer and its reward as spans."""
    published = await store.get_resources_by_id(claim.resources_id or "")
    assert published is not None, f"Rollout {claim.rollout_id} is bound to no prompt"
    template = published.resources["prompt"]
    assert isinstance(template, agl.PromptTemplate)
    prompt = template.format(miles=claim.input["miles"])
    if claim.metadata and claim.metadata.get("fails_once") and claim.attempt.sequence_id == 1:
        raise ConnectionError("the line dropped (a failure made on purpose, to show a retry)")
    given = answer(prompt)
    await record(store, claim, "answer", {"prompt": prompt, "answer": given})
    await record(store, claim, AGL_REWARD, {"reward": grade(given, claim.input["expected"])})


async def record(store: agl.LightningStore, claim: agl.AttemptedRollout, name: str, attributes: agl.Attributes) -> None:
    """Add a span to the attempt."""
    rollout_id, attempt_id, now = claim.rollout_id, claim.attempt.attempt_id, time.time()
    span = agl.Span.from_attributes(
        name=name, attributes=attributes, rollout_id=rollout_id, attempt_id=attempt_id, start_time=now, end_time=now
    )
    span.sequence_id = await store.get_next_span_sequence_id(rollout_id, attempt_id)
    await store.add_span(span)


# ---------------------------------------------------------------------- the algorithm


@dataclass(frozen=True)
class Score:
    """How one candidate did."""

    prompt: agl.PromptTemplate
    resources_id: str
    mean_reward: float
    rollouts: int
    attempts: int


async def learn(store: agl.LightningStore, console: Console) -> list[Score]:
    """Measure every candidate, publish the best one as the latest resources, and keep the figures as a run."""
    run = await store.start_run("first-loop", config={"candidates": list(CANDIDATES), "tasks": len(TASKS)})
    scores = []
    for step, template in enumerate(CANDIDATES):
        with console.status(f"candidate {step + 1} of {len(CANDIDATES)}"):
            score = await measure(store, template, fails_once=step == 0)
        await store.add_metrics(run.run_id, step, {"mean_reward": score.mean_reward, "attempts": score.attempts})
        console.print(f"candidate {step + 1}: mean reward {score.mean_reward:.2f} in {score.attempts} attempts")
        scores.append(score)
    best = max(scores, key=lambda score: score.mean_reward)
    await store.update_resources(best.resources_id, {"prompt": best.prompt})
    summary = {"best_resources_id": best.resources_id, "mean_reward": best.mean_reward}
    await store.finish_run(run.run_id, "succeeded", summary=summary)
    return scores


async def measure(store: agl.LightningStore, template: str, *, fails_once: bool) -> Score:
    """Publish a prompt, have every task run with it, and average the rewards."""
    prompt = agl.PromptTemplate(template=template, engine="f-string")
    published = await store.add_resources({"prompt": prompt})
    patience = agl.RolloutConfig(max_attempts=2, retry_condition=["failed"])
    rollout_ids = []
    for number, task in enumerate(TASKS):
        metadata = {"fails_once": fails_once and number == 0}
        rollout = await store.enqueue_rollout(task, "train", published.resources_id, patience, metadata)
        rollout_ids.append(rollout.rollout_id)
    finished = await store.wait_for_rollouts(rollout_ids, timeout=PATIENCE_SECONDS)
    if len(finished) < len(rollout_ids):
        raise TimeoutError(f"{len(rollout_ids) - len(finished)} rollouts took longer than {PATIENCE_SECONDS:.0f} s.")
    rewards = [await reward_of(store, rollout.rollout_id) for rollout in finished]
    attempts = sum([len(await store.query_attempts(rollout.rollout_id)) for rollout in finished])
    return Score(prompt, published.resources_id, sum(rewards) / len(rewards), len(finished), attempts)


async def reward_of(store: agl.LightningStore, rollout_id: str) -> float:
    """The reward of the newest attempt; a rollout that has none earned nothing."""
    spans = await store.query_spans(rollout_id, "latest", name=AGL_REWARD)
    reward = spans[-1].attributes["reward"] if spans else 0.0
    assert isinstance(reward, float)
    return reward


# ---------------------------------------------------------------------- the command


async def run_loop(path: Path, console: Console) -> None:
    async with agl.SqliteLightningStore(path) as store:
        names = [f"worker-{number}" for number in range(1, WORKERS + 1)]
        workers = [asyncio.create_task(work(store, name), name=name) for name in names]
        try:
            scores = await learn(store, console)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
    show(console, scores, path)


def show(console: Console, scores: Sequence[Score], path: Path) -> None:
    table = Table("candidate", "mean reward", "rollouts", "attempts")
    for score in scores:
        table.add_row(score.prompt.template, f"{score.mean_reward:.2f}", str(score.rollouts), str(score.attempts))
    console.print(table)
    best = max(scores, key=lambda score: score.mean_reward)
    for line in (f"winner: {best.prompt.template}", f"store:  {path}", f"look:   agl store status {path}"):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description="Find the better of three prompts with a store, four workers and a reward.",
        epilog="example:\n  python examples/first_loop/first_loop.py --store first_loop.db",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--store", type=Path, metavar="PATH", help="store file (default: in a new temporary folder)")
    path: Path | None = parser.parse_args(argv).store
    if path is None:
        path = Path(tempfile.mkdtemp(prefix="first-loop-")) / "first_loop.db"
    asyncio.run(run_loop(path, Console()))


if __name__ == "__main__":
    main()
