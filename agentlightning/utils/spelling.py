"""Words that were probably meant: commands and options of `agl`, and arguments of constructors."""

import difflib
import functools
import inspect
from collections.abc import Iterable
from typing import Any, TypeVar

_T = TypeVar("_T")


def similar_word(word: str, known: Iterable[str]) -> str | None:
    """The word that was probably meant; None if none is similar."""
    found = difflib.get_close_matches(word, sorted(known), n=1, cutoff=0.7)
    return found[0] if found else None


def suggests_arguments(cls: type[_T]) -> type[_T]:
    """Let the error for an argument that a class does not take name the one that was probably meant."""
    constructor: Any = cls.__init__
    names = list(inspect.signature(constructor).parameters)[1:]

    @functools.wraps(constructor)
    def checked(self: _T, *args: object, **kwargs: object) -> None:
        for unknown in kwargs.keys() - names:
            likely = similar_word(unknown, names)
            meant = f"it takes {', '.join(names)}." if likely is None else f"did you mean '{likely}'?"
            raise TypeError(f"{cls.__name__}() got an unexpected keyword argument '{unknown}'; {meant}")
        constructor(self, *args, **kwargs)

    cls.__init__ = checked  # type: ignore[method-assign, assignment] # the same, with another message
    return cls
