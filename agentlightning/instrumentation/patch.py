"""Patch: a change to third-party code that is made on entry and undone on exit.

A patch names the module it changes and waits until that is imported. What it cannot change, because the library is
newer than we know, it leaves as it was, and says so: its model calls are still seen where they reach a model's SDK.
"""

import functools
import importlib.metadata
import inspect
import logging
import threading
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, ClassVar, Final, TypeAlias

from typing_extensions import Self

from agentlightning.instrumentation.imports import ImportWatch, is_installed
from agentlightning.utils.log_failures import log_failures

logger = logging.getLogger(__name__)

_ABSENT: Final = object()
_WATCH: Final = ImportWatch()  # one for the process, as the import system is
Foreign: TypeAlias = Any
"""Something of a library that is not imported here, so that its type is not known."""
Original = Callable[..., Foreign]
"""A function of the library that is patched."""
Wrapper = Callable[..., Foreign]
"""Called with the original function, then with its arguments."""


@dataclass
class PatchedCall:
    """One call of a function that is patched."""

    args: tuple[object, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    result: Foreign = None
    """What the caller gets; known when the original function has returned."""


class Patch:
    """Changes to one library, undone in reverse order. Used as a context, or with `apply` and `undo`."""

    name: ClassVar[str] = ""
    """What the library is called in messages."""
    module: ClassVar[str] = ""
    """The module whose import is waited for."""
    distribution: ClassVar[str] = ""
    """What the package index calls it, for the version in messages; the module's first part, if empty."""

    def __init__(self) -> None:
        self.is_applied = False
        """Whether the library was found and changed."""
        self.parts: tuple[Patch, ...] = ()
        """Patches of other modules of the library, applied before this one and undone after it."""
        self._changing = threading.RLock()  # protects the steps between applied and undone
        self._undoings: list[Callable[[], object]] = []

    # ------------------------------------------------------------------ for the kinds of patches

    def change(self, module: ModuleType) -> None:
        """Make the changes; called once, with the imported module."""
        raise NotImplementedError

    def replace(self, owner: Any, attribute: str, wrapper: Wrapper) -> None:
        """Have calls of a function, or of a method of a class, made by `wrapper(original, *args, **kwargs)`.

        A coroutine function stays one; its wrapper must be one too.
        """
        self.when_undone(_replaced(owner, attribute, wrapper))

    def surround(
        self, owner: object, attribute: str, context: Callable[..., AbstractContextManager[PatchedCall]]
    ) -> None:
        """Have calls of a function, plain or a coroutine function, made in `context(original, *arguments)`."""

        def call(original: Original, /, *args: object, **kwargs: object) -> Foreign:
            with context(original, *args, **kwargs) as made:
                made.result = original(*made.args, **made.kwargs)
            return made.result

        async def call_async(original: Original, /, *args: object, **kwargs: object) -> Foreign:
            with context(original, *args, **kwargs) as made:
                made.result = await original(*made.args, **made.kwargs)
            return made.result

        is_async = inspect.iscoroutinefunction(getattr(owner, attribute))
        self.replace(owner, attribute, call_async if is_async else call)

    def when_undone(self, undo: Callable[[], object]) -> None:
        """Call this when the patch is undone; the last that was given is called first."""
        self._undoings.append(undo)

    # ------------------------------------------------------------------ for those who apply them

    @property
    def is_installed(self) -> bool:
        """Whether the library could be imported."""
        return is_installed(self.module.partition(".")[0])

    def apply(self) -> None:
        """Change the library now or, if it is not imported yet, when it is; harmless the second time."""
        for part in self.parts:
            part.apply()
        with self._changing:
            if self._undoings:
                return
            self._undoings.append(lambda: setattr(self, "is_applied", False))
        # This waits for whoever is importing the module, and that one may be waiting to change it.
        cancel = _WATCH.when_imported(self.module, self._change_or_degrade)
        with self._changing:
            if self._undoings:
                self._undoings.insert(0, cancel)
                return
        cancel()

    def undo(self) -> None:
        """Leave the library as it was found; harmless if it was not changed."""
        with self._changing:
            while self._undoings:
                self._undo_one()
        for part in reversed(self.parts):
            part.undo()

    def turn_on(self) -> bool:
        """As `apply`, for scripts without a tracer: warns if it is on already, or there is nothing to change.

        True if the library is installed.
        """
        if self._undoings:
            warnings.warn(f"{self.name} is instrumented already; nothing was changed.", stacklevel=3)
        elif not self.is_installed:
            warnings.warn(f"{self.name} is not installed, so it is not instrumented.", stacklevel=3)
            return False
        self.apply()
        return True

    def __enter__(self) -> Self:
        self.apply()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.undo()

    def _change_or_degrade(self, module: ModuleType) -> None:
        with self._changing:
            if self.is_applied or not self._undoings:  # undone while the module was being imported
                return
            done_before = len(self._undoings)
            try:
                self.change(module)
                self.is_applied = True
            except Exception as error:  # noqa: BLE001 # an unknown library must work as if we were not there
                while len(self._undoings) > done_before:
                    self._undo_one()
                logger.warning(
                    "%s %s is not as expected (%s: %s), so its own steps are not recorded; "
                    "model calls it makes with a known SDK still are.",
                    self.name,
                    self._version(),
                    type(error).__name__,
                    error,
                )

    def _undo_one(self) -> None:
        undo = self._undoings.pop()
        with log_failures(logger, "A change to %s could not be undone.", self.name):
            undo()

    def _version(self) -> str:
        try:
            return importlib.metadata.version(self.distribution or self.module.partition(".")[0])
        except importlib.metadata.PackageNotFoundError:
            return "(of unknown version)"


def _replaced(owner: object, attribute: str, wrapper: Wrapper) -> Callable[[], None]:
    """Put our function in the place of a plain function; returns what undoes it."""
    found, original = vars(owner).get(attribute, _ABSENT), getattr(owner, attribute)
    if isinstance(found, (staticmethod, classmethod, property)):
        raise TypeError(f"{owner!r}.{attribute} is a {type(found).__name__}, not a plain function")
    is_undone = False

    # Someone may wrap our function in turn: then it stays in place when it is undone, and does nothing.
    @functools.wraps(original)
    def replaced(*args: object, **kwargs: object) -> Any:
        return original(*args, **kwargs) if is_undone else wrapper(original, *args, **kwargs)

    @functools.wraps(original)
    async def replaced_async(*args: object, **kwargs: object) -> Any:
        return await (original(*args, **kwargs) if is_undone else wrapper(original, *args, **kwargs))

    ours = replaced_async if inspect.iscoroutinefunction(original) else replaced
    setattr(owner, attribute, ours)

    def undo() -> None:
        nonlocal is_undone
        is_undone = True
        if vars(owner).get(attribute) is not ours:
            return
        if found is _ABSENT:
            delattr(owner, attribute)
        else:
            setattr(owner, attribute, found)

    return undo
