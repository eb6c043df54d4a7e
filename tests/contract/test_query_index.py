"""Rollouts are found by mode, reward, run, step, group, agent, error, resources, time and task, on every back end."""

from typing import Any

import pytest

from agentlightning.errors import InvalidQuery, InvalidValue
from agentlightning.store import LightningStore
from agentlightning.types import AttemptedRollout, EnqueueRolloutRequest, RolloutConfig, Span, Task

TASKS: dict[str, Any] = {
    "a": {"question": 'Was kostet "Öl"?', "agent": "solver"},
    "b": {"question": "3 * 4"},
    "c": Task(rollout_id="", input="plain", metadata={"agent": "critic"}),
    "d": "never tried",
}


def reward_span(rollout: AttemptedRollout, reward: Any, number: int = 1) -> Span:
    attributes = {"agentlightning.reward.0.name": "primary", "agentlightning.reward.0.value": reward}
    return Span.from_attributes(
        name="agentlightning.reward",
        attributes=attributes,
        sequence_id=number,
        rollout_id=rollout.rollout_id,
        attempt_id=rollout.attempt.attempt_id,
    )


@pytest.fixture
async def filled(store: LightningStore, clock: Any) -> LightningStore:
    """Four rollouts: one of reward 0.5, one of reward 1 after another, one that failed, one nobody has tried."""
    about: dict[str, dict[str, Any]] = {
        "a": {"metadata": {"run_id": "run-1", "step": 1, "group": "group-0"}, "resources_id": "first"},
        "b": {"metadata": {"run_id": "run-1", "step": 2, "group": "group-1"}},
        "c": {"metadata": {"run_id": "run-2", "step": "two", "group": 7}},
        "d": {},
    }
    made = {}
    for name in "abc":
        made[name] = await store.start_rollout(TASKS[name], rollout_id=name, attempt_id=f"{name}-1", **about[name])
        clock.advance(10)
    await store.enqueue_rollout(TASKS["d"], rollout_id="d")
    await store.add_span(reward_span(made["a"], 0.5))
    await store.add_span(reward_span(made["b"], 0.0))
    await store.finish_attempt("b", "b-1", "succeeded", spans=[reward_span(made["b"], 1, 2)])
    noted = {"error": {"type": "ValueError", "message": "no such tool\nmore", "traceback": "…"}}
    await store.finish_attempt("c", "c-1", "failed", metadata=noted)
    return store


CASES: list[tuple[dict[str, Any], str]] = [
    ({"run_id_in": ["run-1"]}, "ab"),
    ({"run_id_in": ["run-1", "run-2"], "step_in": [2]}, "b"),
    ({"group_id_in": ["group-0"]}, "a"),
    ({"agent_in": ["solver"]}, "a"),
    ({"agent_in": ["critic", "solver"]}, "ac"),
    ({"resources_id_in": ["first"]}, "a"),
    ({"reward_min": 0.5}, "ab"),
    ({"reward_min": 0.6, "reward_max": 2}, "b"),
    ({"reward_max": 0.5}, "a"),
    ({"start_time_max": -1}, ""),
    ({"error_contains": "no such tool"}, "c"),
    ({"error_contains": "ValueError", "reward_min": 0.9, "filter_logic": "or"}, "bc"),
    ({"input_contains": 'kostet "Öl"'}, "a"),
    ({"input_contains": "3 * 4", "run_id_in": ["run-1"]}, "b"),
    ({"input_contains": "3 * 5"}, ""),
    ({"run_id_in": []}, ""),
    ({"sort_by": "reward", "sort_order": "desc"}, "bacd"),
    ({"sort_by": "reward", "sort_order": "asc"}, "cdab"),
    ({"sort_by": "error", "sort_order": "desc", "limit": 1}, "c"),
    ({"sort_by": "step", "limit": 1, "offset": 3}, "b"),
]


async def test_rollouts_are_found_by_what_became_of_them(filled: LightningStore) -> None:
    found = []
    for asked, _ in CASES:  # in one store, for to fill one for each takes a while
        page = await filled.query_rollouts(**asked)
        found.append((asked, "".join(rollout.rollout_id for rollout in page)))

    assert found == CASES


async def test_a_rollout_knows_the_last_reward_of_its_latest_attempt(store: LightningStore) -> None:
    config = RolloutConfig(max_attempts=2, retry_condition=["failed"])
    first = await store.start_rollout("task", config=config)
    await store.add_span(reward_span(first, 0.25))
    assert [one.reward for one in await store.query_rollouts(reward_min=0.2)] == [0.25]

    await store.update_attempt(first.rollout_id, first.attempt.attempt_id, status="failed")
    second = await store.start_attempt(first.rollout_id)
    again = await store.get_rollout_by_id(first.rollout_id)
    await store.add_span(reward_span(first, 0.75, 2))  # too late: it is of the attempt before
    await store.add_many_spans([reward_span(second, 0.5, 3), reward_span(second, "high", 4)])

    assert again is not None
    assert again.reward is None
    assert (await store.query_rollouts(sort_by="reward"))[0].reward == 0.5


