"""What tracing adds to a chat call with 2,000 prompt ids, on the calling thread. Prints one JSON line.

The call is made with the real SDK; the server is an httpx transport that answers from memory. Bursts with and without
a bound trace take turns, and the medians of all calls are compared.
"""

import argparse
import asyncio
import json
import statistics
import time
from typing import Any

import httpx2
import openai
import orjson

import agentlightning
from agentlightning.store import InMemoryLightningStore
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
    parser.add_argument("--calls", type=int, default=100, help="in each round")
    options = parser.parse_args()
    transport = httpx2.MockTransport(answer)
    client = openai.OpenAI(api_key="x", base_url="http://x/v1", http_client=httpx2.Client(transport=transport))
    store = InMemoryLightningStore()
    rollout = await store.start_rollout("task")
    bound: Any = {"store": store, "rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
    plain: list[float] = []
    traced: list[float] = []
    burst(client, WARM_UP_CALLS)
    for _ in range(options.rounds):
        plain += burst(client, options.calls)
        with OtelTracer().lifespan() as tracer:
            async with tracer.trace_context(**bound) as recorder:
                traced += burst(client, options.calls)
    medians = {"plain_us": statistics.median(plain), "traced_us": statistics.median(traced)}
    added = medians["traced_us"] - medians["plain_us"]
    figures = {**medians, "added_us": added, "spans": len(recorder.spans())}
    shown = {name: round(value, 1) for name, value in figures.items()}
    print(json.dumps({"version": agentlightning.__version__, "sdk": openai.__version__, **shown}))


def burst(client: openai.OpenAI, calls: int) -> list[float]:
    """Microseconds of each call."""
    taken = []
    for _ in range(calls):
        began = time.perf_counter()
        client.chat.completions.create(model="m", messages=MESSAGES)
        taken.append((time.perf_counter() - began) * 1e6)
    return taken


if __name__ == "__main__":
    asyncio.run(main())
