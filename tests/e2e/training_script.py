"""A training as a user's script, for tests that kill it: `python training_script.py STORE PORT [options]`.

Its algorithm names the rollouts itself, so that one that is started again on the same store takes up what the first one
left. Its agent writes a line for each rollout that it begins into a file, and for tasks that say so it waits, or kills
its own process once.
"""

import argparse
import asyncio
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import agentlightning as agl
from agentlightning.errors import StoreError
from agentlightning.types import RolloutConfig

RESOURCES: agl.NamedResources = {"prompt": agl.PromptTemplate(template="Do it.", engine="f-string")}
PATIENT = RolloutConfig(max_attempts=4, retry_condition=["unresponsive", "timeout"], unresponsive_seconds=8.0)


class Scripted(agl.LitAgent[Any]):
    """Does what its task says."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def rollout(self, task: Any, resources: Any, rollout: Any) -> float:
        with open(self.folder / "begun.log", "a") as log:
            log.write(f"{task['n']} {os.getpid()}\n")
        if task.get("hang"):
            time.sleep(1000)
        if task.get("die"):
            self._die_once(task["n"])
        time.sleep(task.get("seconds", 0.0))
        return float(task["n"])

    def _die_once(self, number: int) -> None:
        try:
            (self.folder / f"died-{number}").touch(exist_ok=False)
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)


def tasks_of(options: argparse.Namespace) -> list[dict[str, Any]]:
    seconds = options.seconds
    tasks: list[dict[str, Any]] = [{"n": number, "seconds": seconds} for number in range(options.tasks)]
    if options.hang:
        tasks[0]["hang"] = True
    if options.die:
        tasks[1]["die"] = True
    return tasks


@agl.algo
async def resuming(*, store: agl.LightningStore, train_dataset: Any) -> None:
    """Enqueues what is not there yet, and waits for all of it."""
    await store.add_resources(RESOURCES)
    ids = [f"task-{task['n']}" for task in train_dataset]
    for rollout_id, task in zip(ids, train_dataset, strict=True):
        if await store.get_rollout_by_id(rollout_id) is None:
            await store.enqueue_rollout(task, mode="train", config=PATIENT, rollout_id=rollout_id)
    done: Any = []
    while len(done) < len(ids):
        done = await store.wait_for_rollouts(rollout_ids=ids, timeout=1.0)
    print("all done", sorted({rollout.status for rollout in done}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("store")
    parser.add_argument("port", type=int)
    parser.add_argument("--tasks", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--runners", type=int, default=2)
    parser.add_argument("--restarts", type=int, default=0)
    parser.add_argument("--grace", type=float, default=1.0)
    parser.add_argument("--strategy", default="cs")
    parser.add_argument("--hang", action="store_true")
    parser.add_argument("--die", action="store_true")
    parser.add_argument("--awaited", action="store_true", help="with `await trainer.run(...)`")
    options = parser.parse_args()
    strategy: Any = agl.ClientServerExecutionStrategy(
        server_host="127.0.0.1",
        server_port=options.port,
        n_runners=options.runners,
        graceful_timeout=options.grace,
        terminate_timeout=options.grace,
        max_restarts=options.restarts,
    )
    if options.strategy == "shm":
        strategy = agl.SharedMemoryExecutionStrategy(
            n_runners=options.runners, main_thread="algorithm", graceful_delay=options.grace, join_timeout=5.0
        )
    trainer = agl.Trainer(store=options.store, algorithm=resuming, strategy=strategy, progress="off")
    agent = Scripted(Path.cwd())
    try:
        if options.awaited:
            trainer.add_agent(agent)
            asyncio.run(trainer.run(tasks_of(options)))
        else:
            trainer.fit(agent, tasks_of(options))
    except (RuntimeError, StoreError) as error:
        print("fit raised", error, flush=True)
        sys.exit(3)
    print("fit returned", flush=True)


if __name__ == "__main__":
    main()
