"""The proxy of this process: the one that was started last."""

from typing import TYPE_CHECKING

from agentlightning.utils.once import once

if TYPE_CHECKING:
    from agentlightning.llm_proxy.proxy import LLMProxy

__all__ = ["get_active_llm_proxy", "set_active_llm_proxy"]


class _Active:
    """Holds it."""

    proxy: "LLMProxy | None" = None


@once
def _active() -> _Active:
    return _Active()


def get_active_llm_proxy() -> "LLMProxy":
    """The proxy that was started last in this process; ValueError if there was none."""
    proxy = _active().proxy
    if proxy is None:
        raise ValueError("No LLM proxy was started in this process; create an LLMProxy and call its start().")
    return proxy


def set_active_llm_proxy(proxy: "LLMProxy") -> None:
    """Make it the proxy of this process."""
    _active().proxy = proxy
