"""Public path of the switches that have older vLLM servers return token ids."""

from typing import Any

from agentlightning.instrumentation.frameworks import vllm
from agentlightning.instrumentation.frameworks.vllm import instrument_vllm, uninstrument_vllm

__all__ = ["ChatCompletionResponsePatched", "instrument_vllm", "uninstrument_vllm"]  # noqa: F822 # built on first use


def __getattr__(name: str) -> Any:
    return getattr(vllm, name)
