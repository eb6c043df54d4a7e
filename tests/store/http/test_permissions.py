"""Permissions: every operation is decided for every scope, and an attempt writes for itself alone."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest

from agentlightning.errors import InvalidToken, NotAllowed
from agentlightning.store.base import LightningStore
from agentlightning.store.http.tokens import Scope, check_permission, check_subscription, check_traces
from agentlightning.store.operations import operations_of
from agentlightning.types import Span

ADMIN, RUNNER, READER, ATTEMPT = Scope("admin"), Scope("runner"), Scope("reader"), Scope("attempt", "ro-1", "at-1")
OWN, FOREIGN = ("ro-1", "at-1"), ("ro-1", "at-2")
ADMIN_ONLY = {
    "enqueue_rollout",
    "enqueue_many_rollouts",
    "update_rollout",
    "add_resources",
    "update_resources",
    "start_run",
    "finish_run",
    "add_metrics",
}


def span_of(owner: tuple[str, str]) -> Span:
    return Span.from_attributes(attributes={}, rollout_id=owner[0], attempt_id=owner[1])


CALLS_ABOUT: dict[str, Callable[..., dict[str, Any]]] = {
    "add_span": lambda *owners: {"span": span_of(owners[-1])},
    "add_many_spans": lambda *owners: {"spans": [span_of(owner) for owner in owners]},
    "add_open_spans": lambda *owners: {"spans": [span_of(owner) for owner in owners]},
    "get_next_span_sequence_id": lambda *owners: {"rollout_id": owners[-1][0], "attempt_id": owners[-1][1]},
    "get_many_span_sequence_ids": lambda *owners: {"rollout_attempt_ids": list(owners)},
}
"""The operations an attempt may call, with arguments that are about these owners."""


def is_allowed(scope: Scope, name: str, arguments: dict[str, Any] | None = None) -> bool:
    try:
        check_permission(scope, operations_of(LightningStore)[name], arguments or {})
    except NotAllowed:
        return False
    return True


def test_every_operation_is_decided_for_every_scope() -> None:
    for name, op in operations_of(LightningStore).items():
        own = CALLS_ABOUT[name](OWN) if name in CALLS_ABOUT else {"rollout_id": OWN[0], "attempt_id": OWN[1]}

        assert is_allowed(ADMIN, name), name
        assert is_allowed(RUNNER, name) == (name not in ADMIN_ONLY), name
        assert is_allowed(READER, name) == (not op.mutates), name
        assert is_allowed(ATTEMPT, name, own) == (name in CALLS_ABOUT), name
        assert op.mutates or name not in ADMIN_ONLY, name


def test_attempt_may_not_write_for_another() -> None:
    for name, about in CALLS_ABOUT.items():
        for foreign in (FOREIGN, ("ro-2", "at-1"), ("ro-1", "latest"), ("", "")):
            assert not is_allowed(ATTEMPT, name, about(foreign)), name
            assert not is_allowed(ATTEMPT, name, about(OWN, foreign)), name
            assert is_allowed(RUNNER, name, about(OWN, foreign)), name


@pytest.mark.parametrize("arguments", [{}, {"span": None}, {"span": {"rollout_id": "ro-1", "attempt_id": "at-1"}}])
def test_arguments_that_show_no_owner_are_not_the_attempts_own(arguments: dict[str, Any]) -> None:
    assert not is_allowed(ATTEMPT, "add_span", arguments)


@pytest.mark.parametrize(
    ("scope", "name", "refused"),
    [
        (RUNNER, "add_resources", "runner does not permit 'add_resources'; use the master token."),
        (ATTEMPT, "add_resources", f"{ATTEMPT} does not permit 'add_resources'; use the master token."),
        (READER, "add_resources", "reader does not permit 'add_resources'; use the master token."),
        (READER, "add_span", "reader does not permit 'add_span'; use a runner's token."),
        (ATTEMPT, "query_spans", f"{ATTEMPT} does not permit 'query_spans'; use a runner's token."),
        (
            ATTEMPT,
            "add_span",
            (
                f"{ATTEMPT} does not permit 'add_span' for attempt 'at-2' of rollout 'ro-1'; "
                "use that attempt's token or a runner's."
            ),
        ),
    ],
    ids=["direct", "attempt directs", "reader directs", "reader writes", "attempt reads", "another attempt"],
)
def test_refusal_names_scope_operation_and_way_out(scope: Scope, name: str, refused: str) -> None:
    with pytest.raises(NotAllowed) as caught:
        check_permission(scope, operations_of(LightningStore)[name], {"span": span_of(FOREIGN)})

    assert str(caught.value) == f"A token of scope {refused}"
    assert caught.value.http_status == 403
    assert not isinstance(caught.value, InvalidToken)


def test_all_but_an_attempt_may_subscribe() -> None:
    for scope in (ADMIN, RUNNER, READER):
        check_subscription(scope)
    with pytest.raises(NotAllowed, match="does not permit 'subscribe'; use a runner's token"):
        check_subscription(ATTEMPT)


@pytest.mark.parametrize(
    ("scope", "owners", "refusal"),
    [
        pytest.param(ADMIN, [OWN, FOREIGN], None, id="admin"),
        pytest.param(RUNNER, [OWN, FOREIGN], None, id="runner"),
        pytest.param(READER, [], "reader does not permit OTLP spans", id="reader"),
        pytest.param(ATTEMPT, [OWN, OWN], None, id="attempt"),
        pytest.param(ATTEMPT, [], None, id="attempt, nothing"),
        pytest.param(ATTEMPT, [OWN, FOREIGN], "OTLP spans for attempt 'at-2'", id="another attempt"),
    ],
)
def test_traces_are_taken_from_those_who_may_write_them(
    scope: Scope, owners: list[tuple[str, str]], refusal: str | None
) -> None:
    with pytest.raises(NotAllowed, match=refusal) if refusal is not None else nullcontext():
        check_traces(scope, owners)
