"""The page on the structure is true: it names every package, and every file that it names is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = ("docs/design/structure.md", "CONTRIBUTING.md")
PATH = re.compile(r"`((?:agentlightning|tests|scripts|examples|docs)/[\w./-]+)`")


@pytest.mark.parametrize("page", PAGES)
def test_every_file_that_a_page_names_is_there(page: str) -> None:
    named = PATH.findall((ROOT / page).read_text(encoding="utf-8"))

    assert len(named) > 5
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_every_package_is_named_once() -> None:
    text = (ROOT / "docs/design/structure.md").read_text(encoding="utf-8")
    packages = {path.parent.name for path in (ROOT / "agentlightning").glob("*/__init__.py")}

    assert sorted(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)) == sorted(packages)
