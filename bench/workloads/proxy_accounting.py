"""Whether calls through the LLM proxy are all accounted for while it is killed; prints one JSON line.

usage: proxy_accounting.py [--calls N] [--concurrency N] [--kills N] [--terms N] [--seed N] [--folder PATH]

A model that answers at once, and a proxy with an SQLite store, each run in a process of their own.
Workers call, every call with a prompt of its own, half of them as streams; a call is answered when its whole body has
arrived. At random moments the proxy gets SIGKILL or SIGTERM and is started again on its port. In the end the store must
hold each answered call once. Calls it holds beyond those were in flight when the proxy ended: their answers were on
their way, or lost with it.
"""

import argparse
import asyncio
import json
import logging
import random
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

import agentlightning as agl
from agentlightning.llm_proxy import LLMProxy
from agentlightning.store import SqliteLightningStore

START_SECONDS = 60.0
STOP_SECONDS = 30.0
CALL_SECONDS = 30.0
RETRY_SECONDS = 0.05
FIRST_PORT, LAST_PORT = 20_000, 30_000
"""Below the ports that the system gives to outgoing connections: one of those could take the port of a dead proxy."""
WORDS = ("one", "two", "three", "four")
MODEL = "m"
PROMPT = "gen_ai.prompt.0.content"
OUTCOME = "agentlightning.proxy.outcome"


# ---------------------------------------------------------------------- the model


async def answer(request: web.Request) -> web.StreamResponse:
    body = await request.json()
    whole = {"id": "c-1", "created": 1, "model": MODEL}
    if not body.get("stream"):
        message = {"role": "assistant", "content": " ".join(WORDS)}
        choice = {"index": 0, "finish_reason": "stop", "message": message, "token_ids": [1, 2, 3, 4]}
        usage = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
        return web.json_response(
            {**whole, "object": "chat.completion", "choices": [choice], "prompt_token_ids": [1, 2, 3], "usage": usage}
        )
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    for number, word in enumerate(WORDS):
        is_last = number == len(WORDS) - 1
        choice = {"index": 0, "delta": {"content": word}, "finish_reason": "stop" if is_last else None}
        event = {**whole, "object": "chat.completion.chunk", "choices": [choice]}
        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
    await response.write(b"data: [DONE]\n\n")
    return response


async def run_model() -> None:
    logging.disable(logging.ERROR)  # callers that are killed in the middle of an answer are what this is about
    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


# ---------------------------------------------------------------------- the proxy


