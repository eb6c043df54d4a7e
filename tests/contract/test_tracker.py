"""A store that is measured behaves as one that is not, and every operation is seen."""

import asyncio
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock, create_autospec

import pytest

from agentlightning.store import InMemoryLightningStore, SqliteLightningStore
from agentlightning.utils.metrics import MetricsBackend


def tracked(observed: Mock) -> list[str]:
    """The operations that a backend was told of."""
    return [call.args[2]["operation"] for call in observed.observe_histogram.call_args_list if call.args[1] >= 0]


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
async def test_every_operation_is_measured(tmp_path: Path, make_span: Any, kind: str) -> None:
    seen = create_autospec(MetricsBackend, instance=True)
    kinds: Any = {"memory": InMemoryLightningStore, "sqlite": partial(SqliteLightningStore, tmp_path / "s.db")}
    store = kinds[kind](tracker=seen)
    await store.enqueue_rollout("a")
    claimed = await store.dequeue_rollout()
    await store.add_span(make_span(claimed))
    with pytest.raises(ValueError, match="not found"):
        await store.start_attempt("nope")
    await store.query_rollouts()
    await store.close()

    assert tracked(seen) == ["enqueue_rollout", "dequeue_rollout", "add_span", "start_attempt", "query_rollouts"]


async def test_claim_of_a_cancelled_caller_goes_back_when_measured(tmp_path: Path) -> None:
    async with SqliteLightningStore(tmp_path / "s.db", tracker=create_autospec(MetricsBackend, instance=True)) as store:
        await store.enqueue_rollout("a")
        claim = asyncio.create_task(store.dequeue_rollout("w"))
        for _ in range(3):
            await asyncio.sleep(0)
        claim.cancel()
        await asyncio.gather(claim, return_exceptions=True)

        again = await asyncio.wait_for(store.dequeue_rollout(wait=10), 10) if claim.cancelled() else claim.result()
        assert again is not None
        assert again.input == "a"
