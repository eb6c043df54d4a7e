"""Tokens a second of a server, or of transformers' `generate`, at several numbers of callers.

    python bench/gpu/speed.py FOLDER embedded                   the engine of this package
    python bench/gpu/speed.py FOLDER vllm                       vLLM, started for this
    python bench/gpu/speed.py FOLDER http://127.0.0.1:8000/v1   a server that runs already
    python bench/gpu/speed.py FOLDER generate                   transformers, the callers' prompts in one batch

Callers use the chat route and want log-probabilities and token ids, as a training does. Every answer has the same
number of tokens, whatever the model would say. The client is one process on the same machine, and the best of the
rounds counts.
"""

import argparse
import asyncio
import contextlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import results
import task
import training

NAME = "policy"
ANSWER_SECONDS = 600.0
WARM_UP_CALLERS = 16


@dataclass(frozen=True)
class Server:
    """Where to call, and as whom."""

    address: str
    model: str
    api_key: str = "none"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    results.add_options(parser)
    parser.add_argument("engine", help="embedded, vllm, generate, or the address of a server")
    parser.add_argument("--engine-label", help="the engine's name in the tables; vllm for an address")
    parser.add_argument("--model", help="what a running server calls the model; the first of its list by default")
    parser.add_argument("--api-key", default=os.environ.get("VLLM_API_KEY", "none"), help="of a running server")
    parser.add_argument("--callers", default="1,16,64,256", help="numbers of callers (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=128, help="of each answer (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="of which the best counts (default: %(default)s)")
    parser.add_argument("--per-caller", type=int, default=2, help="requests of a caller in a round (default: 2)")
    options = parser.parse_args()
    levels = [int(one) for one in options.callers.split(",")]
    if options.engine == "generate":
        measure_generate(options, levels)
        return
    if options.engine == "vllm" and (reason := training.why_not("vllm")) is not None:
        results.add(options.results, "speed", engine="vllm", model=results.label_of(options), not_run=reason)
        return
    with serving(options, max(levels)) as server:
        asyncio.run(measure_server(options, levels, server))


# ---------------------------------------------------------------------- servers


@contextlib.contextmanager
def serving(options: argparse.Namespace, max_sequences: int) -> Iterator[Server]:
    """The server to measure: one that runs, or one that runs for so long."""
    if options.engine.startswith("http"):
        address = options.engine.rstrip("/")
        address = address if address.endswith("/v1") else address + "/v1"
        model = options.model or asyncio.run(first_model(address, options.api_key))
        yield Server(address, model, options.api_key)
        return
    engine = new_engine(options, max_sequences)
    engine.start()
    try:
        found = engine.model_config()["litellm_params"]
        yield Server(found["api_base"], found["model"].partition("/")[2], found.get("api_key") or "none")
    finally:
        engine.stop()


def new_engine(options: argparse.Namespace, max_sequences: int) -> Any:
    """An engine as a training makes it."""
    from agentlightning.engine.base import EngineRequest

    if options.engine == "embedded":
        from agentlightning.engine.embedded import EngineServer

        return EngineServer(options.folder, name=NAME, max_sequences=max_sequences, device=options.device)
    if options.engine == "vllm":
        from agentlightning.engine.vllm import VllmOptions

        return VllmOptions().create(
            EngineRequest(options.folder, NAME, device=options.device, max_sequences=max_sequences)
        )
    raise SystemExit(f"engine is '{options.engine}'; give embedded, vllm, generate or an address.")


async def first_model(address: str, api_key: str) -> str:
    async with aiohttp.ClientSession(headers=_headers(api_key)) as session, session.get(f"{address}/models") as answer:
        return str((await answer.json())["data"][0]["id"])


async def measure_server(options: argparse.Namespace, levels: list[int], server: Server) -> None:
    timeout = aiohttp.ClientTimeout(total=ANSWER_SECONDS)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=_headers(server.api_key)) as session:
        length = await fixed_length(session, server, options.tokens)
        warm = min(WARM_UP_CALLERS, max(levels))
        await one_round(session, server, bodies(server, length, warm, seed=0), warm)
        for callers in levels:
            count = max(2, options.per_caller * callers)
            rounds = [
                await one_round(session, server, bodies(server, length, count, seed=1000 * callers + number), callers)
                for number in range(1, options.rounds + 1)
            ]
            tell(options, callers, rounds)