def run_proxy(path: str, port: int, model_port: int) -> None:
    """Serve until SIGTERM, then stop as one should."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # also in the threads that are started below
    store = SqliteLightningStore(path)
    params = {"model": f"hosted_vllm/{MODEL}", "api_base": f"http://127.0.0.1:{model_port}/v1"}
    proxy = LLMProxy(port, [{"model_name": MODEL, "litellm_params": params}], store)
    proxy.start()
    print(proxy.port, flush=True)
    signal.sigwait({signal.SIGTERM})
    proxy.stop()
    asyncio.run(store.close())


@asynccontextmanager
async def process(*arguments: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, int]]:
    """A role of this script as a process, with the port it tells."""
    started = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--role", *arguments, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert started.stdout is not None
        told = await asyncio.wait_for(started.stdout.readline(), START_SECONDS)
        yield started, int(told)
    finally:
        if started.returncode is None:
            started.kill()
        await started.wait()


# ---------------------------------------------------------------------- the callers


@dataclass
class Progress:
    """What the callers saw."""

    wanted: int
    made: int = 0
    answered: dict[int, str] = field(default_factory=dict)
    """Number of the call -> rollout."""
    broken: int = 0
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    @property
    def is_done(self) -> bool:
        return len(self.answered) >= self.wanted

    async def until(self, answered: int) -> None:
        async with self.changed:
            await self.changed.wait_for(lambda: len(self.answered) >= answered or self.is_done)


async def call_always(session: aiohttp.ClientSession, url: str, rollout_id: str, progress: Progress) -> None:
    while not progress.is_done:
        number = progress.made
        progress.made += 1
        try:
            is_whole = await is_answered(session, url, number)
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError):
            is_whole = False
        if is_whole:
            progress.answered[number] = rollout_id
            async with progress.changed:
                progress.changed.notify_all()
        else:
            progress.broken += 1
            await asyncio.sleep(RETRY_SECONDS)


async def is_answered(session: aiohttp.ClientSession, url: str, number: int) -> bool:
    """Whether the whole body arrived."""
    is_stream = number % 2 == 1
    body = {"model": MODEL, "stream": is_stream, "messages": [{"role": "user", "content": f"call {number}"}]}
    async with session.post(f"{url}/v1/chat/completions", json=body) as response:
        told = await response.read()
        end = b"data: [DONE]" if is_stream else b"}"
        return response.status == 200 and told.rstrip().endswith(end)


# ---------------------------------------------------------------------- the run


async def end(running: asyncio.subprocess.Process, number: signal.Signals) -> None:
    running.send_signal(number)
    code = await asyncio.wait_for(running.wait(), STOP_SECONDS)
    assert number == signal.SIGKILL or code == 0, f"The proxy ended with {code}."


async def keep_ending(
    arguments: list[str], ends: list[tuple[int, signal.Signals]], progress: Progress, chance: random.Random
) -> float:
    """Start the proxy again and again, ending it when so many calls were answered; returns its longest absence."""
    longest = 0.0
    for threshold, number in [*ends, (progress.wanted, signal.SIGTERM)]:
        began = time.monotonic()
        async with process(*arguments) as (running, _):
            longest = max(longest, time.monotonic() - began)
            await progress.until(threshold)
            await asyncio.sleep(chance.uniform(0, 0.02))
            await end(running, number)
    return longest


async def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    chance = random.Random(options.seed)
    path = folder / "store.db"
    numbers = [signal.SIGKILL] * options.kills + [signal.SIGTERM] * options.terms
    chance.shuffle(numbers)
    thresholds = sorted(chance.sample(range(1, options.calls), len(numbers)))
    store = SqliteLightningStore(path)
    rollouts = [await store.start_rollout(number) for number in range(options.concurrency)]
    progress, port = Progress(options.calls), free_port()
    async with process("model") as (_, model_port):
        timeout = aiohttp.ClientTimeout(total=CALL_SECONDS)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            callers = [
                asyncio.create_task(call_always(session, url_of(port, rollout), rollout.rollout_id, progress))
                for rollout in rollouts
            ]
            arguments = ["proxy", str(path), str(port), str(model_port)]
            began = time.monotonic()
            absence = await keep_ending(arguments, list(zip(thresholds, numbers, strict=True)), progress, chance)
            seconds = time.monotonic() - began
            await asyncio.gather(*callers)
    figures = await compared(store, rollouts, progress)
    await store.close()
    return {**figures, "seconds": round(seconds, 1), "longest_start_s": round(absence, 2)}


async def compared(store: SqliteLightningStore, rollouts: list[agl.AttemptedRollout], seen: Progress) -> dict[str, Any]:
    """Answers against spans."""
    stored: Counter[int] = Counter()
    misplaced = cancelled = 0
    for rollout in rollouts:
        for span in await store.query_spans(rollout.rollout_id, rollout.attempt.attempt_id):
            if span.attributes[OUTCOME] == "answered":
                number = int(str(span.attributes[PROMPT]).removeprefix("call "))
                stored[number] += 1
                misplaced += seen.answered.get(number, rollout.rollout_id) != rollout.rollout_id
            else:
                cancelled += 1
    return {
        "answered": len(seen.answered),
        "broken": seen.broken,
        "stored": stored.total() if hasattr(stored, "total") else sum(stored.values()),
        "missing": len(seen.answered.keys() - stored.keys()),
        "doubled": sum(count > 1 for count in stored.values()),
        "misplaced": misplaced,
        "beyond": len(stored.keys() - seen.answered.keys()),
        "other_outcomes": cancelled,
    }


def url_of(port: int, rollout: agl.AttemptedRollout) -> str:
    return f"http://127.0.0.1:{port}/rollout/{rollout.rollout_id}/attempt/{rollout.attempt.attempt_id}"


def free_port() -> int:
    while True:
        port = random.randint(FIRST_PORT, LAST_PORT)
        with socket.socket() as trial:
            try:
                trial.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def main() -> None:
    parser = argparse.ArgumentParser(description="Are calls through a proxy that is killed all accounted for?")
    parser.add_argument("--calls", type=int, default=20_000)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--terms", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--role", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role is not None:
        role, *rest = options.role
        if role == "model":
            asyncio.run(run_model())
        else:
            run_proxy(rest[0], int(rest[1]), int(rest[2]))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        figures = asyncio.run(run(options, folder))
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
