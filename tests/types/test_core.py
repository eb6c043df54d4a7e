"""Rollouts, attempts and what surrounds them: defaults, required fields, closed sets and the wire format."""

import pickle
from typing import Any, get_args

import pytest
from pydantic import BaseModel, ValidationError

from agentlightning.types import (
    Attempt,
    AttemptedRollout,
    AttemptStatus,
    EnqueueRolloutRequest,
    GenericResponse,
    Hook,
    MetricPoint,
    ParallelWorkerBase,
    Rollout,
    RolloutConfig,
    RolloutLegacy,
    RolloutMode,
    RolloutStatus,
    Run,
    Task,
    TaskIfAny,
    Triplet,
    Worker,
    WorkerStatus,
)

Fields = dict[str, Any]

NO_PATIENCE = {"timeout_seconds": None, "unresponsive_seconds": None, "max_attempts": 1, "retry_condition": []}
ATTEMPT = {"rollout_id": "ro-1", "attempt_id": "at-1", "sequence_id": 1, "start_time": 10.5}
ATTEMPT_DEFAULTS = dict.fromkeys(["end_time", "worker_id", "last_heartbeat_time", "metadata"]) | {"status": "preparing"}
ROLLOUT = {"rollout_id": "ro-1", "input": {"question": "why"}, "start_time": 10.0}
ROLLOUT_DEFAULTS = dict.fromkeys(["end_time", "mode", "resources_id", "metadata"]) | {
    "status": "queuing",
    "config": NO_PATIENCE,
}

MODELS: list[tuple[type[BaseModel], Fields, Fields]] = [
    (Triplet, {"prompt": "p", "response": "r"}, {"reward": None, "metadata": {}}),
    (RolloutConfig, {}, NO_PATIENCE),
    (Attempt, ATTEMPT, ATTEMPT_DEFAULTS),
    (Rollout, ROLLOUT, ROLLOUT_DEFAULTS),
    (AttemptedRollout, {**ROLLOUT, "attempt": {**ATTEMPT, **ATTEMPT_DEFAULTS}}, ROLLOUT_DEFAULTS),
    (
        EnqueueRolloutRequest,
        {"input": "why"},
        dict.fromkeys(["mode", "resources_id", "config", "metadata", "rollout_id"]),
    ),
    (
        Worker,
        {"worker_id": "w"},
        dict.fromkeys(
            [
                "heartbeat_stats",
                "last_heartbeat_time",
                "last_dequeue_time",
                "last_busy_time",
                "last_idle_time",
                "current_rollout_id",
                "current_attempt_id",
            ]
        )
        | {"status": "unknown"},
    ),
    (
        Task,
        {"rollout_id": "ro-1", "input": "why"},
        dict.fromkeys(["mode", "resources_id", "create_time", "last_claim_time", "num_claims"]) | {"metadata": {}},
    ),
    (TaskIfAny, {"is_available": False}, {"task": None}),
    (
        RolloutLegacy,
        {"rollout_id": "ro-1"},
        dict.fromkeys(["task", "final_reward", "triplets", "trace", "logs"]) | {"metadata": {}},
    ),
    (GenericResponse, {}, {"status": "success", "message": None, "data": None}),
    (
        Run,
        {"run_id": "ru-1", "name": "apo", "start_time": 1.0},
        {"status": "running", "end_time": None, "config": {}, "metadata": {}, "summary": {}},
    ),
    (MetricPoint, {"run_id": "ru-1", "step": 3, "time": 1.5, "values": {"reward": 0.5}}, {}),
]

RICH_MODELS = [
    Triplet(prompt=[1, 2], response={"text": "r"}, reward=0.5, metadata={"turn": 1}),
    RolloutConfig(timeout_seconds=1.5, unresponsive_seconds=2, max_attempts=3, retry_condition=["timeout", "failed"]),
    Attempt(**ATTEMPT, end_time=11.0, status="timeout", worker_id="w", last_heartbeat_time=10.75, metadata={"a": [1]}),
    Rollout(**ROLLOUT, mode="val", resources_id="rs-1", status="requeuing", metadata={}),
    AttemptedRollout(**ROLLOUT, attempt=Attempt(**ATTEMPT), config=RolloutConfig(max_attempts=2)),
    EnqueueRolloutRequest(input=[1], mode="test", config=RolloutConfig(), metadata={"a": None}, rollout_id="mine"),
    Worker(worker_id="w", status="busy", heartbeat_stats={"cpu": 0.5}, last_busy_time=3.0, current_attempt_id="at-1"),
    Task(rollout_id="ro-1", input="why", mode="train", create_time=1.0, num_claims=2, metadata={"a": 1}),
    TaskIfAny(is_available=True, task=Task(rollout_id="ro-1", input=None)),
    RolloutLegacy(rollout_id="ro-1", final_reward=1.0, triplets=[Triplet(prompt=1, response=2)], trace=[{"name": "s"}]),
    GenericResponse(message="stored", data={"id": 1}),
    Run(run_id="ru-1", name="apo", start_time=1.0, status="stopped", end_time=2.0, summary={"best": 0.75}),
    MetricPoint(run_id="ru-1", step=0, time=1.0, values={"loss": 1e-9}),
]


