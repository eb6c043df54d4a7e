"""The configuration of a training with verl: our own file, over verl's defaults, under what the user gives.

With verl and Hydra installed the result is complete, and an object of OmegaConf. Without them it holds our file and the
user's values, as a dictionary that can be read the same way; interpolations such as `${data.seed}` stay as they are
written.
"""

import importlib
import importlib.util
from collections.abc import Mapping
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, Final, Protocol

from agentlightning.errors import ConfigurationError
from agentlightning.utils.json_values import JsonMapping, JsonObject

_PACKAGE: Final = "agentlightning.verl"
_FILE: Final = "config.yaml"


class Configuration(Protocol):
    """Entries by `config["data"]` and by `config.data`; OmegaConf's DictConfig and `VerlConfig` are such."""

    def __getitem__(self, name: str, /) -> Any: ...

    def __getattr__(self, name: str, /) -> Any: ...


class VerlConfig(dict[str, Any]):
    """A dictionary whose entries are attributes too, at every depth; it equals a plain one with the same entries."""

    def __init__(self, entries: JsonMapping | None = None) -> None:
        super().__init__({name: _wrapped(value) for name, value in (entries or {}).items()})

    def __setitem__(self, name: str, value: object) -> None:
        super().__setitem__(name, _wrapped(value))

    def update(self, entries: JsonMapping, /) -> None:  # type: ignore[override] # one form will do
        super().update(VerlConfig(entries))

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            known = ", ".join(map(str, self)) or "nothing"
            raise AttributeError(f"The configuration has no '{name}' here; there is {known}.") from None

    def __setattr__(self, name: str, value: object) -> None:
        self[name] = value


def compose(config: JsonMapping | None = None) -> Configuration:
    """Our configuration with the user's values over it, which may be new ones.

    Raises:
        ConfigurationError: `config` is no mapping, or what verl and the user give does not go together.
    """
    given: object = {} if config is None else config  # OmegaConf's own objects are mappings too
    if not isinstance(given, Mapping):
        raise ConfigurationError(f"config is {given!r:.80}; VERL takes a nested dictionary of verl's settings.")
    if not _is_installed("omegaconf"):
        return VerlConfig(_merged(_own(), given))
    omegaconf = importlib.import_module("omegaconf")
    try:
        defaults = _defaults_of_verl() if _is_installed("hydra") else None
        base = omegaconf.OmegaConf.create(_own()) if defaults is None else _over(defaults)
        omegaconf.OmegaConf.set_struct(base, False)  # noqa: FBT003 # OmegaConf's signature
        composed: Configuration = omegaconf.OmegaConf.merge(base, given)
    except omegaconf.errors.OmegaConfBaseException as error:
        raise ConfigurationError(f"verl's configuration cannot be composed: {error}") from error
    return composed


def _own() -> JsonObject:
    """The file, less what is for Hydra."""
    text = files(_PACKAGE).joinpath(_FILE).read_text(encoding="utf-8")
    entries = importlib.import_module("yaml").safe_load(text)
    return {name: value for name, value in entries.items() if name not in ("hydra", "defaults")}


def _defaults_of_verl() -> Path | None:
    """The folder of verl's defaults, found without importing verl, which takes long; None if it is not installed."""
    found = importlib.util.find_spec("verl")
    places = [] if found is None else list(found.submodule_search_locations or ())
    return next((folder for place in places if (folder := Path(place, *("trainer", "config"))).is_dir()), None)


def _over(defaults: Path) -> Any:
    """The file composed by Hydra over verl's defaults; a Hydra that the user has set up is as it was afterwards."""
    hydra = importlib.import_module("hydra")
    state = importlib.import_module("hydra.core.global_hydra").GlobalHydra.instance()
    before, state.hydra = state.hydra, None
    try:
        with (
            as_file(files(_PACKAGE).joinpath(_FILE)) as path,
            hydra.initialize_config_dir(version_base=None, config_dir=str(path.parent)),
        ):
            return hydra.compose(config_name=path.stem, overrides=[f"hydra.searchpath=['file://{defaults}']"])
    except hydra.errors.HydraException as error:
        raise ConfigurationError(f"The defaults of the installed verl cannot be composed: {error}") from error
    finally:
        importlib.import_module("hydra.core.global_hydra").GlobalHydra.instance().hydra = before


def _merged(base: JsonMapping, over: JsonMapping) -> JsonObject:
    """Both, level by level; where they differ, `over`."""
    result = dict(base)
    for name, value in over.items():
        below = result.get(name)
        both = isinstance(below, Mapping) and isinstance(value, Mapping)
        result[name] = _merged(below, value) if both else value  # type: ignore[arg-type] # both are mappings
    return result


def _wrapped(value: object) -> Any:
    if isinstance(value, Mapping):
        return VerlConfig(value)
    return [_wrapped(one) for one in value] if isinstance(value, list) else value


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
