"""Old names that still work: each use leads to the new place and says so once.

A door module is a few lines: its `__getattr__` comes from `moved_names`, and nothing behind the door is imported until
somebody knocks. Arguments that changed their name are accepted by `renamed_arguments`; anything else that is on its way
out calls `deprecated`. Warnings point at the line of the user, not at ours.
"""

import functools
import inspect
import pkgutil
import warnings
from collections.abc import Callable, Mapping
from typing import Final, ParamSpec, TypeVar

__all__ = ["deprecated", "moved_names", "renamed_arguments"]

_P = ParamSpec("_P")
_R = TypeVar("_R")

_CALLER_OF_CALLER: Final = 3
"""Stack level, seen from `deprecated`, of whoever called the function that calls it."""


def deprecated(message: str, *, stacklevel: int = _CALLER_OF_CALLER) -> None:
    """Issue a DeprecationWarning that points at the caller of the function which calls this."""
    warnings.warn(message, DeprecationWarning, stacklevel=stacklevel)


def moved_names(module_name: str, names: Mapping[str, str]) -> Callable[[str], object]:
    """A `__getattr__` for the module that fetches names from where they live now.

    Args:
        names: The old name to its new address, written `package.module:name`.
    """

    # The cache is what makes a name warn once: a name that was found is not asked for again.
    @functools.cache
    def module_getattr(name: str) -> object:
        if name not in names:
            raise AttributeError(f"module {module_name!r} has no attribute {name!r}")
        value: object = pkgutil.resolve_name(names[name])
        deprecated(f"{module_name}.{name} has moved; use {names[name].replace(':', '.')}.")
        return value

    return module_getattr


def renamed_arguments(**old_to_new: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Accept keywords under their former names: `@renamed_arguments(n_workers="n_runners")`."""

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        rename = functools.partial(_rename, function, old_to_new)
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def async_wrapper(*args: _P.args, **kwargs: _P.kwargs) -> object:
                rename(args, kwargs)
                return await function(*args, **kwargs)

            return async_wrapper  # type: ignore[return-value]  # _R is a coroutine here, which mypy does not infer

        @functools.wraps(function)
        def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            rename(args, kwargs)
            return function(*args, **kwargs)

        return wrapper

    return decorate


def _rename(
    function: Callable[..., object],
    old_to_new: Mapping[str, str],
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> None:
    """Move the values of former keywords, in place, to the present ones."""
    for old, new in old_to_new.items():
        if old not in kwargs:
            continue
        if new in kwargs or new in inspect.signature(function).bind_partial(*args).arguments:
            raise TypeError(
                f"{function.__qualname__}() got both {new!r} and its former name {old!r}; pass only {new!r}."
            )
        kwargs[new] = kwargs.pop(old)
        deprecated(
            f"Argument {old!r} of {function.__qualname__}() is now called {new!r}.",
            stacklevel=_CALLER_OF_CALLER + 1,
        )
