"""Counting the tokens of a request that is not made, as clients of Anthropic may ask for.

Backends that speak Anthropic's messages get the request as it is, vLLM and our engine the chat that it would become.
For others the count is estimated from the length of the text: agents use it to keep within a context, and an error
would stop some. No answer is written, so nothing is recorded, and no budget is touched.
"""

import logging
import time
from typing import TYPE_CHECKING, Final

import orjson

from agentlightning.asgi.request import Request
from agentlightning.asgi.response import Response, json_response
from agentlightning.dialects.failures import Failure, error_body, failure_of, read_json
from agentlightning.errors import AgentLightningError
from agentlightning.llm_proxy.attribution import Headers, Refused, Route
from agentlightning.llm_proxy.backends import Backend, BackendRequest, DialectNotServed, PreparedRequest
from agentlightning.llm_proxy.proxied_call import failure_from, read_request, response_headers
from agentlightning.llm_proxy.translation import Translation, UntranslatableRequest
from agentlightning.llm_proxy.upstream_request import served_model, upstream_headers

if TYPE_CHECKING:
    from agentlightning.llm_proxy.gateway import Gateway

logger = logging.getLogger(__name__)

COUNT_PATH: Final = "/messages/count_tokens"
DEADLINE_SECONDS: Final = 60.0
CHARACTERS_PER_TOKEN: Final = 4
_FIRST_ERROR: Final = 400


async def count_tokens(gateway: "Gateway", route: Route, request: Request, headers: Headers) -> Response:
    """Have a backend count; never raises but at the end of the server."""
    try:
        caller = gateway.authenticator.admit(route, headers)
        await gateway.check_attempt(caller)
        async with gateway.bodies.read(request, max_bytes=gateway.settings.max_request_bytes) as body:
            requested = await gateway.bodies.parse(body, read_request)
        served = await served_model(gateway, caller.origin, requested["model"])
        call = BackendRequest(
            model=served.name,
            rollout_id="" if caller.origin is None else caller.origin.rollout_id,
            prepare=lambda backend: _prepared(backend, requested, body, headers),
            resources_id=served.resources_id,
            deadline=time.monotonic() + DEADLINE_SECONDS,
        )
        try:
            counted = await _counted_by_backend(gateway, call)
        except (DialectNotServed, UntranslatableRequest):
            counted = None
        return counted or json_response({"input_tokens": _estimate(requested)})
    except (Refused, AgentLightningError) as error:
        failure = failure_from(error)
    except Exception:  # a fault of ours: the caller learns that there was one, the log what it was
        logger.exception("The tokens of a request could not be counted.")
        failure = Failure(500, "The proxy failed to serve this call; its log says why.", None)
    return Response(failure.status, error_body("messages", failure))


def _prepared(backend: Backend, requested: dict[str, object], body: bytes, headers: Headers) -> PreparedRequest:
    if backend.count_url is None:
        raise DialectNotServed(f"Backend '{backend.name}' counts no tokens.")
    if "messages" not in backend.dialects:
        chat = Translation("messages", "chat").request(requested)
        counted = {name: chat[name] for name in ("messages", "tools") if name in chat}
        body = orjson.dumps({**counted, "model": backend.model})
    elif backend.model != requested["model"]:
        body = orjson.dumps({**requested, "model": backend.model})
    dialect = backend.serving("messages")
    return PreparedRequest(dialect, body, stream=False, headers=upstream_headers(headers), url=backend.count_url)


async def _counted_by_backend(gateway: "Gateway", call: BackendRequest) -> Response | None:
    """The backend's answer; None if it has a tokenizer and does not say."""
    async with await gateway.backends.send(call) as response:
        body = await response.read(gateway.settings.max_response_bytes)
        if "messages" not in response.backend.dialects:  # vLLM's tokenizer
            answer = read_json(body)
            count = answer.get("count") if isinstance(answer, dict) and response.status < _FIRST_ERROR else None
            return json_response({"input_tokens": count}) if isinstance(count, int) and count > 0 else None
        if response.status >= _FIRST_ERROR:
            body = response.backend.redacted_bytes(body)
            failure = failure_of("messages", response.status, body)
            body = body if body.lstrip().startswith(b"{") else error_body("messages", failure)
        return Response(response.status, body, headers=response_headers(response.headers))


def _estimate(requested: dict[str, object]) -> int:
    characters = 0
    left: list[object] = [requested.get(name) for name in ("system", "messages", "tools")]
    while left:
        value = left.pop()
        if isinstance(value, str):
            characters += len(value)
        elif isinstance(value, list):
            left += value
        elif isinstance(value, dict) and value.get("type") in ("image", "document"):
            # A picture counts as 6000 characters; its bytes say little of its tokens.
            characters += 6000
        elif isinstance(value, dict):
            left += value.values()
    return characters // CHARACTERS_PER_TOKEN + 1
