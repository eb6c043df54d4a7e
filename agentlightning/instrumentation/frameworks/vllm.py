"""vLLM as a server: chat completions that carry the token ids they were made of.

Servers since vLLM 0.10.2 return token ids to who asks for them (`return_token_ids`), and are left as they are; earlier
ones are taught to return them always, as `prompt_token_ids` and, a list for each choice, `response_token_ids`. This is
for the process that serves: `instrument_vllm` is called before vLLM is started, and nothing here imports it.
"""

import functools
import importlib
import logging
from collections.abc import AsyncIterator
from types import ModuleType
from typing import Any

from agentlightning.instrumentation.patch import Original, Patch, guarded

__all__ = ["ChatCompletionResponsePatched", "VllmPatch", "instrument_vllm", "uninstrument_vllm"]  # noqa: F822 # built on first use

logger = logging.getLogger(__name__)


@functools.cache
def _patched_response() -> type:
    """vLLM's response of a chat, with token ids; imports vLLM."""
    plain = importlib.import_module("vllm.entrypoints.openai.protocol").ChatCompletionResponse
    return type(
        "ChatCompletionResponsePatched",
        (plain,),
        {
            "__module__": __name__,
            "__doc__": "vLLM's response of a chat completion, with the token ids of the prompt and of each choice.",
            "__annotations__": {"prompt_token_ids": list[int] | None, "response_token_ids": list[list[int]] | None},
            "prompt_token_ids": None,
            "response_token_ids": None,
        },
    )


def __getattr__(name: str) -> Any:
    if name == "ChatCompletionResponsePatched":
        return _patched_response()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class VllmPatch(Patch):
    """Has the chat endpoint of vLLM before 0.10.2 return token ids."""

    name = "vLLM"
    module = "vllm.entrypoints.openai.serving_chat"
    distribution = "vllm"

    def change(self, module: ModuleType) -> None:
        plain = module.ChatCompletionResponse
        if "prompt_token_ids" in plain.model_fields:
            logger.info("vLLM %s returns token ids on request; it is left as it is.", self._version())
            return
        patched = _patched_response()
        module.ChatCompletionResponse = patched  # type: ignore[attr-defined] # vLLM's own name for what it returns
        self.when_undone(functools.partial(setattr, module, "ChatCompletionResponse", plain))
        self.replace(module.OpenAIServingChat, "chat_completion_full_generator", _generate)


async def _generate(
    original: Original, serving: object, request: object, result_generator: Any, *args: object, **kwargs: object
) -> Any:
    """The response of a chat that does not stream, filled with the ids of the engine's last output."""
    last: list[Any] = []

    async def watched() -> AsyncIterator[Any]:
        async for output in result_generator:
            last[:] = [output]
            yield output

    response = await original(serving, request, watched(), *args, **kwargs)
    if last and isinstance(response, _patched_response()):  # otherwise it is an error
        with guarded("vLLM"):
            filled: Any = response
            filled.prompt_token_ids = list(last[0].prompt_token_ids or ())
            filled.response_token_ids = [list(choice.token_ids) for choice in last[0].outputs]
    return response


@functools.cache
def _patch() -> VllmPatch:
    """One for the process, as the package is."""
    return VllmPatch()


def instrument_vllm() -> bool:
    """Have vLLM's chat completions carry token ids, from its import on.

    True if vLLM is installed; a second call warns and changes nothing.
    """
    return _patch().turn_on()


def uninstrument_vllm() -> None:
    """Undo `instrument_vllm`; harmless if it was not called."""
    _patch().undo()
