"""Packages that a module of tests needs, and that are imported when the first of its tests uses them.

`pytest.importorskip` imports them while tests are collected, in every process that takes part: transformers and peft
take four seconds.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest

__all__ = ["optional"]


class _Later:
    """A module that is imported with the first attribute that is taken from it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self._name), name)


def optional(name: str, *, reason: str) -> Any:
    """The package; the module that calls this is skipped where it is not installed."""
    if find_spec(name) is None:
        pytest.skip(reason, allow_module_level=True)
    return _Later(name)
