"""vLLM is not here: a package of the same shape is."""

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel

from agentlightning.instrumentation import vllm as instrumentation
from agentlightning.instrumentation.vllm import instrument_vllm, uninstrument_vllm

PROTOCOL = "vllm.entrypoints.openai.protocol"
SERVING = "vllm.entrypoints.openai.serving_chat"


class PlainResponse(BaseModel):
    id: str
    choices: list[str]


class NewerResponse(PlainResponse):
    prompt_token_ids: list[int] | None = None


class Refusal(BaseModel):
    message: str


def serving_module(response: type[BaseModel]) -> ModuleType:
    """As vLLM writes it: the response's class is looked up in the module."""
    module: Any = ModuleType(SERVING)
    module.ChatCompletionResponse = response

    class OpenAIServingChat:
        async def chat_completion_full_generator(
            self, request: Any, result_generator: AsyncIterator[Any], request_id: str
        ) -> Any:
            async for output in result_generator:
                final = output
            if request == "bad":
                return Refusal(message="no")
            return module.ChatCompletionResponse(id=request_id, choices=[choice.text for choice in final.outputs])

    module.OpenAIServingChat = OpenAIServingChat
    return module


@pytest.fixture(params=[PlainResponse])
def serving(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    instrumentation._patched_response.cache_clear()
    protocol: Any = ModuleType(PROTOCOL)
    protocol.ChatCompletionResponse = request.param
    for name in ("vllm", "vllm.entrypoints", "vllm.entrypoints.openai"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, PROTOCOL, protocol)
    monkeypatch.setitem(sys.modules, SERVING, serving_module(request.param))
    yield sys.modules[SERVING]
    uninstrument_vllm()
    instrumentation._patched_response.cache_clear()


async def engine() -> AsyncIterator[Any]:
    for ids in ([[7]], [[7, 8], [9]]):
        outputs = [SimpleNamespace(text=str(choice), token_ids=tuple(choice)) for choice in ids]
        yield SimpleNamespace(prompt_token_ids=[1, 2, 3], outputs=outputs)


def served(serving: Any, request: str = "good") -> Any:
    chat = serving.OpenAIServingChat()
    return asyncio.run(chat.chat_completion_full_generator(request, engine(), request_id="chat-1"))


def test_a_chat_completion_carries_its_token_ids(serving: Any) -> None:
    assert instrument_vllm()

    response = served(serving)

    assert isinstance(response, instrumentation.ChatCompletionResponsePatched)
    assert response.model_dump() == {
        "id": "chat-1",
        "choices": ["[7, 8]", "[9]"],
        "prompt_token_ids": [1, 2, 3],
        "response_token_ids": [[7, 8], [9]],
    }


def test_a_refusal_is_passed_on(serving: Any) -> None:
    instrument_vllm()
    assert served(serving, "bad") == Refusal(message="no")


def test_undoing_leaves_it_as_it_was(serving: Any) -> None:
    generator = serving.OpenAIServingChat.chat_completion_full_generator
    instrument_vllm()
    uninstrument_vllm()

    assert serving.OpenAIServingChat.chat_completion_full_generator is generator
    assert type(served(serving)) is PlainResponse


def test_doing_it_twice_is_a_warning(serving: Any) -> None:
    instrument_vllm()
    with pytest.warns(UserWarning, match="vLLM is instrumented already"):
        assert instrument_vllm()


@pytest.mark.parametrize("serving", [NewerResponse], indirect=True)
def test_a_server_that_returns_token_ids_itself_is_left_as_it_is(serving: Any) -> None:
    instrument_vllm()
    assert served(serving).model_dump() == {"id": "chat-1", "choices": ["[7, 8]", "[9]"], "prompt_token_ids": None}


def test_nothing_imports_vllm() -> None:
    assert "vllm" not in sys.modules
    with pytest.warns(UserWarning, match="vLLM is not installed"):
        assert not instrument_vllm()
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = instrumentation.Nothing
