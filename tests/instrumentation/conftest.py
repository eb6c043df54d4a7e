"""A stub model, and the SDKs of the vendors pointed at it."""

import pytest

from tests.instrumentation.sdk_calls import Asking, AskingAnthropic, AskingOpenAI
from tests.stub_model.server import StubModel


@pytest.fixture
def ask(stub_model: StubModel) -> Asking:
    """Asks the stub model with OpenAI's SDK under a tracer."""
    return AskingOpenAI(stub_model, is_async=False)


@pytest.fixture(params=["sync", "async"])
def ask_either(request: pytest.FixtureRequest, stub_model: StubModel) -> Asking:
    """As `ask`, with either of its clients."""
    return AskingOpenAI(stub_model, is_async=request.param == "async")


@pytest.fixture
def ask_anthropic(stub_model: StubModel) -> Asking:
    """As `ask`, with Anthropic's SDK."""
    return AskingAnthropic(stub_model, is_async=False)
