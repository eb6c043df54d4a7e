"""The optimiser's model: any OpenAI-compatible endpoint, or a function, called with retries and within a budget.

Temporary failures (rate limits, overload, lost connections) are retried after the delay that the server names, or else
after a delay that doubles. Every request counts. Where money is limited, each carries a limit on what the model may
write.
"""

import asyncio
import inspect
import os
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final

from agentlightning.algorithm.prompts.budget import Hold, Ledger, most_tokens_read
from agentlightning.algorithm.prompts.results import logger_of
from agentlightning.errors import ConfigurationError, TrainingError
from agentlightning.utils.installation import install_command
from agentlightning.utils.json_values import JsonObject
from agentlightning.utils.network_errors import unanswered_address
from agentlightning.utils.retries import RetryPolicy, retry, retry_after_seconds

if TYPE_CHECKING:
    from openai import AsyncOpenAI

TRIES: Final = 6
_REFUSED: Final = range(400, 500)

ReflectionModel = Callable[[str], "str | None | Awaitable[str | None]"]
"""A model as a function, plain or async: the question in, the answer out."""


class OptimiserFailed(TrainingError):
    """The optimiser's model gave no answer, however often it was asked."""


class OptimiserModel:
    """Calls the model.

    Args:
        model: A client, or a function; None makes a client from the environment when it is first needed.
        algorithm: The name that errors show.
    """

    def __init__(
        self,
        model: "AsyncOpenAI | ReflectionModel | None",
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        *,
        algorithm: str = "APO",
    ) -> None:
        is_function = callable(model) and not hasattr(model, "chat")
        client: Any = None if is_function else model
        self._function: Any = model if is_function else None
        self._client: AsyncOpenAI | None = client
        self._sleep = sleep
        self._algorithm = algorithm
        self._is_ours = model is None
        # The limit's name with today's models, and with servers that know no other.
        self._limit_names = ["max_completion_tokens", "max_tokens"]  # those that the server may take
        self.ledger = Ledger()

    @property
    def client(self) -> "AsyncOpenAI":
        """The client; ConfigurationError if there is none and the environment describes none."""
        if self._client is None:
            self._client = _client_of_environment(self._algorithm)
        return self._client

    async def close(self) -> None:
        """Give back the connections of a client that was made here; the next call makes another."""
        if self._is_ours and self._client is not None:
            client, self._client = self._client, None
            await client.close()

    async def ask(self, model: str, messages: Any, temperature: float) -> str | None:
        """The text of the model's answer; None if there is none. OptimiserFailed if it cannot be reached."""
        if self._function is not None:
            return await self._call_function(model, messages)
        # Retries of the client's own would not be counted.
        client: Any = self.client
        client = client.with_options(max_retries=0) if hasattr(client, "with_options") else client
        most_read = most_tokens_read(messages) if self.ledger.budget.cost is not None else 0

        async def request() -> str | None:
            hold = await self.ledger.take_call(model, most_read)
            body = {"model": model, "messages": messages, "temperature": temperature, **self._limit()}
            try:
                return _text_of(model, await self._request(client, body, hold))
            except Exception as error:
                if self._takes_other_limit(error):
                    return await request()
                if _is_passing(error):
                    logger_of(self._algorithm).info("Model %s is busy: %s", model, _described(error))
                raise

        try:
            return await retry(request, _POLICY, sleep=self._sleep)
        except Exception as error:
            if not _is_of_model(error):
                raise
            raise OptimiserFailed(f"Model '{model}' did not answer: {_described(error)}") from error

    async def _call_function(self, model: str, messages: Any) -> str | None:
        hold = await self.ledger.take_call(model)
        try:
            answer = await asyncio.to_thread(self._function, messages[0]["content"])
            text: str | None = await answer if inspect.isawaitable(answer) else answer
            return text
        except Exception as error:  # the user's code; it is recorded, and raised if it goes on
            raise OptimiserFailed(f"The reflecting model failed: {type(error).__name__}: {error}") from error
        finally:
            self.ledger.end_call(hold, None)

    async def _request(self, client: Any, request: JsonObject, hold: Hold) -> Any:
        """One request, which the ledger counts."""
        try:
            answer = await client.chat.completions.create(**request)
        except BaseException as error:
            status = getattr(error, "status_code", None)
            # It may have been answered, and paid, where it timed out (408).
            self.ledger.drop_call(hold, is_free=status in _REFUSED and status != 408)
            raise
        self.ledger.end_call(hold, getattr(answer, "usage", None))
        return answer

    def _limit(self) -> dict[str, int]:
        """How much the model may write, where that must be known."""
        budget = self.ledger.budget
        return {} if budget.cost is None or budget.call_tokens is None else {self._limit_names[0]: budget.call_tokens}

    def _takes_other_limit(self, error: Exception) -> bool:
        """Whether a request was refused for the name of its limit; the next one has another, if there is one."""
        is_refused = len(self._limit_names) > 1 and getattr(error, "status_code", None) in _REFUSED
        if not (self._limit() and is_refused and self._limit_names[0] in str(error)):
            return False
        del self._limit_names[0]
        return True


def _client_of_environment(algorithm: str) -> "AsyncOpenAI":
    try:
        from openai import AsyncOpenAI
    except ImportError as error:
        raise ImportError(f"{algorithm} asks its models with openai: run `{install_command('openai')}`.") from error
    if not os.environ.get("OPENAI_API_KEY"):
        raise ConfigurationError(
            f"{algorithm} has no model to ask: pass an AsyncOpenAI client, or set OPENAI_API_KEY (and OPENAI_BASE_URL)."
        )
    return AsyncOpenAI(max_retries=0)


def _text_of(model: str, answer: Any) -> str | None:
    """The text of an answer; OptimiserFailed if it is nothing that a chat completion can be."""
    try:
        text = answer.choices[0].message.content if answer.choices else None
    except (AttributeError, IndexError, TypeError) as error:
        raise OptimiserFailed(f"Model '{model}' answered what is no chat completion: {answer!r:.200}") from error
    return None if text is None else str(text)


def _described(error: Exception) -> str:
    first_line, _, _ = str(error).partition("\n")
    return f"{type(error).__name__}: {first_line}{unanswered_address(error)}"


def _is_of_model(error: Exception) -> bool:
    """Whether a request failed, as opposed to what made it; a JSONDecodeError is of a server that sends no JSON."""
    is_network = type(error).__name__ in ("APIConnectionError", "APITimeoutError", "JSONDecodeError")
    return is_network or isinstance(getattr(error, "status_code", None), int)


def _is_passing(error: Exception) -> bool:
    status = getattr(error, "status_code", None)
    may_pass = _is_of_model(error) and status in {None, 408, 409, 425, 429, 500, 502, 503, 504, 529}
    return may_pass and (_requested_seconds(error) or 0.0) <= 600.0


def _requested_seconds(error: Exception) -> float | None:
    return retry_after_seconds(getattr(getattr(error, "response", None), "headers", None) or {})


_POLICY: Final = RetryPolicy(
    is_passing=_is_passing,
    delays=[0.5 * 2**number for number in range(TRIES - 1)],
    requested_seconds=_requested_seconds,
    jitter=0.25,
)
