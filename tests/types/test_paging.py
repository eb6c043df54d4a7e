"""A page behaves like the list of its items and equals it."""

import pytest
from pydantic import TypeAdapter, ValidationError

from agentlightning.types import (
    Attempt,
    AttemptedRollout,
    FilterField,
    PaginatedResult,
    Rollout,
    SortOptions,
    paging,
)

LETTERS = ["a", "b", "c"]


@pytest.fixture
def page() -> PaginatedResult[str]:
    return PaginatedResult(items=list(LETTERS), limit=3, offset=6, total=20)


def test_page_has_the_length_of_its_items(page: PaginatedResult[str]) -> None:
    assert len(page) == 3


@pytest.mark.parametrize("index", [0, 2, -1, slice(1, None), slice(None, None, -1), slice(5, 9)], ids=str)
def test_page_is_indexed_like_its_items(page: PaginatedResult[str], index: int | slice) -> None:
    assert page[index] == LETTERS[index]


def test_index_beyond_the_page_is_an_index_error(page: PaginatedResult[str]) -> None:
    with pytest.raises(IndexError):
        page[3]


def test_page_iterates_over_its_items_in_both_directions(page: PaginatedResult[str]) -> None:
    assert list(page) == LETTERS
    assert list(reversed(page)) == LETTERS[::-1]


def test_page_finds_and_counts_its_items(page: PaginatedResult[str]) -> None:
    assert "b" in page
    assert "z" not in page
    assert (page.index("c"), page.count("c")) == (2, 1)


@pytest.mark.parametrize("other", [["a", "b", "c"], ("a", "b", "c")], ids=["list", "tuple"])
def test_page_equals_the_sequence_of_its_items(page: PaginatedResult[str], other: object) -> None:
    assert page == other
    assert other == page


@pytest.mark.parametrize("other", [["a", "b"], ["a", "c", "b"], "abc", None], ids=["shorter", "order", "text", "none"])
def test_page_differs_from_anything_else(page: PaginatedResult[str], other: object) -> None:
    assert page != other


def test_page_equals_a_page_of_the_same_items_at_the_same_place(page: PaginatedResult[str]) -> None:
    assert page == PaginatedResult[str](items=tuple(LETTERS), limit=3, offset=6, total=20)


@pytest.mark.parametrize(
    "place", [{"limit": 4}, {"offset": 7}, {"total": 21}, {"items": ["a"]}], ids=lambda p: next(iter(p))
)
def test_page_differs_from_a_page_elsewhere(page: PaginatedResult[str], place: dict[str, object]) -> None:
    assert page != page.model_copy(update=place)


def test_page_asks_for_everything_by_default() -> None:
    page = PaginatedResult[str](items=[])

    assert (page.limit, page.offset, page.total) == (-1, 0, 0)


def test_empty_page_is_false_even_if_others_are_not() -> None:
    assert not PaginatedResult[str](items=[], total=5)


def test_page_is_not_hashable(page: PaginatedResult[str]) -> None:
    with pytest.raises(TypeError, match="unhashable"):
        hash(page)


def test_page_travels_with_its_place(page: PaginatedResult[str]) -> None:
    assert page.model_dump(mode="json") == {"items": LETTERS, "limit": 3, "offset": 6, "total": 20}


def test_page_of_rollouts_survives_the_wire_with_its_attempts() -> None:
    fields = {"rollout_id": "ro-1", "input": {"q": 1}, "start_time": 1.0}
    attempt = Attempt(rollout_id="ro-1", attempt_id="at-1", sequence_id=1, start_time=2.0)
    page = PaginatedResult[AttemptedRollout | Rollout](
        items=[Rollout(**fields), AttemptedRollout(**fields, attempt=attempt)], total=2
    )

    copy = PaginatedResult[AttemptedRollout | Rollout].model_validate_json(page.model_dump_json())

    assert copy == page
    assert [type(item) for item in copy] == [Rollout, AttemptedRollout]


@pytest.mark.parametrize("field", [{"exact": None}, {"within": [1, "a"]}, {"contains": "x"}, {}], ids=str)
def test_filter_field_may_hold_any_of_its_demands(field: dict[str, object]) -> None:
    assert TypeAdapter(FilterField).validate_python(field) == field


@pytest.mark.parametrize("options", [{"name": "status", "order": "up"}, {"order": "asc"}, {"name": "status"}], ids=str)
def test_sort_options_need_a_name_and_a_known_order(options: dict[str, str]) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(SortOptions).validate_python(options)


def test_module_exports_the_names_of_the_protocol() -> None:
    assert {"PaginatedResult", "FilterOptions", "FilterField", "SortOptions"} <= set(paging.__all__)
    assert all(hasattr(paging, name) for name in paging.__all__)
