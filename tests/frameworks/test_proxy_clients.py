"""OpenAI's client through the LLM proxy, with each of its major releases."""

from tests.llm_proxy.fixtures import door as door
from tests.llm_proxy.openai_suite import OpenAIChatSuite, OpenAIErrorsSuite, OpenAIOtherSuite

RUNS_IN = ("openai2", "openai3", "lowest")


class TestOpenAIChat(OpenAIChatSuite):
    """With the release of the group."""


class TestOpenAIOther(OpenAIOtherSuite):
    """With the release of the group."""


class TestOpenAIErrors(OpenAIErrorsSuite):
    """With the release of the group."""
