"""The `AGL_*` environment variables, as one table, and the one way to read them.

A part that can be configured from outside resolves each setting the same way: what the caller passed wins, then the
environment, then the part's fallback. The environment is read when asked for, never at import.
"""

import os
from collections.abc import Callable
from enum import Enum
from typing import Final, Generic, TypeVar, overload

from agentlightning.errors import ConfigurationError

__all__ = ["LightningEnvVar", "resolve_bool_env_var", "resolve_int_env_var", "resolve_str_env_var"]

ValueT = TypeVar("ValueT")
_TRUE_WORDS: Final = ("1", "true", "yes", "on")
_FALSE_WORDS: Final = ("0", "false", "no", "off")


class LightningEnvVar(str, Enum):
    """Every variable the package reads; `docs/reference/environment.md` says what for."""

    AGL_CURRENT_ROLE = "AGL_CURRENT_ROLE"
    AGL_SERVER_HOST = "AGL_SERVER_HOST"
    AGL_SERVER_PORT = "AGL_SERVER_PORT"
    AGL_MANAGED_STORE = "AGL_MANAGED_STORE"
    AGL_EMITTER_DEBUG = "AGL_EMITTER_DEBUG"
    AGL_PROGRESS = "AGL_PROGRESS"
    AGL_STORE_TOKEN = "AGL_STORE_TOKEN"
    AGL_ALLOW_POML = "AGL_ALLOW_POML"
    AGL_ENGINE_WEIGHTS_KEY = "AGL_ENGINE_WEIGHTS_KEY"
    AGL_PROXY_API_KEY = "AGL_PROXY_API_KEY"
    AGL_MAX_VALUES = "AGL_MAX_VALUES"
    AGL_FILE_MODE = "AGL_FILE_MODE"


class _Resolver(Generic[ValueT]):
    """Resolves settings of one type.

    Args:
        read: Reads the text of a variable, whose name it gets first.
    """

    def __init__(self, read: Callable[[str, str], ValueT]) -> None:
        self._read = read

    @overload
    def __call__(self, env_var: LightningEnvVar, override: ValueT | None = None, *, fallback: ValueT) -> ValueT: ...
    @overload
    def __call__(self, env_var: LightningEnvVar, override: ValueT | None, fallback: ValueT) -> ValueT: ...
    @overload
    def __call__(
        self, env_var: LightningEnvVar, override: ValueT | None = None, fallback: ValueT | None = None
    ) -> ValueT | None: ...
    def __call__(
        self, env_var: LightningEnvVar, override: ValueT | None = None, fallback: ValueT | None = None
    ) -> ValueT | None:
        """The override, else the environment, else the fallback; a variable set to nothing counts as set."""
        if override is not None:
            return override
        text = os.environ.get(env_var.value)
        return fallback if text is None else self._read(env_var.value, text)


def _read_bool(name: str, text: str) -> bool:
    word = text.strip().lower()
    if word not in _TRUE_WORDS + _FALSE_WORDS:
        accepted = ", ".join(_TRUE_WORDS + _FALSE_WORDS)
        raise ConfigurationError(f"{name} must be one of {accepted}; it is {text!r}.")
    return word in _TRUE_WORDS


def _read_int(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise ConfigurationError(f"{name} must be an integer; it is {text!r}.") from error


resolve_bool_env_var: Final = _Resolver(_read_bool)
resolve_int_env_var: Final = _Resolver(_read_int)
resolve_str_env_var: Final = _Resolver(lambda _name, text: text)
