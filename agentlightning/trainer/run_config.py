"""The configuration of a fit, as its run in the store keeps it: enough to tell two runs apart, and to repeat one.

Parts stand by their import path, and under `settings` with the arguments of their constructors, read from the
attributes of the same names. What is neither a plain value nor a record of such values stands by the path of its class.
Whoever may read the store reads it, so nothing enters that looks like a secret.
"""

import dataclasses
import enum
import inspect
import itertools
import json
import math
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from pydantic import BaseModel

from agentlightning import __version__
from agentlightning.utils.secret_names import MASK, masked, masked_text

MOST_BYTES: Final = 64 * 1024
"""Of a whole configuration, as JSON; the largest settings are left out of one that is larger."""
MOST_ENTRIES: Final = 50
"""Of a list or a mapping; the others are counted."""
MOST_CHARACTERS: Final = 1000
"""Of a text; the rest is cut."""
MOST_LEVELS: Final = 6
"""Of nested values."""
_HIDDEN_NAMES: Final = re.compile(r"(^|_)(headers?|cookies?|auth|env|environment)$", re.IGNORECASE)
"""Mappings in which a secret may have any name."""
_KEY: Final = re.compile(r"\b(sk|pk|hf|ghp|gho|xox[abp])[-_][A-Za-z0-9_-]{16,}")


def run_config(
    parts: Mapping[str, object], counts: Mapping[str, int | None], git: Mapping[str, object] | None
) -> dict[str, Any]:
    """The configuration of a run.

    Args:
        parts: What works in it by its role; None is left out of the settings.
        counts: Sizes, by name.
        git: The revision of the working folder; see `git_revision`.
    """
    settings = {role: settings_of(part) for role, part in parts.items() if part is not None}
    seed = settings.get("algorithm", {}).get("seed")
    config: dict[str, object] = {
        **{role: None if part is None else _path(type(part)) for role, part in parts.items()},
        **counts,
        "seed": seed if isinstance(seed, int) else None,
        "version": __version__,
        "python": platform.python_version(),
        "git": git,
        "settings": settings,
    }
    return _bounded(masked(config))


def settings_of(part: object) -> dict[str, Any]:
    """The constructor's arguments that a part has kept under their names, with or without an underscore before them."""
    kept = vars(part) if hasattr(part, "__dict__") else {}
    names: dict[str, None] = {}
    for constructor in (vars(kind)["__init__"] for kind in type(part).__mro__ if "__init__" in vars(kind)):
        parameters = inspect.signature(constructor).parameters.values()
        names |= {one.name: None for one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)}
        if all(one.kind is not one.VAR_KEYWORD for one in parameters):
            break  # else it hands further arguments on to the one above
    found = {name: kept[key] for name in names for key in (name, f"_{name}") if key in kept}
    return {name: _plain(value, name) for name, value in found.items()}


def _plain(value: object, name: str = "", level: int = 0) -> Any:
    """A value that JSON holds; secrets that only their own names betray are still in it (see `masked`)."""
    if isinstance(value, enum.Enum):
        value = value.value
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if _HIDDEN_NAMES.search(name):
        return MASK if value else None
    if isinstance(value, (str, Path)):
        return _text(str(value))
    if isinstance(value, type) or inspect.isroutine(value):
        return _path(value)
    fields = _fields(value)
    if fields is not None and level < MOST_LEVELS:
        first = itertools.islice(fields.items(), MOST_ENTRIES)
        entries = {_text(str(key)): _plain(item, str(key), level + 1) for key, item in first}
        if not entries and dataclasses.is_dataclass(value):
            return _path(type(value))
        return {**entries, "…": f"{len(fields) - MOST_ENTRIES} more"} if len(fields) > MOST_ENTRIES else entries
    if isinstance(value, (list, tuple, set, frozenset)) and level < MOST_LEVELS:
        items = [_plain(item, name, level + 1) for item in itertools.islice(value, MOST_ENTRIES)]
        return [*items, f"… {len(value) - MOST_ENTRIES} more"] if len(value) > MOST_ENTRIES else items
    return _path(type(value))


def _fields(value: object) -> Mapping[object, object] | None:
    """What a record holds, by name, less what it does not show itself; None if it is none."""
    if isinstance(value, (dict, MappingProxyType)):  # any other mapping may compute what it gives
        return value
    if isinstance(value, BaseModel):
        return {name: getattr(value, name) for name, field in type(value).model_fields.items() if field.repr}
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.repr}
    return None


def _path(kind: object) -> str:
    return f"{kind.__module__}.{kind.__qualname__}" if hasattr(kind, "__qualname__") else _path(type(kind))


def _text(text: str) -> str:
    """Without the credentials and keys that an address may hold, and not too long."""
    text = _KEY.sub(MASK, masked_text(text))
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}…"


def _bounded(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration without its largest settings, if it would be too large with them."""
    settings: dict[str, dict[str, Any]] = config["settings"]
    while len(json.dumps(config)) > MOST_BYTES:
        size, role, name = max(
            (len(json.dumps(value)), role, name) for role, own in settings.items() for name, value in own.items()
        )
        settings[role][name] = f"… {size} bytes"
    return config


def git_revision() -> dict[str, Any] | None:
    """The revision of the working folder, and whether tracked files differ from it; None outside a repository."""
    # A monitor of files that the repository configures is not started, and nothing is written to the repository.
    command = ["git", "-c", "core.fsmonitor=false", "status", "--porcelain=v2", "--branch", "--untracked-files=no"]
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        folder = Path.cwd()
        if not any((place / ".git").exists() for place in (folder, *folder.parents)):
            return None
        answer = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=2.0, check=True)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    lines = answer.stdout.splitlines()
    revision = next((line.split()[-1] for line in lines if line.startswith("# branch.oid ")), None)
    return {"revision": revision, "is_dirty": any(not line.startswith("#") for line in lines)}
