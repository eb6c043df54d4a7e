"""Rollouts a second through `Trainer.fit`; run it with the interpreter that has the package to measure.

Each rollout returns a reward; the algorithm enqueues everything, waits, and checks every reward. Prints one JSON line.
Only the public API of the releases is used, but for `max_concurrency`.
"""

import argparse
import asyncio
import json
import logging
import random
import socket
import time
from typing import Any

logging.disable(logging.WARNING)

import agentlightning as agl  # noqa: E402 # logging comes first

PATIENCE_SECONDS = 300


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("strategy", choices=["cs", "shm", "ray"], help="ray: two nodes in this machine")
    parser.add_argument("--store", help="such as sqlite:///runs.db; in memory if left out")
    parser.add_argument("--rollouts", type=int, default=200)
    parser.add_argument("--runners", type=int, default=8)
    parser.add_argument("--sleep", type=float, default=0.0, help="seconds each rollout awaits")
    parser.add_argument("--spread", type=float, default=0.0, help="share by which these seconds vary, up and down")
    parser.add_argument("--concurrency", type=int, default=0, help="of each runner, where the package has it")
    parser.add_argument("--warm", action="store_true", help="begin when all runners are there")
    options = parser.parse_args()
    strategy: dict[str, Any] = {"type": options.strategy, "n_runners": options.runners}
    if options.strategy == "ray":
        cluster = two_nodes()
        strategy |= {"address": cluster.address, "runtime_env": {"working_dir": None}}
    else:
        strategy |= {"server_port": free_port()} if options.strategy == "cs" else {"main_thread": "algorithm"}
    runner: dict[str, Any] = {"type": "agentlightning.LitAgentRunner", "poll_interval": 0.05}
    if options.concurrency:
        runner["max_concurrency"] = options.concurrency
    began = time.perf_counter()
    trainer = agl.Trainer(
        algorithm=algorithm(options, began),
        n_runners=options.runners,
        strategy=strategy,
        tracer=agl.OtelTracer(),
        runner=runner,
        **({"store": options.store} if options.store else {}),
    )
    trainer.fit(agent(options.sleep, options.spread))


def two_nodes() -> Any:
    """A Ray cluster; it ends with this program."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"include_dashboard": False})
    cluster.add_node()
    return cluster


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def agent(sleep: float, spread: float) -> Any:
    @agl.llm_rollout
    async def work(task: Any, llm: Any) -> float:
        if sleep:
            chance = random.Random(task["i"])
            await asyncio.sleep(sleep * chance.uniform(1 - spread, 1 + spread))
        return float(task["i"] % 2)

    return work


def algorithm(options: argparse.Namespace, began: float) -> Any:
    @agl.algo
    async def run(*, store: Any) -> None:
        await store.add_resources({"llm": agl.LLM(endpoint="http://127.0.0.1:1/v1", model="none")})
        while options.warm and len(await store.query_workers()) < options.runners:  # noqa: ASYNC110 # workers come without a notice
            await asyncio.sleep(0.05)
        sent_at, cpu_at = time.perf_counter(), time.process_time()
        numbers = {}
        for i in range(options.rollouts):
            rollout = await store.enqueue_rollout(input={"i": i}, mode="train")
            numbers[rollout.rollout_id] = i
        first = await until_done(store, list(numbers), sent_at)
        took, cpu_took = time.perf_counter() - sent_at, time.process_time() - cpu_at
        for rollout_id, i in numbers.items():
            spans = await store.query_spans(rollout_id)
            assert agl.find_final_reward(list(spans)) == float(i % 2), (rollout_id, i)
        figures = {
            "rollouts_per_s": round(options.rollouts / took, 1),
            "cpu_ms_per_rollout": round(1000 * cpu_took / options.rollouts, 3),  # of the algorithm's process
            "fit_to_first_done_s": round(first - began, 2),
        }
        print(json.dumps({"version": agl.__version__, **vars(options), **figures}), flush=True)

    return run


async def until_done(store: Any, rollout_ids: list[str], since: float) -> float:
    """When the first of them was done."""
    first, done = 0.0, set[str]()
    while len(done) < len(rollout_ids):
        waiting = [rollout_id for rollout_id in rollout_ids if rollout_id not in done]
        for rollout in await store.wait_for_rollouts(rollout_ids=waiting, timeout=0.05):
            done.add(rollout.rollout_id)
            first = first or time.perf_counter()
            assert rollout.status == "succeeded", rollout
        await asyncio.sleep(0)
        if time.perf_counter() - since > PATIENCE_SECONDS:
            raise RuntimeError(f"only {len(done)} of {len(rollout_ids)} rollouts finished in {PATIENCE_SECONDS} s")
    return first


if __name__ == "__main__":
    main()
