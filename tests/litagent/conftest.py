"""Fixtures of the agents' tests."""

from collections.abc import Iterator

import pytest

from agentlightning.types import LLM
from tests.e2e.server_process import left_behind
from tests.litagent.workbench import Workbench


@pytest.fixture
def workbench() -> Workbench:
    return Workbench()


@pytest.fixture
def llm() -> LLM:
    return LLM(endpoint="http://127.0.0.1:9/v1", model="large", api_key="sk-very-secret")


@pytest.fixture
def no_process_is_left() -> Iterator[None]:
    """After the test, no child of this process is left, not even a zombie."""
    before = {child.pid for child in left_behind()}
    yield
    assert [child for child in left_behind() if child.pid not in before] == []
