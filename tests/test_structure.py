"""The design notes are true: the structure page names every package, and every file that they name is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = ("docs/design/structure.md", "CONTRIBUTING.md")
DESIGN_NOTES = sorted((ROOT / "docs/design").glob("*.md"))
SOURCE = re.compile(r"`([\w./-]+\.(?:py|js))`")
PATH = re.compile(r"`((?:agentlightning|tests|scripts|examples|docs)/[\w./-]+)`")


@pytest.mark.parametrize("page", PAGES)
def test_every_file_that_a_page_names_is_there(page: str) -> None:
    named = PATH.findall((ROOT / page).read_text(encoding="utf-8"))

    assert len(named) > 5
    assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", DESIGN_NOTES, ids=lambda page: page.stem)
def test_every_source_that_a_design_note_names_is_there(page: Path) -> None:
    folders = ("agentlightning", "bench", "examples", "scripts", "tests")
    sources = [f"/{path.relative_to(ROOT)}" for folder in folders for path in (ROOT / folder).rglob("*.[pj][ys]")]
    named = SOURCE.findall(page.read_text(encoding="utf-8"))

    assert [name for name in named if not any(source.endswith(f"/{name}") for source in sources)] == []


def test_every_package_is_named_once() -> None:
    text = (ROOT / "docs/design/structure.md").read_text(encoding="utf-8")
    packages = {path.parent.name for path in (ROOT / "agentlightning").glob("*/__init__.py")}

    assert sorted(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)) == sorted(packages)