async def fixed_length(session: aiohttp.ClientSession, server: Server, tokens: int) -> dict[str, Any]:
    """How this server is asked for answers of one length; not all of them know vLLM's `ignore_eos`."""
    for how in ({"ignore_eos": True}, {"min_tokens": tokens}):
        length = {**how, "max_tokens": tokens}
        (body,) = bodies(server, length, 1, seed=0)
        async with session.post(f"{server.address}/chat/completions", json=body) as response:
            text = await response.text()
            if response.status == 200 and json.loads(text)["usage"]["completion_tokens"] == tokens:
                return length
    raise SystemExit(f"{server.address} gives no answers of {tokens} tokens; the last one was: {text[:600]}")


def bodies(server: Server, length: dict[str, Any], count: int, *, seed: int) -> list[dict[str, Any]]:
    """Requests as the proxy of a training sends them."""
    fixed = {"model": server.model, "temperature": 1.0, "logprobs": True, "return_token_ids": True, **length}
    return [{**fixed, "messages": task.letters_messages(one)} for one in task.tasks(count, seed=seed)]


async def one_round(
    session: aiohttp.ClientSession, server: Server, waiting: list[dict[str, Any]], callers: int
) -> dict[str, Any]:
    """So many callers, each of which takes the next request when it has its answer."""
    tokens, seconds_each = 0, []

    async def work() -> None:
        nonlocal tokens
        while waiting:
            body, began = waiting.pop(), time.perf_counter()
            async with session.post(f"{server.address}/chat/completions", json=body) as response:
                text = await response.read()
            if response.status != 200:
                raise SystemExit(f"{server.address} answers {response.status}: {text[:600]!r}")
            answer = json.loads(text)
            seconds_each.append(time.perf_counter() - began)
            choice = answer["choices"][0]
            if len(choice["token_ids"]) != len(choice["logprobs"]["content"]):
                raise SystemExit(f"{server.address} gives other token ids than log-probabilities: {text[:600]!r}")
            tokens += answer["usage"]["completion_tokens"]

    began = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(callers)))
    seconds = time.perf_counter() - began
    seconds_each.sort()
    return {"tokens_per_s": tokens / seconds, "median_s": seconds_each[len(seconds_each) // 2], "tokens": tokens}


def _headers(api_key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"}


# ---------------------------------------------------------------------- generate


def measure_generate(options: argparse.Namespace, levels: list[int]) -> None:
    """`generate` has no server, so the callers' prompts are one batch; neither ids nor text cross a network."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = "cuda" if torch.cuda.is_available() and options.device != "cpu" else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(options.folder, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(options.folder, dtype=torch.bfloat16).to(device).eval()

    def generated(callers: int, seed: int) -> dict[str, Any]:
        messages = [task.letters_messages(one) for one in task.tasks(callers, seed=seed)]
        texts = [tokenizer.apply_chat_template(one, add_generation_prompt=True, tokenize=False) for one in messages]
        batch = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False).to(device)
        began = time.perf_counter()
        with torch.inference_mode():
            ids = model.generate(
                input_ids=batch["input_ids"],
                attention_mask=batch["attention_mask"],
                do_sample=True,
                top_k=0,
                min_new_tokens=options.tokens,
                max_new_tokens=options.tokens,
                pad_token_id=tokenizer.pad_token_id,
            ).cpu()
        seconds = time.perf_counter() - began
        tokens = callers * (ids.shape[1] - batch["input_ids"].shape[1])
        return {"tokens_per_s": tokens / seconds, "median_s": seconds, "tokens": tokens}

    generated(1, seed=0)
    for callers in levels:
        tell(options, callers, [generated(callers, 1000 * callers + number) for number in range(options.rounds)])


def tell(options: argparse.Namespace, callers: int, rounds: list[dict[str, Any]]) -> None:
    best = max(rounds, key=lambda one: one["tokens_per_s"])
    given = "vllm" if options.engine.startswith("http") else options.engine
    results.add(
        options.results,
        "speed",
        engine=options.engine_label or given,
        model=results.label_of(options),
        callers=callers,
        tokens_per_s=round(best["tokens_per_s"], 1),
        median_s=round(best["median_s"], 3),
        rounds=[round(one["tokens_per_s"], 1) for one in rounds],
        tokens_per_answer=options.tokens,
    )


if __name__ == "__main__":
    main()
