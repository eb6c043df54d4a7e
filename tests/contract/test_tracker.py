"""A store that is measured behaves as one that is not, and every operation is seen."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from agentlightning.store import InMemoryLightningStore, LightningStore, SqliteLightningStore
from agentlightning.utils.metrics import MetricsBackend


class Seen(MetricsBackend):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.operations: list[str] = []

    def register_counter(self, name: str, label_names: Sequence[str] | None = None) -> None:
        pass

    def register_histogram(
        self, name: str, label_names: Sequence[str] | None = None, buckets: Sequence[float] | None = None
    ) -> None:
        pass

    def inc_counter(self, name: str, amount: float = 1.0, labels: Mapping[str, str] | None = None) -> None:
        pass

    def observe_histogram(self, name: str, value: float, labels: Mapping[str, str] | None = None) -> None:
        assert value >= 0
        self.operations.append((labels or {})["operation"])


def build(kind: str, folder: Path, tracker: MetricsBackend) -> LightningStore:
    if kind == "memory":
        return InMemoryLightningStore(tracker=tracker)
    return SqliteLightningStore(folder / "s.db", tracker=tracker)


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
async def test_every_operation_is_measured(tmp_path: Path, make_span: Any, kind: str) -> None:
    seen = Seen()
    store = build(kind, tmp_path, seen)
    await store.enqueue_rollout("a")
    claimed = await store.dequeue_rollout()
    await store.add_span(make_span(claimed))
    with pytest.raises(ValueError, match="not found"):
        await store.start_attempt("nope")
    await store.query_rollouts()
    await store.close()

    assert seen.operations == ["enqueue_rollout", "dequeue_rollout", "add_span", "start_attempt", "query_rollouts"]


async def test_claim_of_a_cancelled_caller_goes_back_when_measured(tmp_path: Path) -> None:
    async with SqliteLightningStore(tmp_path / "s.db", tracker=Seen()) as store:
        await store.enqueue_rollout("a")
        claim = asyncio.create_task(store.dequeue_rollout("w"))
        for _ in range(3):
            await asyncio.sleep(0)
        claim.cancel()
        await asyncio.gather(claim, return_exceptions=True)

        again = await asyncio.wait_for(store.dequeue_rollout(wait=10), 10) if claim.cancelled() else claim.result()
        assert again is not None
        assert again.input == "a"
