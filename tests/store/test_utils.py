"""The rules in the shape of the earlier releases."""

from typing import Any

import pytest

from agentlightning.store.threading import LightningStoreThreaded
from agentlightning.store.utils import (
    LATENCY_BUCKETS,
    healthcheck,
    propagate_status,
    rollout_status_from_attempt,
    scan_unhealthy_rollouts,
)
from agentlightning.types import Attempt, AttemptedRollout, RolloutConfig

NOW = 1000.0


@pytest.fixture(autouse=True)
def _time_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: NOW)


class Callbacks:
    """A store of the caller's own, which writes down what it is asked to do."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    async def update_rollout(self, *args: Any) -> Any:
        self.calls.append(("rollout", *args))

    async def update_attempt(self, *args: Any) -> Any:
        self.calls.append(("attempt", *args))


def attempted(config: RolloutConfig | None = None, **attempt: Any) -> AttemptedRollout:
    fields = {"rollout_id": "r", "attempt_id": "a", "sequence_id": 1, "start_time": NOW, **attempt}
    return AttemptedRollout(
        rollout_id="r",
        input=None,
        start_time=NOW,
        status="running",
        config=config or RolloutConfig(),
        attempt=Attempt(**fields),
    )


async def test_status_is_propagated_with_one_call() -> None:
    callbacks = Callbacks()
    config = RolloutConfig(max_attempts=2, retry_condition=["failed"])
    await propagate_status(callbacks.update_rollout, attempted(status="failed").attempt, config)
    assert callbacks.calls == [("rollout", "r", "requeuing")]


SLOW = RolloutConfig(timeout_seconds=10, unresponsive_seconds=5)

CASES: dict[str, tuple[AttemptedRollout, list[tuple[Any, ...]]]] = {
    "ended": (attempted(status="succeeded"), [("rollout", "r", "succeeded")]),
    "fine": (attempted(SLOW, start_time=NOW - 3), []),
    "timeout": (attempted(SLOW, start_time=NOW - 11), [("attempt", "r", "a", "timeout")]),
    "silent-from-the-start": (attempted(SLOW, start_time=NOW - 6), [("attempt", "r", "a", "unresponsive")]),
    "first-heartbeat": (attempted(last_heartbeat_time=NOW), [("attempt", "r", "a", "running")]),
    "silent-after-heartbeat": (
        attempted(SLOW, start_time=NOW - 9, last_heartbeat_time=NOW - 6),
        [("attempt", "r", "a", "running"), ("attempt", "r", "a", "unresponsive")],
    ),
}


@pytest.mark.parametrize(("rollout", "expected"), CASES.values(), ids=CASES)
async def test_healthcheck_asks_for_what_is_due(rollout: AttemptedRollout, expected: list[Any]) -> None:
    callbacks = Callbacks()
    await healthcheck([rollout], callbacks.update_rollout, callbacks.update_attempt)
    assert callbacks.calls == expected


def test_scan_gives_new_statuses_by_attempt() -> None:
    late, fine = attempted(SLOW, start_time=NOW - 11), attempted(SLOW)
    assert scan_unhealthy_rollouts([late, fine]) == {("r", "a"): "timeout"}


def test_doors_lead_to_the_same_things() -> None:
    from agentlightning.store import forwarding, lifecycle

    assert LightningStoreThreaded is forwarding.LightningStoreThreaded
    assert rollout_status_from_attempt is lifecycle.rollout_status_from_attempt
    assert list(LATENCY_BUCKETS) == sorted(LATENCY_BUCKETS)
