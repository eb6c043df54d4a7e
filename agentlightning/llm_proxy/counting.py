"""Counting the tokens of a request that is not made, which clients of Anthropic may ask for.

Only a backend that speaks Anthropic's messages can say; of others there is nothing to ask. No answer is written, so
nothing is recorded, and no budget is touched.
"""

import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import orjson

from agentlightning.errors import ProxyError, StoreUnavailable
from agentlightning.llm_proxy.attribution import Headers, Refused, Route
from agentlightning.llm_proxy.backends import Ask, Backend, Outgoing
from agentlightning.llm_proxy.backends.errors import DialectNotServed
from agentlightning.llm_proxy.dialects.failures import Failure, error_body, failure_of
from agentlightning.llm_proxy.exchange import failure_from, read_request
from agentlightning.llm_proxy.outgoing import passed_headers, served_model
from agentlightning.llm_proxy.wire import answer_headers, read_body

if TYPE_CHECKING:
    from agentlightning.llm_proxy.gateway import Gateway

__all__ = ["COUNTING_PATH", "Counted", "counted"]

logger = logging.getLogger(__name__)

COUNTING_PATH: Final = "/messages/count_tokens"
PATIENCE_SECONDS: Final = 60.0
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
        caller = gateway.doorkeeper.admit(route, headers)
        request = await read_body(receive, headers, gateway.settings.max_request_bytes)
        await gateway.check_attempt(caller)
        asked = read_request(request)
        served = await served_model(gateway, caller.origin, asked["model"])

        def prepared(backend: Backend) -> Outgoing:
            if "messages" not in backend.dialects:
                raise DialectNotServed(f"Backend '{backend.name}' does not speak Anthropic's messages.")
            body = request if backend.model == asked["model"] else orjson.dumps({**asked, "model": backend.model})
            return Outgoing("messages", body, stream=False, headers=passed_headers(headers), below="count_tokens")

        ask = Ask(
            model=served.name,
            who="" if caller.origin is None else caller.origin.rollout_id,
            prepare=prepared,
            resources_id=served.resources_id,
            deadline=time.monotonic() + PATIENCE_SECONDS,
        )
        return await _asked(gateway, ask)
    except Refused as refusal:
        return _failed(refusal.failure)
    except DialectNotServed:
        words = f"Tokens of model '{served.name}' cannot be counted: no backend of it speaks Anthropic's messages."
        return _failed(Failure(404, words, "not_found_error"))
    except ProxyError as error:
        return _failed(failure_from(error))
    except StoreUnavailable as error:
        return _failed(Failure(503, f"The proxy cannot reach its store: {error}", None))
    except Exception:  # a fault of ours: the caller is told that there was one, the log what it was
        logger.exception("The tokens of a request could not be counted.")
        return _failed(Failure(500, "The proxy failed to serve this call; its log says why.", None))


async def _asked(gateway: "Gateway", ask: Ask) -> Counted:
    async with await gateway.fleet.ask(ask) as answer:
        body = await answer.read(gateway.settings.max_response_bytes)
        if answer.status >= _FIRST_ERROR:
            body = answer.backend.redacted_bytes(body)
            failure = failure_of("messages", answer.status, answer.headers, body)
            body = body if body.lstrip().startswith(b"{") else error_body("messages", failure)
        return Counted(answer.status, answer_headers(answer.headers, content_type=_JSON), body)


def _failed(failure: Failure) -> Counted:
    return Counted(failure.status, [(b"content-type", _JSON.encode())], error_body("messages", failure))
