"""The one way to say that something is on its way out."""

import warnings
from typing import Final

_CALLER_OF_CALLER: Final = 3
"""Stack level, seen from `deprecated`, of whoever called the function that calls it."""


def deprecated(message: str, *, stacklevel: int = _CALLER_OF_CALLER) -> None:
    """Issue a DeprecationWarning that points at the caller of the function which calls this."""
    warnings.warn(message, DeprecationWarning, stacklevel=stacklevel)
