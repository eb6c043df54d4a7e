"""The lists that memory answers queries of rollouts from: they follow every change, whether it stays or not."""

import operator
from types import SimpleNamespace

import pytest

from agentlightning.errors import InvalidValue
from agentlightning.store import InMemoryLightningStore, selection
from agentlightning.store.selection import Columns
from agentlightning.types import EnqueueRolloutRequest


def test_many_changes_without_a_query_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "MOST_CHANGES", 3)
    fruits = [SimpleNamespace(weight=3)]
    columns: Columns[SimpleNamespace] = Columns(operator.attrgetter)
    columns.values("weight", fruits)

    fruits[0].weight = 7
    for _ in range(100):
        columns.note(0)

    assert columns._changes == []
    assert columns.values("weight", fruits) == [7]


async def test_queries_see_what_changed_between_them_and_nothing_of_what_failed() -> None:
    store = InMemoryLightningStore()
    await store.enqueue_many_rollouts(
        [EnqueueRolloutRequest(input={"agent": name}, metadata={"run_id": "run-1"}) for name in ("a", "b", "c")]
    )

    async def found(**asked: object) -> list[str]:
        return [rollout.input["agent"] for rollout in await store.query_rollouts(**asked)]  # type: ignore[arg-type] # any filter

    assert await found(status_in=["queuing"], sort_by="agent", sort_order="desc") == ["c", "b", "a"]
    assert await found(error_contains="Timeout") == []

    claims = await store.dequeue_many_rollouts(limit=2)
    for claim, message in zip(claims, ("first", "second"), strict=True):
        await store.update_attempt(
            claim.rollout_id,
            claim.attempt.attempt_id,
            status="failed",
            metadata={"error": {"type": "TimeoutError", "message": message}},
        )
    with pytest.raises(InvalidValue):
        await store.update_rollout(claims[0].rollout_id, input={"agent": "z"}, status="nonsense")  # type: ignore[arg-type] # not a status
    await store.enqueue_rollout({"agent": "d"})

    assert await found(status_in=["queuing"], sort_by="agent") == ["c", "d"]
    assert await found(error_contains="second") == ["b"]
    assert await found(agent_in=["z"]) == []
    assert await found(run_id_in=["run-1"], sort_by="error", sort_order="desc") == ["b", "a", "c"]
    assert await found(rollout_id_in=[claims[1].rollout_id], status_in=["failed"]) == ["b"]
    await store.close()
