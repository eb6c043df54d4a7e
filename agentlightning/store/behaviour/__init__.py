"""What each store operation does, as plain functions `(transaction, now, arguments…)`; all behaviour, no storage.

`BEHAVIOURS` maps the name of an operation to its function. The arguments are those of the contract in `store/base.py`,
less the ones about waiting, which is the store's business and not the transaction's.
"""

from collections.abc import Callable
from typing import Any

from agentlightning.store.behaviour import (
    attempts,
    claims,
    heartbeats,
    open_spans,
    requests,
    resources,
    rollouts,
    runs,
    spans,
    workers,
)

__all__ = ["BEHAVIOURS", "WITHOUT_WATCHDOG"]

BEHAVIOURS: dict[str, Callable[..., Any]] = {
    behaviour.__name__: behaviour
    for behaviour in (
        rollouts.start_rollout,
        rollouts.enqueue_rollout,
        rollouts.enqueue_many_rollouts,
        rollouts.dequeue_rollout,
        rollouts.dequeue_many_rollouts,
        rollouts.get_rollout_by_id,
        rollouts.query_rollouts,
        rollouts.update_rollout,
        attempts.start_attempt,
        attempts.query_attempts,
        attempts.get_latest_attempt,
        attempts.update_attempt,
        spans.add_span,
        spans.add_many_spans,
        spans.finish_attempt,
        spans.get_next_span_sequence_id,
        spans.get_many_span_sequence_ids,
        spans.query_spans,
        open_spans.add_open_spans,
        open_spans.query_open_spans,
        resources.add_resources,
        resources.update_resources,
        resources.get_latest_resources,
        resources.get_resources_by_id,
        resources.query_resources,
        workers.query_workers,
        workers.get_worker_by_id,
        heartbeats.update_worker,
        heartbeats.mark_worker_lost,
        runs.start_run,
        runs.finish_run,
        runs.get_run_by_id,
        runs.query_runs,
        runs.add_metrics,
        runs.query_metrics,
        claims.claim_rollouts,
        claims.finish_and_claim,
        claims.return_claims,
        requests.abandon_request,
        requests.forget_requests,
    )
}

WITHOUT_WATCHDOG = frozenset(
    [
        "add_span",
        "add_many_spans",
        "add_open_spans",
        "get_next_span_sequence_id",
        "get_many_span_sequence_ids",
        "add_metrics",
        "forget_requests",
    ]
)
"""Operations before which overdue attempts are not looked for: a late span must find its attempt as it was."""
