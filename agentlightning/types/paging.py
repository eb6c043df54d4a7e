"""Pages, filters and sort orders: how a query is asked and answered."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Generic, Literal, TypeVar, overload

from pydantic import BaseModel
from typing_extensions import TypedDict

__all__ = ["PaginatedResult", "FilterOptions", "FilterField", "SortOptions", "FilterLogic", "SortOrder"]

T_co = TypeVar("T_co", covariant=True)
OtherT = TypeVar("OtherT")

FilterLogic = Literal["and", "or"]
SortOrder = Literal["asc", "desc"]


class FilterField(TypedDict, total=False):
    """Conditions on one field; all that are given must hold."""

    exact: Any
    """The field equals this value."""
    within: Sequence[Any]
    """The field is one of these values; an empty sequence matches nothing."""
    contains: str
    """The field is text that contains this text."""


FilterOptions = Mapping[str, Any]
"""Field name -> `FilterField`, plus `_aggregate` ("and" by default, or "or") and `_must` (always applies)."""


class SortOptions(TypedDict):
    """One sort key. Missing values come first in ascending order; ties keep insertion order."""

    name: str
    order: SortOrder


class PaginatedResult(BaseModel, Sequence[T_co], Generic[T_co]):
    """One page of an answer; behaves like the list of its items, and equals it."""

    items: Sequence[T_co]
    limit: int = -1
    """The page size asked for; -1 asks for all."""
    offset: int = 0
    total: int = 0
    """How many items match in all, on every page."""

    def __len__(self) -> int:
        return len(self.items)

    @overload
    def __getitem__(self, index: int) -> T_co: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[T_co]: ...
    def __getitem__(self, index: int | slice) -> T_co | Sequence[T_co]:
        return self.items[index]

    def __iter__(self) -> Iterator[T_co]:  # type: ignore[override] # a page iterates over its items, not over its fields
        return iter(self.items)

    def __add__(self, other: Sequence[OtherT]) -> "list[T_co | OtherT]":
        return [*self.items, *other]

    def __radd__(self, other: Sequence[OtherT]) -> "list[OtherT | T_co]":
        return [*other, *self.items]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, PaginatedResult):
            return list(self.items) == list(other.items) and self._place() == other._place()
        if isinstance(other, (list, tuple)):
            return list(self.items) == list(other)
        return NotImplemented

    __hash__ = None  # type: ignore[assignment] # a page is mutable data

    def _place(self) -> tuple[int, int, int]:
        return self.limit, self.offset, self.total
