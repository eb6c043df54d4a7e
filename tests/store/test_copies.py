"""Copies of records: what they share with their originals, and what of pydantic's models they rely on."""

import pickle
from typing import Any

import pytest
from pydantic import BaseModel

from agentlightning.store.copies import attempted, replaced
from agentlightning.types import Attempt, AttemptedRollout, Rollout, Span

ROLLOUT = Rollout(rollout_id="ro-1", input={"q": 1}, start_time=1.0, metadata={"a": 1})
ATTEMPT = Attempt(rollout_id="ro-1", attempt_id="at-1", sequence_id=1, start_time=2.0)


def make_span(**fields: Any) -> Span:
    span = Span.from_attributes(attributes={"a": [1]}, rollout_id="ro-1", attempt_id="at-1", sequence_id=1)
    return Span.model_validate({**span.model_dump(), **fields})


def test_pydantic_keeps_a_model_in_the_four_places_that_copies_set() -> None:
    """If this fails, pydantic has moved something: `_built` in store/copies.py must set it too."""
    slots = {name for kind in Span.__mro__ for name in getattr(kind, "__slots__", ())}

    assert slots == {"__dict__", "__pydantic_fields_set__", "__pydantic_extra__", "__pydantic_private__"}


@pytest.mark.parametrize("record", [replaced(ROLLOUT), attempted(ROLLOUT, ATTEMPT), replaced(make_span())])
@pytest.mark.parametrize("change", ["discard", "remove", "difference_update"])
def test_records_do_not_lose_the_field_names_they_share(record: BaseModel, change: str) -> None:
    with pytest.raises(TypeError, match=r"change that of record.model_copy\(\)"):
        getattr(record.model_fields_set, change)({"mode"} if change == "difference_update" else "mode")
    assert record.model_fields_set == set(type(record).model_fields)


def test_copies_of_a_record_have_field_names_of_their_own() -> None:
    first, second = replaced(ROLLOUT).model_copy(), pickle.loads(pickle.dumps(replaced(ROLLOUT)))

    first.model_fields_set.discard("mode")
    second.model_fields_set.discard("status")

    assert "mode" not in first.model_dump(exclude_unset=True)
    assert "status" not in second.model_dump(exclude_unset=True)
    assert {"mode", "status"} <= replaced(ROLLOUT).model_dump(exclude_unset=True).keys()


def test_attempted_rollout_is_what_validation_would_make() -> None:
    second = ATTEMPT.model_copy(update={"attempt_id": "at-2", "sequence_id": 2})

    made = attempted(ROLLOUT, ATTEMPT)

    assert made == AttemptedRollout(**ROLLOUT.model_dump(), attempt=ATTEMPT)
    assert made.model_dump() == {**ROLLOUT.model_dump(), "attempt": ATTEMPT.model_dump()}
    assert attempted(made, second).attempt == second
    assert "attempt" not in vars(ROLLOUT)
