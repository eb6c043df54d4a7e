"""A stub model with a proxy in front of it; import the fixtures into the `conftest.py` of the tests that want them."""

from collections.abc import Iterator

import pytest

from tests.llm_proxy.proxied import Proxied, entry, proxied
from tests.stub_model.server import StubModel

CLAUDE = "claude"
"""The stub model under the name by which it is asked in Anthropic's dialect."""


@pytest.fixture
def door(stub_model: StubModel) -> Iterator[Proxied]:
    """A proxy in front of the stub model, which serves each dialect in itself: OpenAI's as vLLM does."""
    with proxied(entry(stub_model.url), entry(stub_model.url, "messages", model=CLAUDE)) as door:
        yield door
