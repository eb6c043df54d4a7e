"""AgentOps, where a program has started it itself: its spans of OpenAI's chats get what training needs.

AgentOps records some model calls with instrumentors of its own. Where one of them is active it has the word, because
the program asked for it: the model SDK's patch stays silent about that call (`is_recorded_by_agentops`), and this one
adds token ids and log-probabilities to AgentOps' span, so that a call is one span either way. Where AgentOps was not
started by the program, `agentops_adoption` has its decorators write to our provider and none of its instrumentors for
libraries we know is applied.

Also here, for scripts: the functions of the 0.2 release, its local stand-in for AgentOps' service, and the switch of
the 0.3 release that lets the service be contacted.
"""

import functools
import importlib
from collections.abc import Mapping
from types import ModuleType
from typing import Any, Final

from agentlightning.instrumentation.agentops_adoption import is_recorded_by_agentops, service
from agentlightning.instrumentation.agentops_service import AgentOpsServerManager, agentops_local_server
from agentlightning.instrumentation.dialects import OPENAI_DIALECTS, Assembler
from agentlightning.instrumentation.dialects.fields import LOGPROBS, PROMPT_IDS, REFUSAL_LOGPROBS, RESPONSE_IDS
from agentlightning.instrumentation.guard import guarded
from agentlightning.instrumentation.patch import Patch
from agentlightning.instrumentation.switch import Switch

__all__ = [
    "AgentOpsPatch",
    "AgentOpsServerManager",
    "agentops_local_server",
    "enable_agentops_service",
    "instrument_agentops",
    "is_recorded_by_agentops",
    "uninstrument_agentops",
]

_CHAT: Final = OPENAI_DIALECTS["/chat/completions"]
_ADDED: Final = (PROMPT_IDS, RESPONSE_IDS, LOGPROBS, REFUSAL_LOGPROBS)
_ASSEMBLER: Final = "_agentlightning_assembler"
"""Under which name a stream of AgentOps' keeps what was read of it."""


class AgentOpsPatch(Patch):
    """Adds `prompt_token_ids`, `response_token_ids`, `logprobs.content` and `logprobs.refusal` to AgentOps' spans."""

    name = "AgentOps"
    module = "agentops.instrumentation.providers.openai.stream_wrapper"
    distribution = "agentops"

    def change(self, module: ModuleType) -> None:
        wrappers = importlib.import_module("agentops.instrumentation.providers.openai.wrappers.chat")
        for place in (wrappers, module):
            self.replace(place, "handle_chat_attributes", _with_tokens)
        for stream in (module.OpenaiStreamWrapper, module.OpenAIAsyncStreamWrapper):
            self.replace(stream, "_process_chunk", _note_chunk)
            self.replace(stream, "_finalize_stream", _finish_stream)


def _with_tokens(original: Any, *args: Any, **kwargs: Any) -> Any:
    """AgentOps' attributes of a chat, and ours of its answer."""
    response = kwargs.get("return_value", args[2] if len(args) > 2 else None)
    attributes = original(*args, **kwargs)
    if response is not None:
        with guarded("AgentOps"):
            parsed = response.parse() if hasattr(response, "http_response") else response  # of a raw response
            attributes |= _tokens_of(parsed)
    return attributes


def _tokens_of(response: Any) -> Mapping[str, Any]:
    attributes = _CHAT.response_attributes(response)
    return {name: attributes[name] for name in _ADDED if name in attributes}


def _note_chunk(original: Any, stream: Any, chunk: Any) -> Any:
    with guarded("AgentOps"):
        if _ASSEMBLER not in vars(stream):
            assert _CHAT.assembler is not None
            setattr(stream, _ASSEMBLER, _CHAT.assembler())
        getattr(stream, _ASSEMBLER).add(chunk.to_dict())
    return original(stream, chunk)


def _finish_stream(original: Any, stream: Any) -> Any:
    with guarded("AgentOps"):
        assembler: Assembler | None = vars(stream).get(_ASSEMBLER)
        if assembler is not None:
            stream._span.set_attributes(_tokens_of(assembler.response()))
    return original(stream)


# ---------------------------------------------------------------------- for scripts


@functools.cache
def _switch() -> Switch:
    """One for the process, as the package is."""
    return Switch(AgentOpsPatch())


def instrument_agentops() -> bool:
    """Have AgentOps' spans of OpenAI's chats carry token ids and log-probabilities.

    True if the package is installed; a second call warns and changes nothing. Versions up to 0.4.13 are not known, and
    left as they are. `instrument_all` does this too.
    """
    return _switch().turn_on()


def uninstrument_agentops() -> None:
    """Undo `instrument_agentops`; harmless if it was not called."""
    _switch().turn_off()


def enable_agentops_service(enabled: bool = True) -> None:
    """Say whether AgentOps' hosted service may be contacted while `AgentOpsTracer` manages AgentOps; it may not, at
    first.

    It matters to a program that starts AgentOps itself, with a key of its own: what that exports is withheld unless
    this was called.
    """
    service().is_enabled = enabled
