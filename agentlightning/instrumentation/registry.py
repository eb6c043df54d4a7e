"""All patches, applied and undone together, for as many users as there are.

`instrument_all` and `uninstrument_all` may be called by several tracers of a process, one in each worker thread: the
first applies the patches, the last undoes them.
"""

import pkgutil
import threading

from agentlightning.instrumentation.patch import Patch
from agentlightning.utils.once import once

_PATCHES = (
    "instrumentation.model_sdks:OpenAIPatch",
    "instrumentation.model_sdks:AnthropicPatch",
    "instrumentation.frameworks.autogen:AutoGenPatch",
    "instrumentation.frameworks.autogen:AG2Patch",
    "instrumentation.frameworks.autogen:NewerAG2Patch",
    "instrumentation.frameworks.openai_agents:OpenAIAgentsPatch",
    "instrumentation.frameworks.pydantic_ai:PydanticAIPatch",
    "instrumentation.frameworks.smolagents:SmolagentsPatch",
    "instrumentation.frameworks.litellm:LiteLLMPatch",
    "instrumentation.frameworks.crewai:CrewAIPatch",
    "instrumentation.frameworks.langchain:LangChainPatch",
)
"""Module and class; model SDKs first, because frameworks rely on them."""


class Instrumentation:
    """The patches of this process and how many want them."""

    def __init__(self, patches: tuple[Patch, ...]) -> None:
        self.patches = patches
        self._changing = threading.RLock()  # protects the number of users and the step it causes
        self._users = 0

    @property
    def is_on(self) -> bool:
        return self._users > 0

    def acquire(self) -> None:
        """One more user; the first applies the patches."""
        with self._changing:
            self._users += 1
            if self._users == 1:
                for patch in self.patches:
                    patch.apply()

    def release(self) -> None:
        """One user less; the last undoes the patches. Harmless if there is none."""
        with self._changing:
            if self._users == 0:
                return
            self._users -= 1
            if self._users == 0:
                for patch in reversed(self.patches):
                    patch.undo()


@once
def instrumentation() -> Instrumentation:
    """One per process, as the libraries it changes are."""
    kinds: list[type[Patch]] = [pkgutil.resolve_name(f"agentlightning.{address}") for address in _PATCHES]
    return Instrumentation(tuple(kind() for kind in kinds))


def instrument_all() -> None:
    """Have every library we know recorded: those that are imported now, and others as soon as they are."""
    instrumentation().acquire()


def uninstrument_all() -> None:
    """Undo one `instrument_all`; the last one leaves the libraries as they were."""
    instrumentation().release()
