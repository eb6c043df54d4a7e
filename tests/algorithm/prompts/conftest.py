import pytest

from agentlightning.algorithm.apo import apo as apo_module
from tests.algorithm.prompts.world import rendered


@pytest.fixture
def quick_poml(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts for the optimiser's models are JSON, which the test's model reads."""
    monkeypatch.setattr(apo_module.poml, "poml", rendered)
