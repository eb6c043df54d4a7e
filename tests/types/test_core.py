"""Rollouts, attempts and what surrounds them; `tests/design_notes/test_models.py` has their fields."""

import pickle
from typing import Any

import pytest
from pydantic import ValidationError

from agentlightning.types import (
    Attempt,
    AttemptedRollout,
    Hook,
    ParallelWorkerBase,
    Rollout,
    RolloutConfig,
)

Fields = dict[str, Any]

ATTEMPT = {"rollout_id": "ro-1", "attempt_id": "at-1", "sequence_id": 1, "start_time": 10.5}
ROLLOUT = {"rollout_id": "ro-1", "input": {"question": "why"}, "start_time": 10.0}


@pytest.mark.parametrize("fields", [ROLLOUT, {"rollout": Rollout(**ROLLOUT)}], ids=["fields", "rollout"])
def test_attempted_rollout_refuses_the_attempt_of_another_rollout(fields: Fields) -> None:
    foreign = Attempt(**{**ATTEMPT, "rollout_id": "ro-2"})
    with pytest.raises(ValidationError, match="Attempt of rollout 'ro-2' given for rollout 'ro-1'"):
        AttemptedRollout(**fields, attempt=foreign)


@pytest.mark.parametrize("fields", [ROLLOUT, {"rollout": Rollout(**ROLLOUT)}], ids=["fields", "rollout"])
def test_attempted_rollout_survives_pickle_validation_and_json(fields: Fields) -> None:
    made = AttemptedRollout(**fields, attempt=Attempt(**ATTEMPT))

    assert pickle.loads(pickle.dumps(made)) == made
    assert AttemptedRollout.model_validate(made) == made
    assert AttemptedRollout.model_validate(made.model_dump()) == made
    assert AttemptedRollout.model_validate_json(made.model_dump_json()) == made


def test_output_is_written_to_json_only_where_there_is_one() -> None:
    without, falsy = Rollout(**ROLLOUT), Rollout(**ROLLOUT, output="")

    assert "output" not in without.model_dump()
    assert "output" not in without.model_dump_json()
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
