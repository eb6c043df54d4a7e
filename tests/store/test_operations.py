"""Operations: what is derived from a declared store method, and that the behaviours agree with the contract."""

import copy
import inspect
import json
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import TypeAdapter

from agentlightning.store.base import LightningStore
from agentlightning.store.behaviour import BEHAVIOURS
from agentlightning.store.operations import UNSET, Operation, Unset, forward_operations, operation, operations_of
from agentlightning.types import (
    LLM,
    Attempt,
    AttemptedRollout,
    MetricPoint,
    PaginatedResult,
    PromptTemplate,
    ProxyLLM,
    ResourcesUpdate,
    Rollout,
    RolloutConfig,
    Run,
    Span,
    Worker,
)

OPERATIONS = operations_of(LightningStore)
every_operation = pytest.mark.parametrize("op", OPERATIONS.values(), ids=OPERATIONS)


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


@every_operation
def test_path_of_an_operation_is_made_of_its_parameters(op: Operation) -> None:
    assert set(re.findall(r"{(\w+)}", op.route.path)) <= set(op.signature.parameters)
    assert op.route.path.startswith("/")


@every_operation
def test_body_of_an_operation_is_one_of_its_parameters(op: Operation) -> None:
    assert op.route.body in (None, *op.signature.parameters)


@every_operation
def test_operation_that_is_fetched_changes_nothing(op: Operation) -> None:
    assert op.route.verb == "POST" or not op.mutates


@every_operation
def test_operation_has_a_type_for_each_parameter_and_no_self(op: Operation) -> None:
    assert set(op.hints) == set(op.signature.parameters) == set(op.adapters)
    assert "self" not in op.hints


@every_operation
def test_unset_never_travels(op: Operation) -> None:
    assert not any(Unset in getattr(hint, "__args__", ()) for hint in op.hints.values())


def test_operations_keep_the_order_of_their_declaration() -> None:
    declared = [name for name, method in vars(LightningStore).items() if hasattr(method, "__operation__")]

    assert list(OPERATIONS) == declared


@pytest.mark.parametrize("method", ["perform", "close", "subscribe", "add_otel_span", "otlp_traces_endpoint"])
def test_method_that_cannot_travel_is_no_operation(method: str) -> None:
    assert hasattr(LightningStore, method)
    assert method not in OPERATIONS


# ---------------------------------------------------------------------- naming and calling


