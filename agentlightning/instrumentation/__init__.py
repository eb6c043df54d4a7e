"""Observing programs that were not written to be observed: the one room where third-party code is changed.

Each change is a `Patch`: a context that is applied now or when the library is imported, and undone without a trace.
Model calls are seen where they leave the process, in the request path of the model SDKs; frameworks add the agents and
tools above them.
"""

from agentlightning.instrumentation.imports import is_installed
from agentlightning.instrumentation.patch import Patch
from agentlightning.instrumentation.registry import instrument_all, uninstrument_all
from agentlightning.utils.deprecation import missing_name

__all__ = ["Patch", "instrument_all", "uninstrument_all"]

VLLM_INSTALLED = False
"""Never looked for: importing vLLM would change how rewards are recorded."""

_PACKAGES_BY_FLAG = {
    "AGENTOPS_INSTALLED": ("agentops",),
    "AGENTOPS_LANGCHAIN_INSTALLED": ("agentops", "langchain_core"),
    "LITELLM_INSTALLED": ("litellm",),
}


def __getattr__(name: str) -> bool:
    if name in _PACKAGES_BY_FLAG:  # without importing them
        return all(is_installed(package) for package in _PACKAGES_BY_FLAG[name])
    raise missing_name(__name__, name)
