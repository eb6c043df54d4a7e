"""`scripts/cold_start` reads README.md as it stands, limits what it runs, and leaves nothing behind."""

import re
import sys
import time
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import psutil
import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def cold_start() -> ModuleType:
    loader = SourceFileLoader("cold_start", str(ROOT / "scripts" / "cold_start"))
    spec = spec_from_loader("cold_start", loader)
    assert spec is not None
    module = module_from_spec(spec)
    sys.modules["cold_start"] = module
    loader.exec_module(module)
    return module


def environment(cold_start: ModuleType, place: Path) -> dict[str, str]:
    (place / "tmp").mkdir()
    found: dict[str, str] = cold_start.clean_environment({"PATH": "/bin:/usr/bin"}, place)
    return found


def test_the_commands_and_the_example_are_those_of_the_readme(cold_start: ModuleType) -> None:
    parts = [part.command for part in cold_start.parts_of(README)]

    assert parts == ["make demo", ".venv/bin/python first.py", "make test"]
    assert "`.venv/bin/python first.py`" in README
    assert "agl.Trainer().dev(agent, tasks)" in cold_start.example_of(README)
    assert "GRPO" not in cold_start.example_of(README)


def test_the_commands_of_the_readme_are_verbs_of_the_makefile(cold_start: ModuleType) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")

    for command in cold_start.commands_of(README):
        program, verb = command.split()
        assert program == "make"
        assert re.search(rf"^{verb}:", makefile, re.MULTILINE)


@pytest.mark.parametrize("readme", ["", "## Two commands\n\n```sh\n# none\n```\n"])
def test_a_readme_without_commands_is_an_error(cold_start: ModuleType, readme: str) -> None:
    with pytest.raises(SystemExit, match="no commands"):
        cold_start.parts_of(readme)


def test_only_what_pip_needs_is_kept_of_the_environment(cold_start: ModuleType, tmp_path: Path) -> None:
    given = {"PATH": "/bin", "PIP_FIND_LINKS": "/wheels", "PIP_CACHE_DIR": "/cache", "HTTPS_PROXY": "p"}
    given |= {"OPENAI_API_KEY": "k", "HOME": "/root", "PYTHONPATH": "/x", "VIRTUAL_ENV": "/v"}

    kept = cold_start.clean_environment(given, tmp_path)

    assert sorted(kept) == ["HOME", "HTTPS_PROXY", "PATH", "PIP_FIND_LINKS", "TMPDIR"]
    assert kept["HOME"] == str(tmp_path / "home")
    assert kept["PATH"] == f"{sys.base_prefix}/bin:/bin"


@pytest.mark.parametrize("limit", ["0", "-1", "nan", "inf", "soon"])
def test_a_limit_is_a_time(cold_start: ModuleType, limit: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cold_start.arguments([f"--limit={limit}"])

    assert exit_.value.code == 2
    assert "--limit" in capsys.readouterr().err


def test_a_part_that_fails_shows_its_last_lines(
    cold_start: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    part = cold_start.Part("try", "echo no luck; exit 3")

    timing = cold_start.run(part, tmp_path, environment(cold_start, tmp_path), limit=60)

    assert timing.outcome() == "exit code 3"
    assert "  no luck\n" in capsys.readouterr().out


def test_a_part_that_takes_too_long_ends_with_all_it_started(cold_start: ModuleType, tmp_path: Path) -> None:
    part = cold_start.Part("wait", "sleep 600 & echo $! > child; wait")

    timing = cold_start.run(part, tmp_path, environment(cold_start, tmp_path), limit=2)

    assert timing.outcome() == "too long"
    child = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + 20  # it was killed, and ends when the system comes to it
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_table_has_a_line_for_each_part(cold_start: ModuleType) -> None:
    timings = [cold_start.Timing(cold_start.Part("make demo", "true"), 61.25, 0)]
    timings.append(cold_start.Timing(cold_start.Part("the example", "true"), 3.0, None))

    assert cold_start.table(timings).splitlines() == [
        "",
        "make demo        61.2 s  ok",
        "the example       3.0 s  too long",
        "in all           64.2 s",
    ]


def test_the_checks_of_every_change_follow_the_readme() -> None:
    assert "scripts/cold_start" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
