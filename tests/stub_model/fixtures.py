"""The stub model as a fixture; import it into the `conftest.py` of the tests that want it."""

from collections.abc import Iterator

import pytest

from tests.stub_model.server import StubModel, running


@pytest.fixture
def stub_model() -> Iterator[StubModel]:
    """A served stub model that repeats what it is told; a test gives it a `script` of its own."""
    with running() as model:
        yield model
