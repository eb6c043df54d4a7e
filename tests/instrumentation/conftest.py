"""A stub model, and the SDKs of the vendors pointed at it."""

import pytest

from tests.instrumentation.sdk_calls import Asking, AskingAnthropic, AskingOpenAI
from tests.stub_model.server import StubModel


@pytest.fixture(params=["sync", "async"])
def ask(request: pytest.FixtureRequest, stub_model: StubModel) -> Asking:
    """Asks the stub model with OpenAI's SDK under a tracer, with either of its clients."""
    return AskingOpenAI(stub_model, is_async=request.param == "async")


@pytest.fixture(params=["sync", "async"])
def ask_anthropic(request: pytest.FixtureRequest, stub_model: StubModel) -> Asking:
    """As `ask`, with Anthropic's SDK."""
    return AskingAnthropic(stub_model, is_async=request.param == "async")
