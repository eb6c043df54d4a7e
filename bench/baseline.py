"""Public releases to compare with, each in an environment of its own beside ours."""

import shutil
import sys
import venv
from collections.abc import Callable
from pathlib import Path

from children import ChildFailed, Interpreter, run_child

RELEASE = "0.3.0"
"""The one to compare with unless a section names another."""
ENVIRONMENT = Path(__file__).parent.parent / ".venv-baseline"
INSTALL_SECONDS = 900.0
PROBE_SECONDS = 60.0
_PROBE = "from importlib.metadata import version; print(version('agentlightning'))"


def find_or_install(folder: Path, tell: Callable[[str], None], release: str = RELEASE) -> Interpreter:
    """A release's interpreter, installed from the package index unless it is there already."""
    environment = ENVIRONMENT if release == RELEASE else ENVIRONMENT.with_name(f"{ENVIRONMENT.name}-{release}")
    python = environment / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    if not python.exists() or installed_version(str(python), folder) != release:
        install(environment, python, folder, tell, release)
    return Interpreter(str(python), release)


def install(environment: Path, python: Path, folder: Path, tell: Callable[[str], None], release: str) -> None:
    """A half-made environment is removed, so that the next run begins anew."""
    tell(f"installing agentlightning {release} into {environment.name} (about a minute)")
    try:
        venv.create(environment, with_pip=True, clear=True)
        command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", f"agentlightning=={release}"]
        run_child(command, folder=folder, seconds=INSTALL_SECONDS)
    except BaseException:
        shutil.rmtree(environment, ignore_errors=True)
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
