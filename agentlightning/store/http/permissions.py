"""Permissions: which scope may call which operation.

Every operation says itself, as it is declared, who may call it. An admin may do everything. A runner may do what
running takes: claim work, report on it, read. A reader may read, and change nothing. An attempt may write its own spans
and nothing else, so that a token can be given to code that nobody trusts. Which secrets an answer shows to a scope that
may read is decided in `credentials`.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from agentlightning.errors import NotAllowed
from agentlightning.store.http.tokens import Scope
from agentlightning.store.operations import Operation

__all__ = ["check_permission", "check_server_page", "check_subscription", "check_traces"]

Owners = Iterable[tuple[str | None, str | None]]
"""Pairs of a rollout id and an attempt id."""


def _owners(arguments: Mapping[str, Any]) -> Owners:
    """Whom a call is about: the attempts of its spans, or those it names."""
    if "span" in arguments or "spans" in arguments:
        spans = arguments["spans"] if "spans" in arguments else [arguments["span"]]
        return [(getattr(span, "rollout_id", None), getattr(span, "attempt_id", None)) for span in spans]
    if "rollout_attempt_ids" in arguments:
        return [(rollout_id, attempt_id) for rollout_id, attempt_id in arguments["rollout_attempt_ids"]]
    return [(arguments.get("rollout_id"), arguments.get("attempt_id"))]


HEALTH_PATHS: Final = ("/health", "/v1/agl/health", "/ready")


def check_permission(scope: Scope, op: Operation, arguments: Mapping[str, Any]) -> None:
    """Refuse a call that the scope does not permit; `arguments` go by name and are decoded."""
    is_permitted = {
        "admin": True,
        "runner": op.who != "admin",
        "reader": op.who != "admin" and not op.mutates,
        "attempt": op.who == "attempt",
    }[scope.kind]
    if not is_permitted:
        raise _refusal(scope, f"'{op.name}'", "the master token" if op.who == "admin" else "a runner's token")
    if scope.kind == "attempt":
        _check_owners(scope, f"'{op.name}'", _owners(arguments))


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
