"""The public release to compare with, in an environment of its own beside ours."""

import shutil
import sys
import venv
from collections.abc import Callable
from pathlib import Path

from children import ChildFailed, Interpreter, run_child

RELEASE = "0.3.0"
ENVIRONMENT = Path(__file__).parent.parent / ".venv-baseline"
INSTALL_SECONDS = 900.0
PROBE_SECONDS = 60.0
_PROBE = "from importlib.metadata import version; print(version('agentlightning'))"


def find_or_install(folder: Path, tell: Callable[[str], None]) -> Interpreter:
    """The release's interpreter, installed from the package index unless it is there already."""
    python = ENVIRONMENT / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    if not python.exists() or installed_version(str(python), folder) != RELEASE:
        install(python, folder, tell)
    return Interpreter(str(python), RELEASE)


def install(python: Path, folder: Path, tell: Callable[[str], None]) -> None:
    """A half-made environment is removed, so that the next run begins anew."""
    tell(f"installing agentlightning {RELEASE} into {ENVIRONMENT.name} (about a minute)")
    try:
        venv.create(ENVIRONMENT, with_pip=True, clear=True)
        command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", f"agentlightning=={RELEASE}"]
        run_child(command, folder=folder, seconds=INSTALL_SECONDS)
    except BaseException:
        shutil.rmtree(ENVIRONMENT, ignore_errors=True)
        raise


def given(python: str, folder: Path) -> Interpreter:
    """An interpreter the user says has the release."""
    path = str(Path(python).absolute())
    version = installed_version(path, folder)
    if version != RELEASE:
        raise ChildFailed(f"{path} has agentlightning {version}; --baseline needs one with {RELEASE}.")
    return Interpreter(path, RELEASE)


def installed_version(python: str, folder: Path) -> str | None:
    """What an environment says it has; None if it has no such package."""
    command = [python, "-I", "-c", _PROBE]
    try:
        return run_child(command, folder=folder, seconds=PROBE_SECONDS).strip()
    except ChildFailed:
        return None
