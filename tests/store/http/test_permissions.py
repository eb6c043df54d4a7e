"""Permissions: every operation is decided for every scope, and an attempt writes for itself alone."""

from collections.abc import Callable
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
    "mark_worker_lost",
    "add_metrics",
}
every_operation = pytest.mark.parametrize("name", operations_of(LightningStore))


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
every_call = pytest.mark.parametrize("name", CALLS_ABOUT)


def is_allowed(scope: Scope, name: str, arguments: dict[str, Any] | None = None) -> bool:
    try:
        check_permission(scope, operations_of(LightningStore)[name], arguments or {})
    except NotAllowed:
        return False
    return True


@every_operation
def test_admin_may_do_everything(name: str) -> None:
    assert is_allowed(ADMIN, name)


@every_operation
def test_runner_may_do_all_but_direct(name: str) -> None:
    assert is_allowed(RUNNER, name) == (name not in ADMIN_ONLY)


@every_operation
def test_runner_may_read_everything(name: str) -> None:
    assert operations_of(LightningStore)[name].mutates or is_allowed(RUNNER, name)


@every_operation
def test_reader_may_read_everything_and_change_nothing(name: str) -> None:
    assert is_allowed(READER, name) == (not operations_of(LightningStore)[name].mutates)


@every_operation
def test_attempt_may_only_write_spans(name: str) -> None:
    arguments = CALLS_ABOUT[name](OWN) if name in CALLS_ABOUT else {"rollout_id": OWN[0], "attempt_id": OWN[1]}

    assert is_allowed(ATTEMPT, name, arguments) == (name in CALLS_ABOUT)


@every_call
@pytest.mark.parametrize("foreign", [FOREIGN, ("ro-2", "at-1"), ("ro-1", "latest"), ("", "")], ids=str)
def test_attempt_may_not_write_for_another(name: str, foreign: tuple[str, str]) -> None:
    assert not is_allowed(ATTEMPT, name, CALLS_ABOUT[name](foreign))
    assert not is_allowed(ATTEMPT, name, CALLS_ABOUT[name](OWN, foreign))


@every_call
def test_runner_may_write_for_any_attempt(name: str) -> None:
    assert is_allowed(RUNNER, name, CALLS_ABOUT[name](OWN, FOREIGN))


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


@pytest.mark.parametrize("scope", [ADMIN, RUNNER, READER], ids=str)
def test_all_but_an_attempt_may_subscribe(scope: Scope) -> None:
    check_subscription(scope)


def test_attempt_may_not_subscribe() -> None:
    with pytest.raises(NotAllowed, match="does not permit 'subscribe'; use a runner's token"):
        check_subscription(ATTEMPT)


@pytest.mark.parametrize("scope", [ADMIN, RUNNER], ids=str)
def test_admin_and_runner_may_send_any_traces(scope: Scope) -> None:
    check_traces(scope, {OWN, FOREIGN})


def test_reader_may_send_no_traces() -> None:
    for owners in ([OWN], []):
        with pytest.raises(NotAllowed, match="reader does not permit OTLP spans"):
            check_traces(READER, owners)


def test_attempt_may_send_its_own_traces() -> None:
    check_traces(ATTEMPT, [OWN, OWN])
    check_traces(ATTEMPT, [])


def test_attempt_may_not_send_the_traces_of_another() -> None:
    with pytest.raises(NotAllowed, match="OTLP spans for attempt 'at-2'"):
        check_traces(ATTEMPT, [OWN, FOREIGN])
