"""Watch an agent without changing it: what it did becomes a tree, triplets and a report. No key, no network.

The agent is `shop_agent.py`, the model `small_model.py`. Every model call of the agent becomes a span in a SQLite
store, with its token ids; the adapters make of the spans what an algorithm can train on.
"""

import argparse
import asyncio
import os
import tempfile
from pathlib import Path
from typing import Any

import shop_agent
import small_model

from agentlightning.adapter import TraceReport, TracerTraceToTriplet, TraceToTrajectory, TraceTree
from agentlightning.emitter import emit_reward
from agentlightning.store import LightningStore, SqliteLightningStore
from agentlightning.tracer import OtelTracer
from agentlightning.types import Span

TASKS = (
    ("What do 3 apples and 2 pears cost?", "It costs 12."),
    ("What does 1 melon cost?", "It costs 5."),
    ("What do a dozen plums cost?", "It costs 12."),
)


async def observe(store: LightningStore, tracer: OtelTracer, question: str, expected: str) -> list[Span]:
    """One attempt of the agent at one task; its spans are in the store when the trace is closed."""
    rollout = await store.start_rollout({"question": question})
    ids = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
    async with tracer.trace_context(store=store, **ids):
        given = await asyncio.to_thread(shop_agent.answer, question)
        emit_reward(float(given == expected))
    await store.update_attempt(**ids, status="succeeded")
    print(f"{question}  {given}")
    return list(await store.query_spans(**ids))


def show(spans: list[Span]) -> None:
    """The tree of one attempt, and the triplets an algorithm gets."""
    tree = TraceTree.from_spans(spans)
    show_tree(tree.names_tuple())
    for number, triplet in enumerate(TracerTraceToTriplet().adapt(spans), 1):
        read, written = triplet.prompt["token_ids"], triplet.response["token_ids"]
        print(f"  call {number}: {len(read)} tokens read, {len(written)} written, reward {triplet.reward}")


def show_tree(named: tuple[str, list[Any]], depth: int = 1) -> None:
    name, children = named
    print("  " * depth + name)
    for child in children:
        show_tree(child, depth + 1)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, epilog="example: observe.py --store shop.db")
    parser.add_argument("--store", type=Path, help="keep the spans in this file; a temporary one, if left out")
    options = parser.parse_args()
    trajectories = []
    with tempfile.TemporaryDirectory() as folder, small_model.serve() as address, OtelTracer().lifespan() as tracer:
        os.environ |= {"OPENAI_BASE_URL": address, "OPENAI_API_KEY": "none"}
        async with SqliteLightningStore(options.store or Path(folder) / "shop.db") as store:
            for question, expected in TASKS:
                spans = await observe(store, tracer, question, expected)
                show(spans)
                trajectories.append(TraceToTrajectory().adapt(spans))
    print(TraceReport.of(*trajectories))


if __name__ == "__main__":
    asyncio.run(main())
