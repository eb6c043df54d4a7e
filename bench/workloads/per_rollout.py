"""CPU time per rollout, batch by batch; run it with the package to measure on PYTHONPATH.

`make speed-check` runs this file under two revisions of the package at once. Both prepare once and do one batch for
each line on standard input, so that their batches take turns. Prints one JSON line when it is ready, and one for each
batch: the CPU seconds of all its processes per rollout, per call or per span.
"""

import argparse
import asyncio
import gc
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import psutil

logging.disable(logging.WARNING)

Batch = Callable[[], Awaitable[int]]
"""Does a batch of work and returns how many rollouts, calls or spans it was."""


def clock_of(pid: int) -> float:
    """CPU seconds that a process of this machine has used by all its threads, also by those that have ended."""
    if sys.platform == "linux":
        return time.clock_gettime((~pid << 3) | 2)  # the clock of clock_getcpuclockid(3), which Python does not have
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def processes(without: frozenset[int]) -> dict[int, float]:
    """CPU seconds by process: of this one and of all it has started."""
    me = psutil.Process()
    return {each.pid: clock_of(each.pid) for each in [me, *me.children(recursive=True)] if each.pid not in without}


async def serve_batches(batch: Batch, without: frozenset[int] = frozenset()) -> None:
    """Do a batch for each line of standard input, until it ends; the first one warms up and counts for nothing.

    Args:
        without: Processes that belong to the workload, not to the package.
    """
    await batch()
    tell({"ready": os.path.dirname(sys.modules["agentlightning"].__file__ or "")})
    while await asyncio.to_thread(sys.stdin.readline):
        gc.collect()  # so that no batch pays for the garbage of another
        began = processes(without)
        count = await batch()
        ended = processes(without)
        if gone := began.keys() - ended.keys():
            raise SystemExit(f"{len(gone)} processes ended during a batch; their CPU time is not known.")
        tell({"cpu_seconds": (sum(ended.values()) - sum(began.values())) / count})


def tell(figures: dict[str, Any]) -> None:
    print(json.dumps(figures), flush=True)


async def store_batches(kind: str, *, rollouts: int) -> None:
    """Each batch has a store of its own."""
    import store as workload

    load = workload.Load(rollouts, spans=10, workers=16)

    async def batch(folder: str) -> int:
        store = workload.build_store(kind, tempfile.mkdtemp(dir=folder))
        await workload.run_workload(store, load)
        await workload.close(store)
        return rollouts

    with tempfile.TemporaryDirectory() as folder:
        await serve_batches(partial(batch, folder))


async def server_batches(*, rollouts: int, is_batched: bool) -> None:
    """All batches go to one server, whose start would cost more than a batch."""
    import store as workload

    load = workload.Load(rollouts, spans=10, workers=16, batch=is_batched)
    async with workload.running(partial(workload.build_server, "http", "")) as server:
        client = workload.package().LightningStoreClient(server.url)

        async def batch() -> int:
            await workload.run_workload(client, load)
            return rollouts

        await serve_batches(batch)
        await client.close()


def fit_batches(strategy: str, *, runners: int, rollouts: int) -> None:
    """One `fit`, whose algorithm does the batches."""
    import trainer as workload

    agl = workload.agl

    @agl.algo
    async def algorithm(*, store: Any) -> None:
        await store.add_resources({"llm": agl.LLM(endpoint="http://127.0.0.1:1/v1", model="none")})
        while len(await store.query_workers()) < runners:  # noqa: ASYNC110 # workers come without a notice
            await asyncio.sleep(0.05)

        async def batch() -> int:
            sent = [await store.enqueue_rollout(input={"i": i}, mode="train") for i in range(rollouts)]
            rollout_ids = [rollout.rollout_id for rollout in sent]
            finished = await store.wait_for_rollouts(rollout_ids=rollout_ids, timeout=workload.PATIENCE_SECONDS)
            assert [rollout.status for rollout in finished] == ["succeeded"] * rollouts, finished
            for rollout_id in rollout_ids:
                assert agl.find_final_reward(list(await store.query_spans(rollout_id))) is not None, rollout_id
            return rollouts

        await serve_batches(batch)

    placed = {"server_port": workload.free_port()} if strategy == "cs" else {"main_thread": "algorithm"}
    agl.Trainer(
        algorithm=algorithm,
        n_runners=runners,
        strategy={"type": strategy, "n_runners": runners, **placed},
        tracer=agl.OtelTracer(),
        runner={"type": "agentlightning.LitAgentRunner", "poll_interval": 0.05},
    ).fit(workload.agent(0.0, 0.0))


async def proxy_batches(*, calls: int) -> None:
    """Calls through `LLMProxy` to a stub that answers at once; the CPU time of the stub does not count."""
    import proxy as workload

    async with workload.proxied_rollout() as proxied:

        async def batch() -> int:
            await workload.drive(proxied.url, calls, concurrency=16, stream=False)
            return calls

        await serve_batches(batch, frozenset([proxied.backend_pid]))


async def adapter_batches(*, spans: int, repeats: int) -> None:
    import adapter as workload

    trace = workload.trace(spans)

    async def batch() -> int:
        workload.best_seconds(trace, repeats)
        return spans * repeats

    await serve_batches(batch)


ROWS: dict[str, Callable[[], Any]] = {
    "memory": partial(store_batches, "memory", rollouts=400),
    "sqlite": partial(store_batches, "sqlite", rollouts=200),
    "http": partial(server_batches, rollouts=100, is_batched=False),
    "http-batched": partial(server_batches, rollouts=300, is_batched=True),
    "fit-shm": partial(fit_batches, "shm", runners=1, rollouts=400),
    "fit-cs": partial(fit_batches, "cs", runners=2, rollouts=300),
    "proxy": partial(proxy_batches, calls=200),
    "adapter": partial(adapter_batches, spans=3000, repeats=10),
}
"""What is measured, by the name of its row."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the CPU time per rollout, batch by batch.")
    parser.add_argument("row", choices=list(ROWS))
    serving = ROWS[parser.parse_args().row]()
    if serving is not None:
        asyncio.run(serving)


if __name__ == "__main__":
    main()
