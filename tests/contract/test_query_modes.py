"""Rollouts asked for by their mode, over every back end."""

from typing import Any

import pytest

from agentlightning.errors import InvalidQuery
from agentlightning.store import LightningStore

SECOND = ["second-train", "second-val", "second-test", "second-None"]


async def fill(store: LightningStore) -> None:
    """One rollout of each mode and one without, twice; those of the second round have failed."""
    for round_name in ("first", "second"):
        for mode in ("train", "val", "test", None):
            rollout_id = f"{round_name}-{mode}"
            await store.enqueue_rollout(rollout_id, mode, rollout_id=rollout_id)
            if round_name == "second":
                await store.update_rollout(rollout_id, status="failed")


async def ids(store: LightningStore, **filters: Any) -> list[str]:
    return [rollout.rollout_id for rollout in await store.query_rollouts(**filters)]


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({"mode_in": ["val"]}, ["first-val", "second-val"]),
        ({"mode_in": ["test", "train"]}, ["first-train", "first-test", "second-train", "second-test"]),
        ({"mode_in": ("train", "train")}, ["first-train", "second-train"]),
        ({"mode_in": []}, []),
        ({"mode_in": ["val"], "status_in": ["failed"]}, ["second-val"]),
        ({"mode_in": ["val"], "rollout_id_contains": "first"}, ["first-val"]),
        ({"mode_in": ["val"], "rollout_id_in": ["first-val", "first-train"]}, ["first-val"]),
        ({"mode_in": ["val"], "status_in": ["failed"], "filter_logic": "or"}, ["first-val", *SECOND]),
    ],
    ids=["one", "several", "twice", "empty", "and-status", "and-part-of-id", "and-ids", "or-status"],
)
async def test_rollouts_of_the_named_modes_are_found(
    store: LightningStore, filters: dict[str, Any], expected: list[str]
) -> None:
    await fill(store)

    assert await ids(store, **filters) == expected


async def test_none_does_not_filter_and_all_modes_leave_out_rollouts_without_one(store: LightningStore) -> None:
    await fill(store)

    assert await ids(store, mode_in=None) == await ids(store)
    assert len(await ids(store)) == 8
    assert [one for one in await ids(store, mode_in=["train", "val", "test"]) if one.endswith("None")] == []
    assert len(await ids(store, mode_in=["train", "val", "test"])) == 6


@pytest.mark.parametrize(
    "mode_in", ["train", ["training"], [None], ["train", None]], ids=["text", "unknown", "none", "none-among-them"]
)
async def test_what_is_no_list_of_modes_is_refused(store: LightningStore, mode_in: Any) -> None:
    await fill(store)

    with pytest.raises(InvalidQuery):
        await store.query_rollouts(mode_in=mode_in)


async def test_status_that_does_not_exist_is_refused_with_those_that_do(store: LightningStore) -> None:
    with pytest.raises(InvalidQuery, match=r"status_in holds 'succeded'; give a list out of \[.*'succeeded'"):
        await store.query_rollouts(status_in=["succeded"])  # type: ignore[list-item] # a typing error
    with pytest.raises(InvalidQuery):
        await store.query_rollouts(status_in="succeeded")  # type: ignore[arg-type] # not a list
