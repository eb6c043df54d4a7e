"""A stub model, alone or with a proxy in front of it, for all tests of the proxy."""

import pytest

from tests.llm_proxy.fixtures import door as door
from tests.stub_model.server import StubModel


@pytest.fixture
def model(stub_model: StubModel) -> StubModel:
    """One that repeats what it is told, for tests that put a proxy of their own before it."""
    return stub_model
