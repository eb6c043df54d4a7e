"""The environment of the lowest versions has those that the extras of pyproject.toml allow."""

import re
from importlib.metadata import version
from pathlib import Path

import pytest
import tomllib
from packaging.version import Version

RUNS_IN = ("lowest",)

EXTRAS = (
    *("ag2", "anthropic", "autogen", "crewai", "langchain", "langchain-classic", "litellm", "openai-agents"),
    *("pydantic-ai", "smolagents"),
)


@pytest.mark.parametrize("extra", EXTRAS)
def test_extra_is_installed_in_its_lowest_version(extra: str) -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    floors = dict(re.findall(r"([\w-]+)(?:\[.*\])?>=([\d.]+)", " ".join(project["optional-dependencies"][extra])))

    assert floors
    assert {name: Version(version(name)) for name in floors} == {name: Version(floor) for name, floor in floors.items()}
