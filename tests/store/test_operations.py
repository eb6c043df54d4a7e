"""Operations: what is derived from a declared store method, and that the behaviours agree with the contract."""

import copy
import inspect
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest

from agentlightning.store.base import LightningStore
from agentlightning.store.behaviour import BEHAVIOURS
from agentlightning.store.operations import UNSET, Unset, operation, operations_of

OPERATIONS = operations_of(LightningStore)


# ---------------------------------------------------------------------- UNSET


def test_there_is_only_one_unset() -> None:
    assert pickle.loads(pickle.dumps(UNSET)) is copy.deepcopy(UNSET) is UNSET
    assert isinstance(UNSET, Unset)
    assert repr(UNSET) == "UNSET"


# ---------------------------------------------------------------------- declarations


def test_contract_declares_the_operations_of_the_protocol() -> None:
    promised = """start_rollout enqueue_rollout dequeue_rollout start_attempt add_span query_rollouts query_attempts
    get_rollout_by_id get_latest_attempt get_resources_by_id get_latest_resources get_next_span_sequence_id
    wait_for_rollouts query_spans add_resources update_resources update_rollout update_attempt statistics
    enqueue_many_rollouts dequeue_many_rollouts add_many_spans get_many_span_sequence_ids query_resources query_workers
    get_worker_by_id update_worker"""

    assert set(promised.split()) <= set(OPERATIONS)


def test_every_operation_has_a_route_of_its_own() -> None:
    routes = [(op.route.verb, re.sub(r"{\w+}", "{}", op.route.path)) for op in OPERATIONS.values()]
    assert sorted(set(routes)) == sorted(routes)


def test_declaration_of_every_operation_agrees_with_its_signature() -> None:
    for op in OPERATIONS.values():
        parameters = set(op.signature.parameters)
        named = {*op.ids, op.many, op.loose, op.echoes, op.route.body} - {None}
        assert {*re.findall(r"{(\w+)}", op.route.path), *named} <= parameters, op.name
        assert op.route.path.startswith("/"), op.name
        assert op.route.verb == "POST" or not op.mutates, op.name
        assert op.mutates or op.watchdog, op.name
        assert set(op.hints) == parameters == set(op.adapters), op.name
        assert "self" not in op.hints, op.name


@pytest.mark.parametrize("method", ["perform", "close", "subscribe", "add_otel_span", "otlp_traces_endpoint"])
def test_method_that_cannot_travel_is_no_operation(method: str) -> None:
    assert hasattr(LightningStore, method)
    assert method not in OPERATIONS


# ---------------------------------------------------------------------- naming and calling


def test_arguments_are_named_without_those_that_are_unset() -> None:
    update, worker = OPERATIONS["update_rollout"], OPERATIONS["update_worker"]

    given = update.name_arguments(("ro-1",), {"mode": UNSET, "metadata": None})
    assert given == {"rollout_id": "ro-1", "metadata": None}
    assert worker.name_arguments(("w", UNSET), {}) == {"worker_id": "w"}
    assert worker.name_arguments(("w", None), {}) == {"worker_id": "w", "heartbeat_stats": None}
    for args, kwargs in (((), {}), (("w", {}, "more"), {}), (("w",), {"colour": "red"})):
        with pytest.raises(TypeError):
            worker.name_arguments(args, kwargs)


# ---------------------------------------------------------------------- behaviours


def parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter]:
    return list(inspect.signature(function).parameters.values())


def test_behaviours_take_the_arguments_of_the_contract() -> None:
    for name, behaviour in BEHAVIOURS.items():
        transaction, now, *rest = parameters_of(behaviour)
        assert [transaction.name, now.name] == ["tx", "now"], name
        declared = list(OPERATIONS[name].signature.parameters.values())
        if rest[-1:] and rest[-1].kind is inspect.Parameter.VAR_KEYWORD:  # a query, whose arguments make a selection
            rest, declared = rest[:-1], [one for one in declared if one.name in {p.name for p in rest}]
        assert list(map(_described, rest)) == list(map(_described, declared)), name


def _described(parameter: inspect.Parameter) -> tuple[Any, ...]:
    """A behaviour may promise less of what it only stores: `object` where callers see `Any`."""
    annotation = str(parameter.annotation).replace("typing.Any", "object")
    return parameter.name, parameter.kind, parameter.default, "object" if "object" in annotation else annotation


def test_every_operation_has_a_behaviour_unless_the_store_itself_answers() -> None:
    assert set(OPERATIONS) - set(BEHAVIOURS) == {"statistics", "wait_for_rollouts"}
    assert set(BEHAVIOURS) <= set(OPERATIONS)


def test_operation_without_a_permission_cannot_be_declared() -> None:
    undecided: Any = operation
    with pytest.raises(TypeError, match="who"):
        undecided("POST", "/everything/drop")
