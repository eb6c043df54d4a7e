"""Counting the tokens of a request that is not made, which clients of Anthropic may ask for.

Backends that speak Anthropic's messages are asked as they are, vLLM and our engine for the tokens of the chat that the
request would become. For others the count is estimated from the length of the text: agents use it to keep within a
context, and an error would stop some. No answer is written, so nothing is recorded, and no budget is touched.
"""

import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import orjson

from agentlightning.dialects.failures import Failure, error_body, failure_of
from agentlightning.errors import ProxyError, StoreUnavailable
from agentlightning.llm_proxy.attribution import Headers, Refused, Route
from agentlightning.llm_proxy.backends import Backend, BackendRequest, DialectNotServed, PreparedRequest
from agentlightning.llm_proxy.exchange import failure_from, read_request
from agentlightning.llm_proxy.outgoing import passed_headers, served_model
from agentlightning.llm_proxy.translation import UntranslatableRequest, translation
from agentlightning.llm_proxy.wire import answer_headers, read_body

if TYPE_CHECKING:
    from agentlightning.llm_proxy.gateway import Gateway

__all__ = ["COUNTING_PATH", "Counted", "counted"]

logger = logging.getLogger(__name__)

COUNTING_PATH: Final = "/messages/count_tokens"
PATIENCE_SECONDS: Final = 60.0
CHARACTERS_PER_TOKEN: Final = 4
CHARACTERS_OF_A_PICTURE: Final = 6000
"""For as many as it has tokens, about; its bytes say little of that."""
_FIRST_ERROR: Final = 400
_JSON: Final = "application/json"


@dataclass(frozen=True)
class Counted:
    """What the caller gets."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


async def counted(
    gateway: "Gateway", route: Route, headers: Headers, receive: Callable[[], Awaitable[MutableMapping[str, Any]]]
) -> Counted:
    """Have a backend count; never raises but at the end of the server."""
    try:
        caller = gateway.authenticator.admit(route, headers)
        request = await read_body(receive, headers, gateway.settings.max_request_bytes)
        await gateway.check_attempt(caller)
        asked = read_request(request)
        served = await served_model(gateway, caller.origin, asked["model"])

        def prepared(backend: Backend) -> PreparedRequest:
            if backend.count_url is None:
                raise DialectNotServed(f"Backend '{backend.name}' counts no tokens.")
            body = _body_for(backend, asked) or request
            dialect = backend.serving("messages")
            return PreparedRequest(dialect, body, stream=False, headers=passed_headers(headers), url=backend.count_url)

        call = BackendRequest(
            model=served.name,
            rollout_id="" if caller.origin is None else caller.origin.rollout_id,
            prepare=prepared,
            resources_id=served.resources_id,
            deadline=time.monotonic() + PATIENCE_SECONDS,
        )
        return await _asked(gateway, call) or _counted(_estimate(asked))
    except Refused as refusal:
        return _failed(refusal.failure)
    except (DialectNotServed, UntranslatableRequest):
        return _counted(_estimate(asked))
    except ProxyError as error:
        return _failed(failure_from(error))
    except StoreUnavailable as error:
        return _failed(Failure(503, f"The proxy cannot reach its store: {error}", None))
    except Exception:  # a fault of ours: the caller is told that there was one, the log what it was
        logger.exception("The tokens of a request could not be counted.")
        return _failed(Failure(500, "The proxy failed to serve this call; its log says why.", None))


def _body_for(backend: Backend, asked: dict[str, Any]) -> bytes | None:
    """What the backend is sent; None for the request as it came."""
    if "messages" in backend.dialects:
        return None if backend.model == asked["model"] else orjson.dumps({**asked, "model": backend.model})
    chat = translation("messages", "chat").request(asked)
    return orjson.dumps(
        {**{name: chat[name] for name in ("messages", "tools") if name in chat}, "model": backend.model}
    )


async def _asked(gateway: "Gateway", call: BackendRequest) -> Counted | None:
    """What the backend answers; None if it has a tokenizer and does not say."""
    async with await gateway.backends.send(call) as answer:
        body = await answer.read(gateway.settings.max_response_bytes)
        if "messages" not in answer.backend.dialects:
            return _counted(_count_in(body)) if answer.status < _FIRST_ERROR and _count_in(body) else None
        if answer.status >= _FIRST_ERROR:
            body = answer.backend.redacted_bytes(body)
            failure = failure_of("messages", answer.status, answer.headers, body)
            body = body if body.lstrip().startswith(b"{") else error_body("messages", failure)
        return Counted(answer.status, answer_headers(answer.headers, content_type=_JSON), body)


def _count_in(body: bytes) -> int:
    """What vLLM's tokenizer counted; 0 if the answer is another."""
    try:
        told = orjson.loads(body)
    except ValueError:
        return 0
    count = told.get("count") if isinstance(told, dict) else None
    return count if isinstance(count, int) and count > 0 else 0


def _estimate(asked: dict[str, Any]) -> int:
    characters = 0
    waiting: list[Any] = [asked.get(name) for name in ("system", "messages", "tools")]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            characters += len(value)
        elif isinstance(value, list):
            waiting += value
        elif isinstance(value, dict) and value.get("type") in ("image", "document"):
            characters += CHARACTERS_OF_A_PICTURE
        elif isinstance(value, dict):
            waiting += value.values()
    return characters // CHARACTERS_PER_TOKEN + 1


def _counted(tokens: int) -> Counted:
    return Counted(200, [(b"content-type", _JSON.encode())], orjson.dumps({"input_tokens": tokens}))


def _failed(failure: Failure) -> Counted:
    return Counted(failure.status, [(b"content-type", _JSON.encode())], error_body("messages", failure))
