"""The memory of a proxy that runs alone, from its first call to its last; its store is another process.

Starts `agl store`, `agl proxy` and a stub backend, makes calls 64 at once, and reads the proxy's resident memory on the
way. Prints one JSON line.
"""

import argparse
import asyncio
import json
import multiprocessing
import subprocess
import sys
import time

from proxy import drive, free_port, serve_backend, until_open

import agentlightning as agl

CONCURRENCY = 64
ROLLOUTS = 50
FIRST_STEP = 10_000
MEGABYTE = 1024**2


async def measured(calls: int) -> None:
    import psutil

    backend_port, store_port, proxy_port = free_port(), free_port(), free_port()
    backend = multiprocessing.get_context("spawn").Process(target=serve_backend, args=(backend_port,), daemon=True)
    backend.start()
    store = started("store", "--port", str(store_port))
    await until_open(store_port)
    model = f"m=hosted_vllm/m@http://127.0.0.1:{backend_port}/v1"
    proxy = started(
        *("proxy", "--model", model, "--store", f"http://127.0.0.1:{store_port}", "--port", str(proxy_port))
    )
    client = agl.LightningStoreClient(f"http://127.0.0.1:{store_port}")
    try:
        await until_open(proxy_port)
        await until_open(backend_port)
        process = psutil.Process(proxy.pid)
        figures = {"version": agl.__version__, "calls": calls, "started_mb": process.memory_info().rss / MEGABYTE}
        done, sizes = 0, {}
        began = time.perf_counter()
        while done < calls:
            rollout = await client.start_rollout(input={"number": done})
            step = min(FIRST_STEP // 5, calls - done)
            place = f"/rollout/{rollout.rollout_id}/attempt/{rollout.attempt.attempt_id}"
            url = f"http://127.0.0.1:{proxy_port}{place}/v1/chat/completions"
            await drive(url, step, CONCURRENCY, stream=False)
            await client.update_attempt(rollout.rollout_id, rollout.attempt.attempt_id, status="succeeded")
            done += step
            sizes[done] = process.memory_info().rss / MEGABYTE
            print(f"progress: {done:,} calls, {sizes[done]:.0f} MB", file=sys.stderr, flush=True)
        figures["seconds"] = time.perf_counter() - began
        figures["early_mb"] = sizes[min(size for size in sizes if size >= min(FIRST_STEP, calls))]
        figures["late_mb"] = sizes[done]
        print(json.dumps(figures), flush=True)
    finally:
        await client.close()
        for child in (proxy, store):
            child.terminate()
            child.wait(30)
        backend.terminate()


def started(*arguments: str) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "agentlightning.cli", *arguments]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--calls", type=int, default=100_000)
    asyncio.run(measured(parser.parse_args().calls))
