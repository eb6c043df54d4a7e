"""Selections over Python objects: which records, in which order, which page of them."""

from dataclasses import dataclass
from typing import Any

import pytest

from agentlightning.errors import InvalidQuery
from agentlightning.store.selection import Selection, choose


@dataclass(frozen=True)
class Fruit:
    name: str
    colour: str | None = None
    weight: float | None = None


APPLE = Fruit("apple", "red", 3.0)
BANANA = Fruit("banana", "yellow", 2.0)
CHERRY = Fruit("cherry", "red", 1.0)
DATE = Fruit("date", None, 2.0)
ELDER = Fruit("elder", "black", None)
BASKET = [APPLE, BANANA, CHERRY, DATE, ELDER]
FIELDS = ["name", "colour", "weight"]


def names(**asked: Any) -> list[str]:
    return [fruit.name for fruit in choose(BASKET, Selection.of(asked, FIELDS))]


# ---------------------------------------------------------------------- order


@pytest.mark.parametrize(
    ("sort_by", "sort_order", "expected"),
    [
        pytest.param(None, "asc", "apple banana cherry date elder", id="unsorted"),
        pytest.param(None, "desc", "apple banana cherry date elder", id="unsorted-has-no-direction"),
        pytest.param("name", "desc", "elder date cherry banana apple", id="text-downwards"),
        pytest.param("weight", "asc", "elder cherry banana date apple", id="missing-first-ties-in-order"),
        pytest.param("weight", "desc", "apple banana date cherry elder", id="missing-last-ties-in-order"),
        pytest.param("colour", "asc", "date elder apple cherry banana", id="text-missing-first"),
        pytest.param("colour", "desc", "banana apple cherry elder date", id="text-missing-last"),
    ],
)
def test_records_are_sorted(sort_by: str | None, sort_order: Any, expected: str) -> None:
    assert names(sort_by=sort_by, sort_order=sort_order) == expected.split()


# ---------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        pytest.param({"sort_by": "taste"}, "There is no field 'taste' to filter or sort by", id="sort-key"),
        pytest.param({"taste": 1}, r"use one of \['colour', 'name', 'weight'\]", id="condition"),
        pytest.param({"name_in": "running"}, "a list of values to filter by, not the text 'running'", id="list"),
        pytest.param({"name_contains": 1}, "Expected a text to look for, not 1", id="text"),
        pytest.param({"filter_logic": "xor"}, "filter_logic is 'xor'; use 'and' or 'or'", id="logic"),
        pytest.param({"sort_order": "up"}, "sort_order is 'up'; use 'asc' or 'desc'", id="order"),
    ],
)
def test_selection_that_cannot_be_answered_is_refused(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidQuery, match=message):
        Selection.of(asked, FIELDS)
