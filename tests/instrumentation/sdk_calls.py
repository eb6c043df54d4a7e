"""Calling the SDKs of models in all the ways they offer, and reading each answer to its end."""

import asyncio
import importlib
from operator import attrgetter
from typing import Any

import anthropic
import openai
from pydantic import BaseModel

from tests.instrumentation.traces import Trace, observed, observed_async
from tests.stub_model.server import StubModel
from tests.stub_model.words import ToolCall

HTTP: Any = importlib.import_module(openai.DefaultHttpxClient.__mro__[1].__module__.partition(".")[0])
"""The HTTP library of OpenAI's SDK: `httpx`, or in newer releases `httpx2`."""

USER: Any = [{"role": "user", "content": "Hello there"}]
CHAT: dict[str, Any] = {"model": "stub-model", "messages": USER}
IDS = {"return_token_ids": True}
WEATHER = ToolCall.of("weather", city="Oslo")
PARAMETERS: Any = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "description": "It says.", "parameters": PARAMETERS}}
]
STRICT_TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS, "strict": True}}]
_STREAM = {"stream": True, "stream_options": {"include_usage": True}}
CHAT_WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("chat.completions.create", {}),
    "stream": ("chat.completions.create", _STREAM),
    "raw": ("chat.completions.with_raw_response.create", {}),
    "raw stream": ("chat.completions.with_raw_response.create", _STREAM),
    "streamed response": ("chat.completions.with_streaming_response.create", {}),
    "streamed stream": ("chat.completions.with_streaming_response.create", _STREAM),
    "helper": ("chat.completions.stream", {"stream_options": {"include_usage": True}}),
    "parse": ("chat.completions.parse", {}),
    "raw parse": ("chat.completions.with_raw_response.parse", {}),
}
"""Methods of OpenAI's client that ask for a chat, and their options."""
MESSAGE_WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("messages.create", {}),
    "stream": ("messages.create", {"stream": True}),
    "helper": ("messages.stream", {}),
    "raw": ("messages.with_raw_response.create", {}),
    "raw stream": ("messages.with_raw_response.create", {"stream": True}),
    "streamed response": ("messages.with_streaming_response.create", {}),
    "beta": ("beta.messages.create", {}),
    "beta stream": ("beta.messages.create", {"stream": True}),
    "beta helper": ("beta.messages.stream", {}),
}
"""Those of Anthropic's that ask for a message."""


class Verdict(BaseModel):
    reason: str
    score: int


class Asking:
    """Asks a stub model with a client made for each question, observed by a tracer."""

    def __init__(self, model: StubModel, *, is_async: bool) -> None:
        self.model = model
        self.is_async = is_async

    def options(self, **options: Any) -> dict[str, Any]:
        """What the client is made with."""
        raise NotImplementedError

    def client(self, **options: Any) -> Any:
        """An ordinary client."""
        raise NotImplementedError

    def async_client(self, **options: Any) -> Any:
        raise NotImplementedError

    def __call__(self, method: str, /, *, client: dict[str, Any] | None = None, **arguments: Any) -> Trace:
        """Call a method, such as `chat.completions.create`, and return the trace; the result is what was read.

        Args:
            client: Options of the client.
        """
        if self.is_async:
            return asyncio.run(observed_async(self.unobserved_async, method, client or {}, arguments))
        return observed(self.unobserved, method, client or {}, arguments)

    def plainly(self, method: str, /, **arguments: Any) -> Any:
        """The same, without a tracer; returns what was read."""
        if self.is_async:
            return asyncio.run(self.unobserved_async(method, {}, arguments))
        return self.unobserved(method, {}, arguments)

    def unobserved(self, method: str, options: dict[str, Any], arguments: dict[str, Any]) -> Any:
        with self.client(**options) as client:
            return read(attrgetter(method)(client)(**arguments))

    async def unobserved_async(self, method: str, options: dict[str, Any], arguments: dict[str, Any]) -> Any:
        async with self.async_client(**options) as client:
            answer = attrgetter(method)(client)(**arguments)
            return await read_async(await answer if hasattr(answer, "__await__") else answer)


class AskingOpenAI(Asking):
    """With OpenAI's SDK."""

    def options(self, **options: Any) -> dict[str, Any]:
        return {"base_url": self.model.openai_url, "api_key": "any", "max_retries": 0, **options}

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(**self.options(**options))

    def async_client(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(**self.options(**options))


class AskingAnthropic(Asking):
    """With Anthropic's."""

    def options(self, **options: Any) -> dict[str, Any]:
        return {"base_url": self.model.url, "api_key": "any", "max_retries": 0, **options}

    def client(self, **options: Any) -> anthropic.Anthropic:
        return anthropic.Anthropic(**self.options(**options))

    def async_client(self, **options: Any) -> anthropic.AsyncAnthropic:
        return anthropic.AsyncAnthropic(**self.options(**options))


def read(answer: Any) -> Any:
    """An answer as plain values, read to its end: objects with their types, streams as lists, raw responses as text."""
    if hasattr(answer, "http_response"):
        return [type(answer).__name__, answer.http_response.status_code, read(answer.parse())]
    if hasattr(answer, "parse") and hasattr(answer, "iter_bytes"):
        return [type(answer).__name__, answer.read().decode()]
    if hasattr(answer, "__enter__") and not hasattr(answer, "__stream__"):
        with answer as opened:
            return read(opened) if not hasattr(opened, "http_response") else _streamed(opened)
    if hasattr(answer, "__iter__") and not isinstance(answer, (BaseModel, str, dict)):
        return [type(answer).__name__, *map(_plain, answer)]
    return _plain(answer)


def _streamed(response: Any) -> Any:
    return [type(response).__name__, response.read().decode()]


async def read_async(answer: Any) -> Any:
    """As `read`, for answers of asynchronous clients."""
    if hasattr(answer, "http_response"):
        parsed = answer.parse()
        parsed = await parsed if hasattr(parsed, "__await__") else parsed
        return [type(answer).__name__, answer.http_response.status_code, await read_async(parsed)]
    if hasattr(answer, "__aenter__") and not hasattr(answer, "__stream__"):
        async with answer as opened:
            if not hasattr(opened, "http_response"):
                return await read_async(opened)
            return [type(opened).__name__, (await opened.read()).decode()]
    if hasattr(answer, "__aiter__") and not isinstance(answer, BaseModel):
        return [type(answer).__name__, *[_plain(item) async for item in answer]]
    return _plain(answer)


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return [type(value).__qualname__, value.model_dump(warnings=False)]
    return value


def call_of(trace: Trace, name: str = "openai.chat.completion") -> dict[str, Any]:
    """The attributes of the only span."""
    assert trace.error is None, trace.error
    assert [span.name for span in trace.spans] == [name]
    assert trace.spans[0].status.status_code == "UNSET"
    return dict(trace.spans[0].attributes)


def values(attributes: dict[str, Any], prefix: str) -> dict[str, Any]:
    """The attributes whose names begin so, without that beginning."""
    return {name.removeprefix(prefix): value for name, value in attributes.items() if name.startswith(prefix)}
