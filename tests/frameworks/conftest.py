"""Agents written in real frameworks, run unmodified against the stub model.

The frameworks do not fit into one environment: some need openai below 3, others at least 3. `make test-frameworks`
builds one for each group and runs there what stands in the table; `make test` collects nothing here.
"""

import os

import pytest

BOTH = ("openai2", "openai3")
GROUPS_BY_FILE = {
    "test_langchain.py": BOTH,
    "test_langchain_classic.py": BOTH,
    "test_langgraph.py": BOTH,
    "test_openai_agents.py": BOTH,
    "test_autogen.py": BOTH,
    "test_ag2.py": ("openai2",),
    "test_crewai.py": ("openai2",),
    "test_litellm.py": ("openai2", "litellm"),
    "test_proxy_clients.py": BOTH,
    "test_pydantic_ai.py": ("openai3",),
    "test_redirected_agents.py": BOTH,
    "test_smolagents.py": BOTH,
    "test_agentops.py": ("agentops",),
    "test_agentops_langchain.py": ("agentops",),
    "test_weave.py": ("agentops",),
}
"""Which tests run in which environment; there a package that is missing is a failure."""

_GROUP = os.environ.get("AGL_FRAMEWORK_GROUP", "")
collect_ignore = [name for name, groups in GROUPS_BY_FILE.items() if _GROUP not in groups]


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
