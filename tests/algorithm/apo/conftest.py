import pytest

from agentlightning.algorithm.apo import apo as apo_module
from tests.algorithm.apo.world import rendered


@pytest.fixture
def quick_poml(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are not rendered by poml, which starts a process each time."""
    monkeypatch.setattr(apo_module.poml, "poml", rendered)
