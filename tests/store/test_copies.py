"""Copies of records: what they share with their originals, and what of pydantic's models they rely on."""

import pickle
from types import MappingProxyType
from typing import Any

import pytest
from pydantic import BaseModel

from agentlightning.store.copies import attempted, copied_span, detached, replaced
from agentlightning.types import LLM, Attempt, AttemptedRollout, Rollout, Span, Worker

ROLLOUT = Rollout(rollout_id="ro-1", input={"q": 1}, start_time=1.0, metadata={"a": 1})
ATTEMPT = Attempt(rollout_id="ro-1", attempt_id="at-1", sequence_id=1, start_time=2.0)


def make_span(**fields: Any) -> Span:
    span = Span.from_attributes(attributes={"a": [1]}, rollout_id="ro-1", attempt_id="at-1", sequence_id=1)
    return Span.model_validate({**span.model_dump(), **fields})


def test_pydantic_keeps_a_model_in_the_four_places_that_copies_set() -> None:
    """If this fails, pydantic has moved something: `_built` in store/copies.py must set it too."""
    slots = {name for kind in Span.__mro__ for name in getattr(kind, "__slots__", ())}

    assert slots == {"__dict__", "__pydantic_fields_set__", "__pydantic_extra__", "__pydantic_private__"}


def test_replaced_model_differs_in_the_named_fields_only() -> None:
    worker = Worker(worker_id="w", last_idle_time=1.0)

    assert replaced(worker, status="busy", last_idle_time=None) == Worker(worker_id="w", status="busy")
    assert worker == Worker(worker_id="w", last_idle_time=1.0)


def test_replaced_model_keeps_its_type_and_extra_fields() -> None:
    copy = replaced(make_span(tenant="acme"), name="renamed")

    assert type(copy) is Span
    assert (copy.name, copy.model_extra) == ("renamed", {"tenant": "acme"})


@pytest.mark.parametrize("record", [replaced(ROLLOUT), attempted(ROLLOUT, ATTEMPT), copied_span(make_span())])
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


def test_fields_of_a_record_can_be_assigned_without_its_original() -> None:
    record = replaced(ROLLOUT)

    record.mode = "val"

    assert record.model_dump(exclude_unset=True)["mode"] == "val"
    assert ROLLOUT.mode is None


def test_attempted_rollout_is_what_validation_would_make() -> None:
    second = ATTEMPT.model_copy(update={"attempt_id": "at-2", "sequence_id": 2})

    made = attempted(ROLLOUT, ATTEMPT)

    assert made == AttemptedRollout(**ROLLOUT.model_dump(), attempt=ATTEMPT)
    assert made.model_dump() == {**ROLLOUT.model_dump(), "attempt": ATTEMPT.model_dump()}
    assert attempted(made, second).attempt is second
    assert "attempt" not in vars(ROLLOUT)


def test_copied_span_is_changed_without_its_original() -> None:
    span = make_span(tenant="acme")

    copy = copied_span(span)
    assert copy == span
    copy.attributes["late"] = 2
    copy.name = "renamed"

    assert (span.attributes, span.name) == ({"a": [1]}, "agentlightning.virtual")


def test_containers_of_a_detached_value_are_new_at_every_depth() -> None:
    value: dict[str, Any] = {"list": [1, {"deep": []}], "tuple": ([],), "set": {1}, "llm": LLM(endpoint="e", model="m")}

    copy = detached(value)
    copy["list"][1]["deep"].append(1)
    copy["tuple"][0].append(1)
    copy["set"].add(2)
    copy["llm"].sampling_parameters["seed"] = 1
    copy["late"] = 1

    assert value == {
        "list": [1, {"deep": []}],
        "tuple": ([],),
        "set": {1},
        "llm": LLM(endpoint="e", model="m"),
    }


@pytest.mark.parametrize(
    "value", [None, 1, "a", [1, (2, {"a": {3}})], {"a": None}, (), MappingProxyType({"a": 1}), ROLLOUT], ids=repr
)
def test_detached_value_equals_its_original(value: object) -> None:
    copy = detached(value)

    assert copy == value
    assert type(copy) is type(value)


def test_object_in_a_detached_value_is_passed_on_as_it_is() -> None:
    opaque = object()

    assert detached({"a": [opaque]})["a"][0] is opaque
