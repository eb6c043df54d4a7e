"""What a newcomer is told to install is this project, and can be installed."""

import ast
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import filterfalse
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import agentlightning
from agentlightning.utils.installation import install_command

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
WHEEL = f"dist/agentlightning-{agentlightning.__version__}-py3-none-any.whl"
TEXTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "Makefile", "constraints.txt", "bench/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
]
IN_TEXT = re.compile(r"(?:(?:^|-m |`)pip install|\$\(INSTALL\)) ([^`\n#]+)", re.MULTILINE)
IN_MESSAGE = re.compile(r"pip install ((?:-\w )*[\w.\[\]-]+)")
WITH_FILE = ("-c", "-r")
OF_THE_TESTS = {"dev", "docs"}
"""Extras that whoever runs this has installed."""
HEAVY = ("verl", "vllm")
"""Pip would download hundreds of megabytes to read what these depend on."""
PIP_SECONDS = 500


@dataclass(frozen=True)
class InstallLine:
    """What stands behind `pip install` somewhere."""

    place: str
    words: tuple[str, ...]

    def files(self) -> list[str]:
        return [file for option, file in zip(self.words, self.words[1:], strict=False) if option in WITH_FILE]

    def targets(self) -> list[str]:
        return [word for word in self.words if not word.startswith("-") and word not in self.files()]

    def local_extras(self) -> list[str]:
        """The extras of this project that it installs from a folder or a wheel."""
        parts = [target.partition("[") for target in self.targets() if is_local(target)]
        return [extra for _, _, rest in parts for extra in rest.rstrip("]").split(",") if extra]


def is_local(target: str) -> bool:
    return target.partition("[")[0] in (".", str(ROOT), WHEEL)


def lines_of_texts() -> Iterator[InstallLine]:
    for path in TEXTS:
        for match in IN_TEXT.finditer(path.read_text(encoding="utf-8")):
            words = [word for word in shlex.split(match[1]) if "$" not in word]
            yield InstallLine(path.relative_to(ROOT).as_posix(), tuple(words))


def lines_of_messages() -> Iterator[InstallLine]:
    """Those in the package: written out, or built by `install_command`."""
    for path in sorted((ROOT / "agentlightning").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "pip install" not in text and "install_command" not in text:
            continue
        name = path.relative_to(ROOT).as_posix()
        for node in ast.walk(ast.parse(text)):
            place = f"{name}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and path.name != "installation.py":
                for match in IN_MESSAGE.finditer(node.value):
                    yield InstallLine(place, tuple(match[1].rstrip(".").split()))
            if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "install_command":
                extras = [value.value for value in node.args if isinstance(value, ast.Constant)]
                if extras:
                    yield InstallLine(place, tuple(shlex.split(install_command(*extras))[2:]))


LINES = [*lines_of_texts(), *lines_of_messages()]


@pytest.fixture(scope="module", autouse=True)
def one_certificate() -> None:
    """Not here: pip talks to an index."""


def test_install_lines_are_found_in_all_kinds_of_places() -> None:
    places = {line.place.partition(":")[0] for line in LINES}

    assert {"README.md", "docs/index.md", "Makefile", "examples/calc_x/README.md"} <= places
    assert {"agentlightning/cli/demo.py", "agentlightning/cli/vllm.py"} <= places


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.place)
def test_no_install_line_asks_an_index_for_this_project(line: InstallLine) -> None:
    """The public index has another one under its name."""
    for target in line.targets():
        if not is_local(target):
            assert Requirement(target).name.lower() != "agentlightning", line


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.place)
def test_every_install_line_names_files_and_extras_that_exist(line: InstallLine) -> None:
    assert [file for file in line.files() if not (ROOT / file).is_file()] == []
    assert [extra for extra in line.local_extras() if extra not in EXTRAS] == []


def test_no_text_gives_an_extra_under_the_name_of_the_other_project() -> None:
    written = re.compile(r"agentlightning\[[a-z]")
    paths = [*TEXTS, *(ROOT / "agentlightning").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]

    found = [path for path in paths if path != Path(__file__) and written.search(path.read_text(encoding="utf-8"))]

    assert found == []


@pytest.mark.parametrize("extra", ["train", "hf"])
def test_no_extra_takes_a_torch_that_runs_the_code_of_a_checkpoint(extra: str) -> None:
    (torch,) = [found for text in EXTRAS[extra] if (found := Requirement(text)).name == "torch"]

    assert not torch.specifier.contains("2.9.1")  # CVE-2025-32434, CVE-2026-24747


@pytest.mark.slow
@pytest.mark.timeout(2 * PIP_SECONDS)
def test_pip_accepts_every_install_line() -> None:
    """Those that are not installed here, all at once and without what they depend on, so that it takes seconds.

    `scripts/cold_start` installs for real.
    """
    extras = {extra for line in LINES for extra in line.local_extras()} - OF_THE_TESTS
    targets = [target for line in LINES for target in line.targets() if not is_local(target)]
    targets += [text for extra in extras for text in EXTRAS[extra]]
    names = {text for text in targets if Requirement(text).name not in ("agentlightning", *HEAVY)}
    if pip("index", "versions", "--retries", "0", "--timeout", "5", "pip").returncode != 0:
        pytest.skip("pip reaches no index here, so what the install lines name cannot be looked up")

    done = pip("install", "--dry-run", "--no-deps", "-c", "constraints.txt", *sorted(filterfalse(is_installed, names)))

    assert done.returncode == 0, done.stderr
    assert "does not provide the extra" not in done.stderr


def is_installed(text: str) -> bool:
    requirement = Requirement(text)
    try:
        return requirement.specifier.contains(version(requirement.name), prereleases=True)
    except PackageNotFoundError:
        return False


def pip(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PIP_SECONDS, check=False)


def test_training_without_torch_says_what_to_install() -> None:
    code = "import sys; sys.modules.update(torch=None, safetensors=None); import agentlightning as agl; agl.GRPO('t')"
    command = [sys.executable, "-c", code]

    done = subprocess.run(command, capture_output=True, text=True, timeout=PIP_SECONDS, check=False)

    assert done.stderr.splitlines()[-1].startswith("ImportError: GRPO needs the package ")
    assert f"run `{install_command('train')}`." in done.stderr
