"""The simulated model as a fixture; import it into the `conftest.py` of the tests that want it."""

from collections.abc import Iterator

import pytest

from tests.simulated_model.server import SimulatedModel


@pytest.fixture
def simulated_model() -> Iterator[SimulatedModel]:
    """A served model with a little noise, whose optimiser makes no faults."""
    with SimulatedModel() as model:
        yield model
