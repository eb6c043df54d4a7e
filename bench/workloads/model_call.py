"""What tracing adds to a chat call with 2,000 prompt ids, on the calling thread. Prints one JSON line.

The call is made with the real SDK; the server is an httpx transport that answers from memory. Bursts with and without
a trace that is bound to an attempt of a SQLite store take turns. The medians of two bursts that follow each other are
compared, and the median of these differences is told: a neighbour's work, which comes and goes, then weighs on both.
Timed is the calling thread's own processor time: what the delivery does meanwhile, in a thread of its own, is another
figure.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx2
import openai
import orjson

import agentlightning
from agentlightning.store import SqliteLightningStore
from agentlightning.tracer import OtelTracer

PROMPT_IDS = 2000
RESPONSE_IDS = 100
WARM_UP_CALLS = 200
MESSAGES: Any = [{"role": "system", "content": "s" * 4000}, {"role": "user", "content": "u" * 4000}]
ANSWER = orjson.dumps(
    {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "prompt_token_ids": list(range(100_000, 100_000 + PROMPT_IDS)),
        "choices": [
            {
                "index": 0,
                "finish_reason": "stop",
                "message": {"role": "assistant", "content": "x" * 400},
                "token_ids": list(range(RESPONSE_IDS)),
            }
        ],
        "usage": {"prompt_tokens": PROMPT_IDS, "completion_tokens": RESPONSE_IDS, "total_tokens": 2100},
    }
)


def answer(_request: httpx2.Request) -> httpx2.Response:
    return httpx2.Response(200, content=ANSWER, headers={"content-type": "application/json"})


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--calls", type=int, default=50, help="in each round")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = SqliteLightningStore(Path(folder) / "store.db")
        figures = await measure(store, options.rounds, options.calls)
        await store.close()
    shown = {name: round(value, 1) for name, value in figures.items()}
    print(json.dumps({"version": agentlightning.__version__, "sdk": openai.__version__, **shown}))


async def measure(store: SqliteLightningStore, rounds: int, calls: int) -> dict[str, float]:
    transport = httpx2.MockTransport(answer)
    client = openai.OpenAI(api_key="x", base_url="http://x/v1", http_client=httpx2.Client(transport=transport))
    rollout = await store.start_rollout("task")
    bound: Any = {"store": store, "rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
    plain: list[float] = []
    traced: list[float] = []
    burst(client, WARM_UP_CALLS)
    for _ in range(rounds):
        plain.append(statistics.median(burst(client, calls)))
        with OtelTracer().lifespan() as tracer:
            async with tracer.trace_context(**bound) as recorder:
                traced.append(statistics.median(burst(client, calls)))
        assert len(recorder.spans()) == calls
        assert not recorder.losses.count
    added = [with_trace - without for without, with_trace in zip(plain, traced, strict=True)]
    figures = {"plain_us": plain, "traced_us": traced, "added_us": added}
    return {**{name: statistics.median(of_rounds) for name, of_rounds in figures.items()}, "calls": rounds * calls}


def burst(client: openai.OpenAI, calls: int) -> list[float]:
    """Microseconds of each call."""
    taken = []
    for _ in range(calls):
        began = time.thread_time()
        client.chat.completions.create(model="m", messages=MESSAGES)
        taken.append((time.thread_time() - began) * 1e6)
    return taken


if __name__ == "__main__":
    asyncio.run(main())
