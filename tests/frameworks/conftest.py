"""Agents written in real frameworks, run unmodified against the stub model.

The frameworks do not fit into one environment: some need openai below 3, others at least 3. `make test-frameworks`
builds one for each group and runs there the files whose `RUNS_IN` names it; `make test` collects nothing here. In its
environment a package that is missing is a failure.
"""

import os
import re
import socket
from pathlib import Path
from typing import Any

import pytest

_GROUP = os.environ.get("AGL_FRAMEWORK_GROUP", "")
_RUNS_IN = re.compile(r"^RUNS_IN = \((.*)\)", re.MULTILINE)


def _runs_here(path: Path) -> bool:
    """Read from the text, because a file can be imported only where its frameworks are installed."""
    found = _RUNS_IN.search(path.read_text())
    return found is not None and f'"{_GROUP}"' in found[1]


collect_ignore = [path.name for path in Path(__file__).parent.glob("test_*.py") if not _runs_here(path)]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """LiteLLM's logger of an event loop that has ended is collected some time later, in whatever test."""
    ended = "ignore:Exception ignored in. <coroutine object LoggingWorker:pytest.PytestUnraisableExceptionWarning"
    for item in items:
        item.add_marker(pytest.mark.filterwarnings(ended))


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No framework may look for its own service."""
    monkeypatch.setenv("OPENAI_AGENTS_DISABLE_TRACING", "")
    monkeypatch.setenv("OTEL_SDK_DISABLED", "")
    monkeypatch.setenv("CREWAI_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    monkeypatch.setenv("LANGSMITH_TRACING", "false")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-stub")
    monkeypatch.setenv("ANTHROPIC_API_KEY", "sk-stub")


@pytest.fixture
def this_machine_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection to any other machine fails the test."""
    connect = socket.socket.connect

    def guarded(self: socket.socket, address: Any) -> None:
        if self.family != socket.AF_UNIX and address[0] not in ("127.0.0.1", "::1"):
            pytest.fail(f"a connection to {address} was tried")
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", guarded)
    monkeypatch.setattr(socket.socket, "connect_ex", guarded)