@pytest.mark.parametrize(("model", "required", "defaults"), MODELS, ids=lambda case: getattr(case, "__name__", ""))
def test_fields_left_out_take_their_defaults(model: type[BaseModel], required: Fields, defaults: Fields) -> None:
    assert model(**required).model_dump() == {**required, **defaults}


@pytest.mark.parametrize("model", RICH_MODELS, ids=lambda model: type(model).__name__)
def test_model_survives_the_wire(model: BaseModel) -> None:
    assert type(model).model_validate(model.model_dump(mode="json")) == model
    assert type(model).model_validate_json(model.model_dump_json()) == model


@pytest.mark.parametrize(
    ("literal", "values"),
    [
        (RolloutMode, "train val test"),
        (RolloutStatus, "queuing preparing running failed succeeded cancelled requeuing"),
        (AttemptStatus, "preparing running failed succeeded unresponsive timeout"),
        (WorkerStatus, "idle busy unknown"),
    ],
    ids=["RolloutMode", "RolloutStatus", "AttemptStatus", "WorkerStatus"],
)
def test_closed_set_holds_exactly_the_words_of_the_protocol(literal: object, values: str) -> None:
    assert set(get_args(literal)) == set(values.split())


@pytest.mark.parametrize("fields", [ROLLOUT, {"rollout": Rollout(**ROLLOUT)}], ids=["fields", "rollout"])
def test_attempted_rollout_refuses_the_attempt_of_another_rollout(fields: Fields) -> None:
    foreign = Attempt(**{**ATTEMPT, "rollout_id": "ro-2"})
    with pytest.raises(ValidationError, match="Attempt of rollout 'ro-2' given for rollout 'ro-1'"):
        AttemptedRollout(**fields, attempt=foreign)


def test_attempted_rollout_offers_the_plain_rollout() -> None:
    fields = {**ROLLOUT, "mode": "val", "status": "running", "metadata": {"a": 1}}

    plain = AttemptedRollout(**fields, attempt=Attempt(**ATTEMPT)).rollout

    assert type(plain) is Rollout
    assert plain == Rollout(**fields)


def test_attempted_rollout_is_made_of_a_rollout_and_an_attempt() -> None:
    rollout, attempt = Rollout(**ROLLOUT, mode="val", output={"a": 1}), Attempt(**ATTEMPT)

    made = AttemptedRollout(rollout=rollout, attempt=attempt)

    assert made == AttemptedRollout(**ROLLOUT, mode="val", output={"a": 1}, attempt=attempt)
    assert (made.rollout, made.attempt) == (rollout, attempt)


@pytest.mark.parametrize("fields", [ROLLOUT, {"rollout": Rollout(**ROLLOUT)}], ids=["fields", "rollout"])
def test_attempted_rollout_survives_pickle_validation_and_json(fields: Fields) -> None:
    made = AttemptedRollout(**fields, attempt=Attempt(**ATTEMPT))

    assert pickle.loads(pickle.dumps(made)) == made
    assert AttemptedRollout.model_validate(made) == made
    assert AttemptedRollout.model_validate(made.model_dump()) == made
    assert AttemptedRollout.model_validate_json(made.model_dump_json()) == made


def test_output_is_written_to_json_only_where_there_is_one() -> None:
    without, falsy = Rollout(**ROLLOUT), Rollout(**ROLLOUT, output="")

    assert (without.output, "output" in without.model_dump(), b"output" in without.model_dump_json().encode()) == (
        None,
        False,
        False,
    )
    assert falsy.model_dump()["output"] == Rollout.model_validate_json(falsy.model_dump_json()).output == ""


def test_parallel_worker_knows_its_number_once_initialised() -> None:
    worker = ParallelWorkerBase()
    before = worker.worker_id

    worker.init_worker(3, "anything", at="all")
    worker.teardown_worker(3, "anything", at="all")

    assert (before, worker.worker_id) == (None, 3)
    assert [getattr(worker, step)("anything", at="all") for step in ("init", "run", "teardown")] == [None] * 3


CALLBACKS = {
    "on_trace_start": ["agent", "runner", "tracer", "rollout"],
    "on_trace_end": ["agent", "runner", "tracer", "rollout"],
    "on_rollout_start": ["agent", "runner", "rollout"],
    "on_rollout_end": ["agent", "runner", "rollout", "spans"],
}


@pytest.mark.parametrize(("name", "arguments"), CALLBACKS.items(), ids=CALLBACKS)
async def test_callback_of_a_hook_is_an_awaitable_that_does_nothing(name: str, arguments: list[str]) -> None:
    assert await getattr(Hook(), name)(**dict.fromkeys(arguments)) is None
    with pytest.raises(TypeError, match="positional"):
        getattr(Hook(), name)(*arguments)


def test_requeueing_lost_attempts_is_written_only_where_it_is_switched_off() -> None:
    usual, without = RolloutConfig(), RolloutConfig(requeue_lost=False)

    assert "requeue_lost" not in usual.model_dump()
    assert without.model_dump()["requeue_lost"] is False
    assert RolloutConfig.model_validate_json(without.model_dump_json()) == without
    assert RolloutConfig.model_validate_json('{"max_attempts": 2}').requeue_lost
