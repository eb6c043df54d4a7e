"""What operations are about, read and locked before they run: one round trip for a whole batch, locks in one order."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from agentlightning.store.base import LightningStore
from agentlightning.store.claims import RUNNING_ATTEMPTS
from agentlightning.store.local import Call
from agentlightning.store.operations import operations_of
from agentlightning.store.postgres.session import is_storable
from agentlightning.store.postgres.transaction import PostgresTransaction
from agentlightning.types import Span, Worker

__all__ = ["read_ahead"]

_ENDING: Final = frozenset(["update_attempt", "finish_attempt", "finish_and_claim"])
"""Operations that release the worker of an attempt."""
_BY_ROLLOUT: Final = _ENDING | {"update_rollout", "start_attempt", "get_next_span_sequence_id", "wait_for_rollouts"}
"""Operations whose first argument is a rollout id, or several."""
_WITH_SPANS: Final = frozenset(["add_span", "add_many_spans", "add_open_spans", "finish_attempt", "finish_and_claim"])
_BY_PAIRS: Final = frozenset(["get_many_span_sequence_ids", "return_claims"])
_GRANTED_UNDER: Final = ("claim_id", "request_id")
_CLAIMS: Final = frozenset(op.name for op in operations_of(LightningStore).values() if op.is_claim)


def read_ahead(tx: PostgresTransaction, calls: Sequence[Call]) -> None:
    """Have a transaction read and lock the grants, rollouts and workers that the calls name."""
    rollout_ids: list[Any] = []
    ended: list[Any] = []
    offered: list[Span] = []
    new_rollouts = 0
    for call in calls:
        values = (*call.args, *call.kwargs.values())
        if call.name in _WITH_SPANS:
            spans = [s for v in values for s in (v if isinstance(v, (list, tuple)) else (v,)) if isinstance(s, Span)]
            rollout_ids += [span.rollout_id for span in spans]
            offered += spans
        if call.name in _BY_ROLLOUT:
            named = call.args[0] if call.args else call.kwargs.get("rollout_id")
            rollout_ids += named if isinstance(named, list) else [named]
            if call.name in _ENDING:
                ended.append(named)
        elif call.name == "update_worker":
            rollout_ids += _named_in_heartbeat(values[-1])
        elif call.name in _BY_PAIRS:
            rollout_ids += [pair[0] for pair in values[0]]
        elif call.name in ("enqueue_rollout", "enqueue_many_rollouts"):
            new_rollouts += len(values[0]) if call.name == "enqueue_many_rollouts" else 1
    tx.offered_span_ids = frozenset(span.span_id for span in offered if is_storable(span.span_id))
    tx.expected_rollouts = max(new_rollouts, 1)
    tx.expected_pops = sum(call.kwargs.get("limit", 1) for call in calls if call.name in _CLAIMS)
    known_ids = [named for named in rollout_ids if isinstance(named, str)]
    grant_ids = {call.kwargs[name] for call in calls for name in _GRANTED_UNDER if is_storable(call.kwargs.get(name))}
    tx.read_ahead(known_ids, grant_ids)
    tx.load_span_ids({span.rollout_id for span in offered})
    worker_ids: list[Any] = [call.kwargs.get("worker_id") for call in calls]
    worker_ids += [call.args[0] for call in calls if call.name in ("update_worker", "dequeue_rollout") and call.args]
    latest = [tx.get_attempts(rollout_id)[-1:] for rollout_id in ended if isinstance(rollout_id, str)]
    worker_ids += [attempt.worker_id for attempts in latest for attempt in attempts]
    tx.load_records(Worker, {worker_id for worker_id in worker_ids if is_storable(worker_id)})


def _named_in_heartbeat(stats: Any) -> list[Any]:
    pairs = stats.get(RUNNING_ATTEMPTS) if isinstance(stats, Mapping) else None
    named: Sequence[Any] = pairs if isinstance(pairs, (list, tuple)) else ()
    return [pair[0] for pair in named if isinstance(pair, (list, tuple)) and pair]
