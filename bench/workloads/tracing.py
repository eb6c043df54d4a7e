"""What observing costs an agent; run it with the interpreter that has the package to measure. Prints one JSON line.

`emit`: microseconds of `emit_reward` in a bound trace, and of a bare SDK span with the same attributes, in turns.
`seen`: milliseconds from `emit_reward` until a memory store and a SQLite store have the span, while the agent goes on.
`sustain`: a steady rate of spans into a SQLite store. `agent`: how much work a CPU-bound thread gets done while it
emits at a steady rate, against the same thread without spans, in turns.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

from opentelemetry.sdk.trace import TracerProvider

import agentlightning
from agentlightning.emitter import emit_annotation, emit_reward
from agentlightning.store import InMemoryLightningStore, LightningStore, SqliteLightningStore
from agentlightning.tracer import OtelTracer
from agentlightning.tracer.trace_shipper import TraceShipper, trace_shippers

BURST = 50
"""Spans that are timed at a stretch; so few that the delivery seldom begins meanwhile."""
EMIT_ROUNDS = 160
SEEN_ROUNDS = 40
SEEN_PHASES = 7
TICK_SECONDS = 0.01
WINDOW_SECONDS = 0.5
LLM_CALL = {"gen_ai.request.model": "m", "gen_ai.prompt": "What is 2+2? " * 20, "tokens": json.dumps(list(range(200)))}


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("emit", "seen", "sustain", "agent"))
    parser.add_argument("--rate", type=int, default=5000, help="spans a second")
    parser.add_argument("--seconds", type=float, default=10.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, OtelTracer(instrument=False).lifespan() as tracer:
        if options.what == "emit":
            figures = await emit(tracer)
        elif options.what == "seen":
            figures = await seen(tracer, Path(folder))
        else:
            store = SqliteLightningStore(Path(folder) / "store.db")
            measure = sustain if options.what == "sustain" else agent
            figures = await measure(tracer, store, options.rate, options.seconds)
            tracer.teardown_worker(0)
            await store.close()
    print(json.dumps({"version": agentlightning.__version__, **figures}))


async def attempt(store: LightningStore) -> dict[str, Any]:
    """What binds a trace to a new attempt."""
    rollout = await store.start_rollout("task")
    return {"store": store, "rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}


# ---------------------------------------------------------------------- emit


async def emit(tracer: OtelTracer) -> dict[str, Any]:
    attributes = dict(emit_reward(0.5, propagate=False).attributes or {})
    bare = TracerProvider(shutdown_on_exit=False).get_tracer("bare")

    def bare_span() -> None:
        with bare.start_span("agentlightning.reward", attributes=attributes):  # type: ignore[arg-type] # plain values
            pass

    store = InMemoryLightningStore()
    bound = await attempt(store)
    times: dict[str, list[float]] = {"bare": [], "ours": []}
    for _ in range(EMIT_ROUNDS):
        times["bare"].append(microseconds(bare_span))
        async with tracer.trace_context(**bound):
            times["ours"].append(microseconds(lambda: emit_reward(0.5)))
    medians = {f"{who}_us": round(statistics.median(taken), 2) for who, taken in times.items()}
    return {**medians, **{f"best_{who}_us": round(min(taken), 2) for who, taken in times.items()}}


def microseconds(call: Callable[[], Any]) -> float:
    return timeit.timeit(call, number=BURST) / BURST * 1e6


# ---------------------------------------------------------------------- seen


async def seen(tracer: OtelTracer, folder: Path) -> dict[str, Any]:
    figures = {}
    for name, store in (("memory", InMemoryLightningStore()), ("sqlite", SqliteLightningStore(folder / "seen.db"))):
        times = []
        async with tracer.trace_context(**await attempt(store)):
            notices = store.subscribe(["span"])
            for number in range(SEEN_ROUNDS):
                await asyncio.sleep(
                    number % SEEN_PHASES * TICK_SECONDS
                )  # at another moment of the loop's nap each time
                began = time.perf_counter()
                emit_reward(0.5)
                await notices.__anext__()
                times.append((time.perf_counter() - began) * 1e3)
        figures |= {f"{name}_ms": round(statistics.median(times), 1), f"worst_{name}_ms": round(max(times), 1)}
        tracer.teardown_worker(0)
        tracer.init_worker(0)
        await store.close()
    return figures


# ---------------------------------------------------------------------- sustain


async def sustain(tracer: OtelTracer, store: LightningStore, rate: int, seconds: float) -> dict[str, Any]:
    bound = await attempt(store)
    delivery = trace_shippers().acquire(store)
    began = time.perf_counter()
    async with tracer.trace_context(**bound) as recorder:
        emitted, peak, lag = await asyncio.to_thread(emit_steadily, delivery, rate, seconds)
        took = time.perf_counter() - began
    flushed = time.perf_counter() - began - took
    trace_shippers().release(delivery)
    statistics_now = await store.statistics()
    return {
        "spans": emitted,
        "spans_per_s": round(emitted / took),
        "stored": statistics_now["total_spans"],
        "lost": recorder.losses.count,
        "peak_queue": peak,
        "worst_lag_s": round(lag, 3),
        "flush_s": round(flushed, 3),
    }


def emit_steadily(delivery: TraceShipper, rate: int, seconds: float) -> tuple[int, int, float]:
    """Emit at a rate, faster where it fell behind; how many that were, the longest queue, and the longest delay."""
    began = time.perf_counter()
    total, emitted, peak, lag = int(rate * seconds), 0, 0, 0.0
    while emitted < total:
        due = min(total, int((time.perf_counter() - began) * rate))
        for _ in range(due - emitted):
            emit_annotation(LLM_CALL)
        emitted = due
        peak = max(peak, len(delivery._queue))
        lag = max(lag, time.perf_counter() - began - emitted / rate)
        time.sleep(TICK_SECONDS)
    return emitted, peak, lag


# ---------------------------------------------------------------------- agent


async def agent(tracer: OtelTracer, store: LightningStore, rate: int, seconds: float) -> dict[str, Any]:
    bound = await attempt(store)
    alone: list[float] = []
    observed: list[float] = []
    async with tracer.trace_context(**bound) as recorder:
        for _ in range(int(seconds / WINDOW_SECONDS / 2)):
            alone.append(await asyncio.to_thread(work, 0))
            observed.append(await asyncio.to_thread(work, rate))
    losses = [1 - slow / fast for fast, slow in zip(alone, observed, strict=True)]
    return {
        "rate": rate,
        "spans": len(recorder.spans()),
        "lost": recorder.losses.count,
        "slowdown_percent": round(statistics.median(losses) * 100, 2),
        "slowdowns_percent": [round(loss * 100, 1) for loss in losses],
    }


def work(rate: int) -> float:
    """Units of computation a second, emitting spans on the way."""
    began = time.perf_counter()
    units = emitted = 0
    while (now := time.perf_counter() - began) < WINDOW_SECONDS:
        sum(number * number for number in range(500))
        units += 1
        if now * rate > emitted:
            emit_annotation(LLM_CALL)
            emitted += 1
    return units / (time.perf_counter() - began)


if __name__ == "__main__":
    asyncio.run(main())