@pytest.mark.parametrize(
    ("name", "args", "kwargs", "expected"),
    [
        pytest.param("start_attempt", ("ro-1",), {}, {"rollout_id": "ro-1"}, id="positional"),
        pytest.param("start_attempt", (), {"rollout_id": "ro-1"}, {"rollout_id": "ro-1"}, id="keyword"),
        pytest.param("get_latest_resources", (), {}, {}, id="nothing"),
        pytest.param(
            "update_rollout",
            ("ro-1",),
            {"mode": UNSET, "metadata": None},
            {"rollout_id": "ro-1", "metadata": None},
            id="unset-is-left-out-and-none-is-kept",
        ),
        pytest.param("update_worker", ("w", UNSET), {}, {"worker_id": "w"}, id="positional-unset"),
        pytest.param("update_worker", ("w", None), {}, {"worker_id": "w", "heartbeat_stats": None}, id="none-given"),
    ],
)
def test_arguments_are_named(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert OPERATIONS[name].name_arguments(args, kwargs) == expected


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((), {}), (("ro-1", "more"), {}), (("ro-1",), {"colour": "red"})],
    ids=["few", "many", "unknown"],
)
def test_call_with_the_wrong_arguments_is_a_type_error(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        OPERATIONS["start_attempt"].name_arguments(args, kwargs)


# ---------------------------------------------------------------------- results

ATTEMPT = Attempt(rollout_id="ro-1", attempt_id="at-1", sequence_id=1, start_time=2.0)
PLAIN = Rollout(rollout_id="ro-1", input={"q": [1, None]}, start_time=1.0, config=RolloutConfig(max_attempts=3))
ATTEMPTED = AttemptedRollout(**PLAIN.model_dump(), attempt=ATTEMPT)
SPAN = Span.from_attributes(attributes={"tokens": [1, 2], "score": 0.5}, rollout_id="ro-1", attempt_id="at-1")
EXTENDED = Span.model_validate({**SPAN.model_dump(), "tenant": {"id": 7}})
RESOURCES = ResourcesUpdate(
    resources_id="rs-1",
    resources={
        "llm": LLM(endpoint="e", model="m"),
        "proxy": ProxyLLM(endpoint="e", model="m"),
        "prompt": PromptTemplate(template="t", engine="jinja"),
    },
)
RUN = Run(run_id="ru-1", name="apo", start_time=1.0, summary={"best": 0.5})
POINT = MetricPoint(run_id="ru-1", step=1, time=2.0, values={"loss": 0.25})


def page(*items: Any) -> PaginatedResult[Any]:
    return PaginatedResult(items=items, limit=5, offset=2, total=9)


@pytest.mark.parametrize(
    ("name", "result"),
    [
        pytest.param("start_rollout", ATTEMPTED, id="attempted-rollout"),
        pytest.param("enqueue_rollout", PLAIN, id="plain-rollout"),
        pytest.param("enqueue_many_rollouts", [PLAIN, PLAIN], id="rollouts"),
        pytest.param("dequeue_rollout", ATTEMPTED, id="claim"),
        pytest.param("dequeue_rollout", None, id="no-claim"),
        pytest.param("dequeue_many_rollouts", [ATTEMPTED], id="claims"),
        pytest.param("get_rollout_by_id", ATTEMPTED, id="either-attempted"),
        pytest.param("get_rollout_by_id", PLAIN, id="or-plain"),
        pytest.param("get_rollout_by_id", None, id="or-none"),
        pytest.param("query_rollouts", page(PLAIN, ATTEMPTED), id="page-of-both"),
        pytest.param("query_attempts", page(ATTEMPT), id="page-of-attempts"),
        pytest.param("query_spans", page(SPAN, EXTENDED), id="page-of-spans"),
        pytest.param("query_spans", page(), id="empty-page"),
        pytest.param("add_span", EXTENDED, id="span-with-extra-fields"),
        pytest.param("add_many_spans", [SPAN, None], id="spans-and-duplicates"),
        pytest.param("get_next_span_sequence_id", 7, id="number"),
        pytest.param("get_many_span_sequence_ids", [1, 2], id="numbers"),
        pytest.param("get_latest_resources", RESOURCES, id="resources"),
        pytest.param("query_resources", page(RESOURCES), id="page-of-resources"),
        pytest.param("update_worker", Worker(worker_id="w", heartbeat_stats={"a": [1]}), id="worker"),
        pytest.param("finish_run", RUN, id="run"),
        pytest.param("query_metrics", page(POINT), id="page-of-metrics"),
        pytest.param("statistics", {"name": "store", "total_spans": 3, "uptime": 0.5}, id="statistics"),
    ],
)
def test_result_survives_the_wire(name: str, result: object) -> None:
    op = OPERATIONS[name]

    assert op.decode_result(op.encode_result(result)) == result


@pytest.mark.parametrize(
    ("name", "result"),
    [("update_rollout", ATTEMPTED), ("enqueue_many_rollouts", [ATTEMPTED]), ("wait_for_rollouts", [ATTEMPTED])],
    ids=["one", "sequence", "list"],
)
def test_attempt_travels_even_where_a_plain_rollout_is_declared(name: str, result: Any) -> None:
    encoded = json.loads(OPERATIONS[name].encode_result(result))

    rollout = encoded[0] if isinstance(encoded, list) else encoded
    assert rollout["attempt"] == ATTEMPT.model_dump()


@pytest.mark.parametrize(
    ("name", "parameter", "value"),
    [
        pytest.param("update_rollout", "config", RolloutConfig(max_attempts=2), id="config"),
        pytest.param("update_rollout", "metadata", None, id="none"),
        pytest.param("update_rollout", "input", {"q": [1, None]}, id="input"),
        pytest.param("add_span", "span", EXTENDED, id="span"),
        pytest.param("add_resources", "resources", RESOURCES.resources, id="resources"),
        pytest.param("get_many_span_sequence_ids", "rollout_attempt_ids", [("ro-1", "at-1")], id="pairs"),
    ],
)
def test_argument_survives_the_wire(name: str, parameter: str, value: object) -> None:
    adapter: TypeAdapter[Any] = OPERATIONS[name].adapters[parameter]

    assert adapter.validate_json(adapter.dump_json(value)) == value


# ---------------------------------------------------------------------- derived methods


class Small:
    @operation("GET", "/small/{size}", who="runner")
    async def measure(self, size: int) -> int:
        """How small."""
        raise NotImplementedError

    @operation("POST", "/small", who="runner")
    async def shrink(self) -> int:
        raise NotImplementedError


def name_of(op: Operation) -> Callable[..., Any]:
    async def method(self: object, *args: object, **kwargs: object) -> str:
        return op.name

    return method


async def test_class_is_given_the_operations_it_does_not_define() -> None:
    @forward_operations(name_of)
    class Forwarding(Small):
        async def shrink(self) -> int:
            return 1

    forwarding = Forwarding()

    assert (await forwarding.measure(3), await forwarding.shrink()) == ("measure", 1)


def test_derived_method_carries_the_declared_documentation() -> None:
    derived = forward_operations(name_of)(type("Forwarding", (Small,), {}))

    assert derived.measure.__doc__ == "How small."
    assert list(inspect.signature(derived.measure).parameters) == ["self", "size"]


# ---------------------------------------------------------------------- behaviours


def parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter]:
    return list(inspect.signature(function).parameters.values())


@pytest.mark.parametrize("name", BEHAVIOURS)
def test_behaviour_takes_the_arguments_of_the_contract(name: str) -> None:
    transaction, now, *rest = parameters_of(BEHAVIOURS[name])

    assert [transaction.name, now.name] == ["tx", "now"]
    declared = list(OPERATIONS[name].signature.parameters.values())
    if rest[-1:] and rest[-1].kind is inspect.Parameter.VAR_KEYWORD:  # a query, whose arguments make a selection
        rest, declared = rest[:-1], [parameter for parameter in declared if parameter.name in {p.name for p in rest}]
    assert rest == declared


def test_every_operation_has_a_behaviour_unless_the_store_itself_answers() -> None:
    assert set(OPERATIONS) - set(BEHAVIOURS) == {"statistics", "wait_for_rollouts"}
    assert set(BEHAVIOURS) <= set(OPERATIONS)


def test_operation_without_a_permission_cannot_be_declared() -> None:
    undecided: Any = operation

    with pytest.raises(TypeError, match="who"):
        undecided("POST", "/everything/drop")


@pytest.mark.parametrize("op", OPERATIONS.values(), ids=OPERATIONS)
def test_what_an_operation_names_are_its_arguments(op: Operation) -> None:
    named = {*op.ids, op.many, op.loose, op.echoes, op.route.body} - {None}

    assert named <= set(op.signature.parameters)
    assert op.mutates or op.watchdog
