"""A page behaves like the list of its items and equals it."""

import pytest
from pydantic import TypeAdapter, ValidationError

from agentlightning.types import Attempt, AttemptedRollout, FilterField, PaginatedResult, Rollout, SortOptions

LETTERS = ["a", "b", "c"]


@pytest.fixture
def page() -> PaginatedResult[str]:
    return PaginatedResult(items=list(LETTERS), limit=3, offset=6, total=20)


def test_page_is_used_like_its_items(page: PaginatedResult[str]) -> None:
    assert (len(page), list(page), list(reversed(page))) == (3, LETTERS, LETTERS[::-1])
    assert ("b" in page, "z" in page, page.index("c"), page.count("c")) == (True, False, 2, 1)
    with pytest.raises(IndexError):
        page[3]


def test_page_equals_the_sequence_of_its_items(page: PaginatedResult[str]) -> None:
    assert page == LETTERS
    assert tuple(LETTERS) == page
    assert page == PaginatedResult[str](items=tuple(LETTERS), limit=3, offset=6, total=20)
    with pytest.raises(TypeError, match="unhashable"):
        hash(page)


@pytest.mark.parametrize(
    "place", [{"limit": 4}, {"offset": 7}, {"total": 21}, {"items": ["a"]}], ids=lambda p: next(iter(p))
)
def test_page_differs_from_a_page_elsewhere(page: PaginatedResult[str], place: dict[str, object]) -> None:
    assert page != page.model_copy(update=place)


def test_page_asks_for_everything_by_default_and_is_false_if_empty() -> None:
    page = PaginatedResult[str](items=[])
    assert (page.limit, page.offset, page.total, bool(page)) == (-1, 0, 0, False)


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
