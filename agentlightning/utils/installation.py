"""The line with which the user of this installation gets the packages of an extra.

A public index has another project under the name of this package, so no line asks pip for that name. A clone is
installed from its folder, with the versions it was tested with. Anywhere else the packages of the extra are named
themselves, as the metadata of the installed package lists them.
"""

import importlib.metadata
import pkgutil
import re
from pathlib import Path
from typing import Final

__all__ = ["install_command", "resolve_with_extras"]

_PACKAGE: Final = "agentlightning"
_PLACE: Final = Path(__file__).resolve().parents[2]
"""The folder that holds the package: a clone, or the one where pip installs packages."""
_OF_EXTRA: Final = re.compile(r"""^(?P<requirement>[^;]+?)\s*;.*\bextra\s*==\s*['"](?P<extra>[^'"]+)['"]""")


def install_command(*extras: str) -> str:
    """A shell line that installs what the extras need, and nothing from an index under this package's own name."""
    if (_PLACE / "pyproject.toml").is_file():
        return f'pip install -e "{_PLACE}[{",".join(extras)}]"'
    requirements = _requirements(extras)
    if requirements:
        return " ".join(["pip install", *(f'"{requirement}"' for requirement in requirements)])
    return f'pip install -e ".[{",".join(extras)}]"'  # a copy without metadata: it can be installed from a clone only


def resolve_with_extras(path: str, *extras: str) -> object:
    """The object at "package.module:name"; ImportError with the line to run where it needs a package of the extras."""
    try:
        return pkgutil.resolve_name(path)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == _PACKAGE:
            raise
        name = path.rpartition(":")[2]
        raise ImportError(f"{name} needs the package {error.name}: run `{install_command(*extras)}`.") from error


def _requirements(extras: tuple[str, ...]) -> list[str]:
    """What the metadata of this package lists for the extras; empty if there is none, or it is another project's."""
    try:
        installed = importlib.metadata.distribution(_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return []
    if Path(str(installed.locate_file(_PACKAGE))).resolve() != _PLACE / _PACKAGE:
        return []
    found = [match for text in installed.requires or () if (match := _OF_EXTRA.match(text))]
    return list(dict.fromkeys(match["requirement"] for match in found if match["extra"] in extras))
