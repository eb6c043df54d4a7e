"""A stub model with a proxy in front of it, for all tests of the proxy."""

from tests.llm_proxy.fixtures import door as door
