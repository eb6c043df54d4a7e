"""An engine that the trainings of a module share; torch is imported only where one of them is asked for."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.e2e.server_process import left_behind
from tests.engine.conftest import one_thread

__all__ = ["one_thread"]

if TYPE_CHECKING:
    from tests.algorithm.grpo.training import SharedEngine


@pytest.fixture(scope="module")
def running_engine() -> "Iterator[SharedEngine]":
    from tests.algorithm.grpo.training import shared_engine

    with shared_engine() as engine:
        yield engine


@pytest.fixture
def engine(running_engine: "SharedEngine", monkeypatch: pytest.MonkeyPatch) -> "SharedEngine":
    monkeypatch.setattr("agentlightning.algorithm.grpo.policy.EngineServer", running_engine)
    return running_engine


@pytest.fixture
def seeds_are_heeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A training with agents that ask for seeds is the same each time, as far as its calls come in the same order."""
    monkeypatch.setattr(
        "agentlightning.algorithm.grpo.grpo.training_sampling", lambda temperature: {"temperature": temperature}
    )


@pytest.fixture
def nothing_is_left() -> Iterator[None]:
    """No process more than before; an engine that others share may run."""
    before = {process.pid for process in left_behind()}
    yield
    assert [process for process in left_behind() if process.pid not in before] == []
