"""Filling a store with finished rollouts fast, in large batches, through the public API only."""

import asyncio
import itertools
import sys
import time
from pathlib import Path
from typing import Any

from store import make_span, spans_of

from agentlightning.types import EnqueueRolloutRequest

SPANS_PER_ROLLOUT = 10
ROLLOUTS_PER_BATCH = 500
PROGRESS_SECONDS = 2.0
KIB = 1024


class Filler:
    """Adds rollouts of ten spans each; every span has an id of its own."""

    def __init__(self, store: Any, rollout_ids: list[str] | None = None) -> None:
        self._store = store
        self._template = make_span("r", "a", 1)
        self.numbers = itertools.count(1)
        self.rollout_ids = [] if rollout_ids is None else rollout_ids
        """Rollouts whose spans are stored; a filler that goes on where another stopped is given the other's."""

    async def enqueue(self, count: int) -> list[str]:
        """Put rollouts into the queue and leave them there."""
        requests = [EnqueueRolloutRequest(input={"q": index}, mode="train") for index in range(count)]
        rollouts = await self._store.enqueue_many_rollouts(requests)
        return [rollout.rollout_id for rollout in rollouts]

    async def fill_to(self, spans: int) -> None:
        """Run rollouts until that many spans are stored by this filler; an empty queue is needed."""
        wanted = spans // SPANS_PER_ROLLOUT
        told = time.monotonic()
        while len(self.rollout_ids) < wanted:
            await self._add(min(ROLLOUTS_PER_BATCH, wanted - len(self.rollout_ids)))
            if time.monotonic() - told > PROGRESS_SECONDS:
                told = time.monotonic()
                tell(f"{len(self.rollout_ids) * SPANS_PER_ROLLOUT:,} of {spans:,} spans stored")

    async def _add(self, rollouts: int) -> None:
        await self.enqueue(rollouts)
        claims = await self._store.dequeue_many_rollouts(limit=rollouts)
        spans = [span for claim in claims for span in self.spans_of(claim)]
        await self._store.add_many_spans(spans)
        await asyncio.gather(
            *[
                self._store.update_attempt(claim.rollout_id, claim.attempt.attempt_id, **self.outcome_of(claim))
                for claim in claims
            ]
        )
        self.rollout_ids.extend(claim.rollout_id for claim in claims)

    def outcome_of(self, claim: Any) -> dict[str, Any]:
        """What its attempt ends with."""
        return {"status": "succeeded"}

    def spans_of(self, claim: Any, count: int = SPANS_PER_ROLLOUT) -> list[Any]:
        return spans_of(self._template, claim, count, self.numbers)


def tell(line: str) -> None:
    """A line of progress for the harness, beside the figures on standard output."""
    print(f"progress: {line}", file=sys.stderr, flush=True)


def peak_rss_mb() -> float:
    """The most memory this process has held, in MB.

    `ru_maxrss` would count what a parent held before it started us, so Linux is asked for `VmHWM` instead.
    """
    status = Path("/proc/self/status")
    if status.exists():
        lines = status.read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * KIB / 1e6
    import resource  # absent on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak * KIB / 1e6
