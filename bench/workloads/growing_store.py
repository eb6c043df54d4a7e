"""What an operation costs while one SQLite store grows. Prints one JSON line.

usage: growing_store.py --sizes 1000 10000 ...

At each size every operation is timed on the growing store and, in turns with it, on a fresh store of the smallest size,
the control: what the machine does to one it does to the other. Both are closed and opened again first, so that both
begin with an empty log; a log that still grows costs more to write than one that is written over.
"""

import argparse
import asyncio
import importlib
import json
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from filling import Filler, tell
from store import package

REPETITIONS = 5
OPERATIONS = 200
"""How many of them one repetition times."""
SEED = 20_251_115

Prepared = Callable[[], Coroutine[Any, Any, Any]]
"""One operation, ready to be timed."""


class Subject:
    """A store with something in it, and the operations to time on it."""

    def __init__(self, store: Any, rollout_ids: list[str]) -> None:
        self.store = store
        self.filler = Filler(store, rollout_ids)
        self._chance = random.Random(SEED)

    async def add_span(self) -> list[Prepared]:
        """Single spans of one running attempt."""
        (claim,) = await self._claims(1)
        return [partial(self.store.add_span, span) for span in self.filler.spans_of(claim, OPERATIONS)]

    async def dequeue_and_finish(self) -> list[Prepared]:
        """Claim a rollout and finish its attempt: two operations, timed as one."""
        await self.filler.enqueue(OPERATIONS)

        async def claim_and_finish() -> None:
            claim = await self.store.dequeue_rollout()
            await self.store.update_attempt(claim.rollout_id, claim.attempt.attempt_id, status="succeeded")

        return [claim_and_finish] * OPERATIONS

    async def get_rollout(self) -> list[Prepared]:
        return [partial(self.store.get_rollout_by_id, rollout_id) for rollout_id in self._some_ids()]

    async def query_spans(self) -> list[Prepared]:
        return [partial(self.store.query_spans, rollout_id) for rollout_id in self._some_ids()]

    def _some_ids(self) -> list[str]:
        return self._chance.choices(self.filler.rollout_ids, k=OPERATIONS)

    async def _claims(self, count: int) -> Any:
        await self.filler.enqueue(count)
        return await self.store.dequeue_many_rollouts(limit=count)


OPERATIONS_TIMED = ("add_span", "dequeue_and_finish", "get_rollout", "query_spans")


async def time_once(subject: Subject, operation: str) -> float:
    """Microseconds of one operation, the mean of a repetition."""
    prepared = await getattr(subject, operation)()
    began = time.perf_counter()
    for call in prepared:
        await call()
    return (time.perf_counter() - began) / len(prepared) * 1e6


async def compare(growing: Subject, control: Subject) -> dict[str, dict[str, Any]]:
    """The median cost of every operation on both stores, measured in turns."""
    figures: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS_TIMED:
        taken: dict[Subject, list[float]] = {growing: [], control: []}
        for _ in range(REPETITIONS):
            for subject, times in taken.items():
                times.append(await time_once(subject, operation))
        figures[operation] = {
            "us": round(statistics.median(taken[growing]), 2),
            "control_us": round(statistics.median(taken[control]), 2),
            "repetitions_us": [round(taken_us, 1) for taken_us in taken[growing]],
            "control_repetitions_us": [round(taken_us, 1) for taken_us in taken[control]],
        }
    return figures


@asynccontextmanager
async def opened(path: Path, rollout_ids: list[str]) -> AsyncIterator[Subject]:
    """The store in a file, whose filled rollouts are those of the list."""
    sqlite: Any = importlib.import_module("agentlightning.store.sqlite")
    store = sqlite.SqliteLightningStore(str(path))
    try:
        yield Subject(store, rollout_ids)
    finally:
        await store.close()


async def fill(path: Path, rollout_ids: list[str], spans: int) -> None:
    async with opened(path, rollout_ids) as subject:
        await subject.filler.fill_to(spans)


async def measure(folder: Path, sizes: list[int]) -> list[dict[str, Any]]:
    """Grow a store through all sizes."""
    figures = []
    growing_path, growing_ids = folder / "growing.db", list[str]()
    for size in sizes:
        control_path, control_ids = folder / f"control-{size}.db", list[str]()
        await fill(growing_path, growing_ids, size)
        await fill(control_path, control_ids, sizes[0])
        tell(f"timing operations at {size:,} spans")
        async with opened(growing_path, growing_ids) as growing, opened(control_path, control_ids) as control:
            figures.append({"spans": size, "operations": await compare(growing, control)})
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what operations cost while a store grows.")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1_000, 10_000, 100_000, 1_000_000])
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = asyncio.run(measure(Path(folder), given.sizes))
    print(json.dumps({"version": package().__version__, "sizes": figures}))


if __name__ == "__main__":
    main()