async def test_an_error_that_the_next_attempt_mends_is_no_longer_found(store: LightningStore) -> None:
    first = await store.start_rollout("task")
    await store.update_attempt(first.rollout_id, first.attempt.attempt_id, status="timeout")
    while_failed = await store.query_rollouts(error_contains="timeout")
    second = await store.start_attempt(first.rollout_id)
    await store.update_attempt(first.rollout_id, second.attempt.attempt_id, status="succeeded")

    assert len(while_failed) == 1
    assert len(await store.query_rollouts(error_contains="timeout")) == 0


REFUSED: list[dict[str, Any]] = [
    {"sort_by": "input"},
    {"sort_by": "metadata"},
    {"sort_by": "status; DROP TABLE rollouts"},
    {"reward_min": float("nan")},
    {"run_id_in": "run-1"},
    {"limit": -2},
    {"offset": -1},
    {"status": "x"},
    {"status_in": "succeeded"},
    *({"mode_in": mode_in} for mode_in in ("train", ["training"], [None], ["train", None])),
]


async def test_what_cannot_be_asked_of_rollouts_is_refused(store: LightningStore) -> None:
    await store.enqueue_rollout("a")
    for asked in REFUSED:
        with pytest.raises((InvalidQuery, ValueError)):
            await store.query_rollouts(**asked)
    with pytest.raises(InvalidQuery, match=r"status_in holds 'succeded'; give a list out of \[.*'succeeded'"):
        await store.query_rollouts(status_in=["succeded"])  # type: ignore[list-item] # a typing error


MODES: list[Any] = ["train", "val", "test", None]
BY_MODE: list[tuple[dict[str, Any], str]] = [
    ({}, "1-train 1-val 1-test 1-None 2-train 2-val 2-test 2-None"),
    ({"mode_in": None}, "1-train 1-val 1-test 1-None 2-train 2-val 2-test 2-None"),
    ({"mode_in": ["train", "val", "test"]}, "1-train 1-val 1-test 2-train 2-val 2-test"),
    ({"mode_in": ["test", "train"]}, "1-train 1-test 2-train 2-test"),
    ({"mode_in": ("train", "train")}, "1-train 2-train"),
    ({"mode_in": []}, ""),
    ({"mode_in": ["val"], "status_in": ["failed"]}, "2-val"),
    ({"mode_in": ["val"], "rollout_id_contains": "1"}, "1-val"),
    ({"mode_in": ["val"], "rollout_id_in": ["1-val", "1-train"]}, "1-val"),
    ({"mode_in": ["val"], "status_in": ["failed"], "filter_logic": "or"}, "1-val 2-train 2-val 2-test 2-None"),
]


async def test_rollouts_of_the_named_modes_are_found(store: LightningStore) -> None:
    for number in (1, 2):
        for mode in MODES:
            await store.enqueue_rollout(number, mode, rollout_id=f"{number}-{mode}")
            if number == 2:
                await store.update_rollout(f"{number}-{mode}", status="failed")

    found = [" ".join([one.rollout_id for one in await store.query_rollouts(**asked)]) for asked, _ in BY_MODE]

    assert found == [expected for _, expected in BY_MODE]


async def test_a_number_that_no_record_has_is_refused_by_every_back_end(store: LightningStore) -> None:
    for number in (2**63, 2**64 - 1, -(2**63)):
        with pytest.raises(InvalidQuery, match="'step_in' has a number of more than 63 bits"):
            await store.query_rollouts(step_in=[1, number])

    assert list(await store.query_rollouts(reward_min=2.0**64, start_time_max=-(2.0**64))) == []
    assert list(await store.query_rollouts(step_in=[2**63 - 1, -5])) == []


async def test_queries_see_what_changed_between_them_and_nothing_of_what_failed(store: LightningStore) -> None:
    await store.enqueue_many_rollouts(
        [EnqueueRolloutRequest(input={"agent": name}, metadata={"run_id": "run-1"}) for name in ("a", "b", "c")]
    )

    async def found(**asked: object) -> list[str]:
        return [rollout.input["agent"] for rollout in await store.query_rollouts(**asked)]  # type: ignore[arg-type] # any filter

    assert await found(status_in=["queuing"], sort_by="agent", sort_order="desc") == ["c", "b", "a"]
    assert await found(error_contains="Timeout") == []

    claims = await store.dequeue_many_rollouts(limit=2)
    for claim, message in zip(claims, ("first", "second"), strict=True):
        await store.update_attempt(
            claim.rollout_id,
            claim.attempt.attempt_id,
            status="failed",
            metadata={"error": {"type": "TimeoutError", "message": message}},
        )
    with pytest.raises(InvalidValue):
        await store.update_rollout(claims[0].rollout_id, input={"agent": "z"}, status="nonsense")  # type: ignore[arg-type] # not a status
    await store.enqueue_rollout({"agent": "d"})

    assert await found(status_in=["queuing"], sort_by="agent") == ["c", "d"]
    assert await found(error_contains="second") == ["b"]
    assert await found(agent_in=["z"]) == []
    assert await found(run_id_in=["run-1"], sort_by="error", sort_order="desc") == ["b", "a", "c"]
    assert await found(rollout_id_in=[claims[1].rollout_id], status_in=["failed"]) == ["b"]
