"""Permissions: which scope may call which operation.

The table names every operation of the contract, so that a new one does not become open, or closed, by accident. An
admin may do everything. A runner may do what running takes: claim work, report on it, read. A reader may read, and
change nothing. An attempt may write its own spans and nothing else, so that a token can be given to code that nobody
trusts. Which secrets an answer shows to a scope that may read is decided in `credentials`.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from agentlightning.errors import NotAllowed
from agentlightning.store.base import LightningStore
from agentlightning.store.http.tokens import Scope
from agentlightning.store.operations import operations_of

__all__ = ["PERMISSIONS", "Permission", "check_permission", "check_server_page", "check_subscription", "check_traces"]

Owners = Iterable[tuple[str | None, str | None]]
"""Pairs of a rollout id and an attempt id."""


@dataclass(frozen=True)
class Permission:
    """Who may call an operation, besides the admin."""

    runner: bool
    attempt: Callable[[Mapping[str, Any]], Owners] | None
    """Reads from the arguments whom the call is about, which must be the attempt alone; None forbids the call."""


def _owner_of_span(arguments: Mapping[str, Any]) -> Owners:
    return _owners_of_spans({"spans": [arguments.get("span")]})


def _owners_of_spans(arguments: Mapping[str, Any]) -> Owners:
    spans = arguments.get("spans") or ()
    return [(getattr(span, "rollout_id", None), getattr(span, "attempt_id", None)) for span in spans]


def _named_owner(arguments: Mapping[str, Any]) -> Owners:
    return [(arguments.get("rollout_id"), arguments.get("attempt_id"))]


def _named_owners(arguments: Mapping[str, Any]) -> Owners:
    return [(rollout_id, attempt_id) for rollout_id, attempt_id in arguments.get("rollout_attempt_ids") or ()]


_ADMIN_ONLY = Permission(runner=False, attempt=None)
_RUNNER = Permission(runner=True, attempt=None)

PERMISSIONS: Final[Mapping[str, Permission]] = {
    "statistics": _RUNNER,
    "abandon_request": _RUNNER,
    "forget_requests": _RUNNER,
    "start_rollout": _RUNNER,
    "enqueue_rollout": _ADMIN_ONLY,
    "enqueue_many_rollouts": _ADMIN_ONLY,
    "dequeue_rollout": _RUNNER,
    "dequeue_many_rollouts": _RUNNER,
    "claim_rollouts": _RUNNER,
    "return_claims": _RUNNER,
    "get_rollout_by_id": _RUNNER,
    "query_rollouts": _RUNNER,
    "update_rollout": _ADMIN_ONLY,
    "wait_for_rollouts": _RUNNER,
    "start_attempt": _RUNNER,
    "query_attempts": _RUNNER,
    "get_latest_attempt": _RUNNER,
    "update_attempt": _RUNNER,
    "finish_attempt": _RUNNER,
    "finish_and_claim": _RUNNER,
    "add_span": Permission(runner=True, attempt=_owner_of_span),
    "add_many_spans": Permission(runner=True, attempt=_owners_of_spans),
    "get_next_span_sequence_id": Permission(runner=True, attempt=_named_owner),
    "get_many_span_sequence_ids": Permission(runner=True, attempt=_named_owners),
    "query_spans": _RUNNER,
    "add_open_spans": Permission(runner=True, attempt=_owners_of_spans),
    "query_open_spans": _RUNNER,
    "add_resources": _ADMIN_ONLY,
    "update_resources": _ADMIN_ONLY,
    "get_latest_resources": _RUNNER,
    "get_resources_by_id": _RUNNER,
    "query_resources": _RUNNER,
    "query_workers": _RUNNER,
    "get_worker_by_id": _RUNNER,
    "update_worker": _RUNNER,
    "mark_worker_lost": _ADMIN_ONLY,
    "start_run": _ADMIN_ONLY,
    "finish_run": _ADMIN_ONLY,
    "get_run_by_id": _RUNNER,
    "query_runs": _RUNNER,
    "add_metrics": _ADMIN_ONLY,
    "query_metrics": _RUNNER,
}

HEALTH_PATHS: Final = ("/health", "/v1/agl/health", "/ready")
READS: Final = frozenset(name for name, op in operations_of(LightningStore).items() if not op.mutates)


def check_permission(scope: Scope, operation_name: str, arguments: Mapping[str, Any]) -> None:
    """Refuse a call that the scope does not permit; `arguments` go by name and are decoded."""
    if scope.kind == "admin":
        return
    permission = PERMISSIONS.get(operation_name, _ADMIN_ONLY)
    better = "a runner's token" if permission.runner else "the master token"
    if scope.kind == "runner":
        if not permission.runner:
            raise _refusal(scope, f"'{operation_name}'", better)
    elif scope.kind == "reader":
        if operation_name not in READS:
            raise _refusal(scope, f"'{operation_name}'", better)
    elif permission.attempt is None:
        raise _refusal(scope, f"'{operation_name}'", better)
    else:
        _check_owners(scope, f"'{operation_name}'", permission.attempt(arguments))


def check_subscription(scope: Scope) -> None:
    """Refuse to tell changes to a scope that may not read."""
    if scope.kind == "attempt":
        raise _refusal(scope, "'subscribe'", "a runner's token")


def check_server_page(scope: Scope, path: str) -> None:
    """Refuse an attempt what the server tells about itself, but for whether it runs."""
    if scope.kind == "attempt" and path not in HEALTH_PATHS:
        raise _refusal(scope, f"'{path}'", "a runner's token")


def check_traces(scope: Scope, owners: Iterable[tuple[str, str]]) -> None:
    """Refuse OTLP spans of these (rollout id, attempt id) unless the scope may write them all."""
    if scope.kind == "reader":
        raise _refusal(scope, "OTLP spans", "an attempt's token or a runner's")
    if scope.kind == "attempt":
        _check_owners(scope, "OTLP spans", owners)


def _check_owners(scope: Scope, what: str, owners: Owners) -> None:
    own = (scope.rollout_id, scope.attempt_id)
    for rollout_id, attempt_id in owners:
        if (rollout_id, attempt_id) != own:
            whose = f"{what} for attempt '{attempt_id}' of rollout '{rollout_id}'"
            raise _refusal(scope, whose, "that attempt's token or a runner's")


def _refusal(scope: Scope, what: str, better: str) -> NotAllowed:
    return NotAllowed(f"A token of scope {scope} does not permit {what}; use {better}.")
