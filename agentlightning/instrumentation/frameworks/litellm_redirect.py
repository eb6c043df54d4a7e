"""Where LiteLLM's calls go: what carries a prompt goes where the router of its context says, or fails.

Calls that LiteLLM sends in OpenAI's or Anthropic's shape leave through the SDKs, or through its own HTTP handlers, and
are sent elsewhere there: `redirected_post`. Chats of all other providers are turned into calls of OpenAI's SDK before
LiteLLM translates them: `redirected_arguments`. Images, speech and the like cannot be answered by the model of a
rollout, and neither can embeddings of another model: they raise, unless the model is excluded.
"""

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

import orjson

from agentlightning.dialects import (
    ANTHROPIC_DIALECTS,
    COUNT_TOKENS_PATH,
    OPENAI_DIALECTS,
    dialect_of,
)
from agentlightning.dialects.attributes import plain_text
from agentlightning.errors import ConfigurationError
from agentlightning.instrumentation.redirect import (
    PLACEHOLDER_KEY,
    ModelRequest,
    Router,
    Target,
    current_router,
    excluded,
    is_secret,
    rewritten,
    target_of,
)

CHAT_PATH: Final = "/chat/completions"
EMBEDDINGS_PATH: Final = "/embeddings"
_IN_SHAPE: Final = frozenset({"openai", "azure", "anthropic", "hosted_vllm", "custom_openai", "text-completion-openai"})
"""Providers whose calls leave in OpenAI's or Anthropic's shape, so that the layers below send them elsewhere."""
_OF_PROVIDER: Final = frozenset(
    {"api_base", "base_url", "api_version", "azure", "client", "deployment_id", "organization", "shared_session"}
)
"""Arguments that lead to the provider of a call."""
_NOT_SENT: Final = ("mock_response", "mock_tool_calls", "mock_timeout")
"""Arguments with which LiteLLM answers by itself."""


# ---------------------------------------------------------------------- calls as LiteLLM is asked for them


def redirected_arguments(path: str, arguments: Mapping[str, object]) -> dict[str, Any] | None:
    """The arguments with which OpenAI's SDK makes a call; None, if the call goes its way as it is.

    Args:
        path: Of OpenAI's API, that is to answer.

    Raises:
        ConfigurationError: It is no chat, and the router has no place for it.
    """
    router = current_router()
    # Arguments with which one call becomes others, each of which is redirected by itself.
    if router is None or any(arguments.get(name) for name in (*_NOT_SENT, "fallbacks", "model_list")):
        return None
    if path not in (CHAT_PATH, EMBEDDINGS_PATH):  # responses: LiteLLM sends them in OpenAI's shape, or as a chat
        return None
    request = _request_of(path, arguments)
    if target_of(router, request) is None:
        if path != CHAT_PATH:
            _refuse(router, arguments)
        return None
    return None if request.provider in _IN_SHAPE else _for_openai(str(request.model), arguments)


def excluded_attributes(arguments: Mapping[str, object]) -> dict[str, bool]:
    """What the span of a call says that goes its way as it is: whether it is excluded."""
    router = current_router()
    return {} if router is None else excluded(router, _request_of(CHAT_PATH, arguments))


def refuse_redirect(arguments: Mapping[str, object]) -> None:
    """Raise ConfigurationError for a call that is no chat, where chats of its model go elsewhere."""
    router = current_router()
    if router is not None and not any(arguments.get(name) for name in _NOT_SENT):
        _refuse(router, arguments)


def _refuse(router: Router, arguments: Mapping[str, object]) -> None:
    request = _request_of(CHAT_PATH, arguments)
    if target_of(router, request) is not None:
        name = f"{request.provider}/{request.model}"
        raise ConfigurationError(
            f"A call of the model '{name}' that is no chat would go to its own provider, for the model of the rollout "
            f"cannot answer it; if that is meant, give the rollout's LLM redirect_exclude=['{name}']."
        )


def _request_of(path: str, arguments: Mapping[str, object]) -> ModelRequest:
    litellm = importlib.import_module("litellm")
    given = plain_text(arguments.get("model") or "")
    asked = litellm.model_alias_map.get(given, given)
    address = arguments.get("base_url") or arguments.get("api_base")
    try:
        model, provider, _, _ = litellm.get_llm_provider(
            asked, arguments.get("custom_llm_provider"), address, arguments.get("api_key")
        )
    except Exception:  # noqa: BLE001 # LiteLLM says itself, and better, what it does not know
        model, provider = asked, "openai"
    url = f"{str(address).rstrip('/')}/" if address else ""
    return ModelRequest("openai", arguments.get("client"), path, model, url, provider)


def _for_openai(model: str, arguments: Mapping[str, object]) -> dict[str, object]:
    """Less what is for the provider alone: its credentials, its addresses and its own parameters."""
    of_chat = inspect.signature(importlib.import_module("litellm.main").completion).parameters
    of_litellm = importlib.import_module("litellm.types.utils").all_litellm_params
    known = {*of_chat, *of_litellm, "input", "dimensions", "encoding_format"}
    kept = {
        name: value
        for name, value in arguments.items()
        if name in known and name not in _OF_PROVIDER and not is_secret(name)
    }
    for name in ("headers", "extra_headers"):
        if kept.get(name):
            kept[name] = _without_secrets(kept[name])
    # The address of a call that OpenAI's SDK is about to send elsewhere; it never reaches anybody by itself.
    sent = {
        "model": model,
        "custom_llm_provider": "openai",
        "api_base": "http://redirected.invalid/v1",
        "api_key": PLACEHOLDER_KEY,
    }
    # Parameters that LiteLLM knows of the provider's models, and OpenAI's have not, are left out.
    return {**kept, **sent, "drop_params": True}


# ---------------------------------------------------------------------- requests as they are sent


@dataclass(frozen=True)
class Post:
    """What a handler is asked to send."""

    url: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    requested_model: str | None = None
    """What was asked for, if it goes elsewhere."""
    attributes: Mapping[str, bool] = field(default_factory=dict)
    """What its span says besides."""

    def body(self) -> Any:
        """As JSON; None if it is something else."""
        body = self.kwargs.get("json") or self.kwargs.get("data") or (self.args[0] if self.args else None)
        if isinstance(body, (str, bytes)):
            body = orjson.loads(body)
        return body if isinstance(body, Mapping) else None


def redirected_post(original: Callable[..., object], handler: object, post: Post) -> Post:
    """What is sent instead where a router wants a call elsewhere; what the router raises reaches the caller."""
    router = current_router()
    sdk: Literal["openai", "anthropic"] = "openai" if dialect_of(post.url, OPENAI_DIALECTS) is not None else "anthropic"
    paths = tuple(OPENAI_DIALECTS) if sdk == "openai" else (*ANTHROPIC_DIALECTS, COUNT_TOKENS_PATH)
    address = post.url.partition("?")[0].rstrip("/")
    if router is None or not address.endswith(paths):
        return post
    body = post.body()
    if body is None:
        return post
    path = next(ending for ending in paths if address.endswith(ending))
    request = ModelRequest(sdk, handler, path, body.get("model"), post.url)
    target = target_of(router, request)
    if target is None:
        return replace(post, attributes=excluded(router, request))
    named = dict(zip(tuple(inspect.signature(original).parameters)[2:], post.args, strict=False)) if post.args else {}
    kwargs = {**named, **post.kwargs, "data": orjson.dumps(rewritten(body, target)).decode(), "json": None}
    if target.api_key is not None:
        kwargs["params"] = _without_secrets(kwargs.get("params")) or None
    kwargs["headers"] = _headers(kwargs.get("headers"), target)
    return Post(target.base_url.rstrip("/") + path, (), kwargs, str(body.get("model")))


def _headers(given: Any, target: Target) -> dict[str, object]:
    """Of a request whose body is JSON text."""
    kept = {name: value for name, value in (given or {}).items() if name.lower() != "content-type"}
    if target.api_key is not None:
        keys = {"Authorization": f"Bearer {target.api_key}", "X-Api-Key": target.api_key}
        kept = {**_without_secrets(kept), **keys}
    return {**kept, "Content-Type": "application/json", **target.headers}


def _without_secrets(values: Any) -> dict[str, object]:
    return {name: value for name, value in (values or {}).items() if not is_secret(name)}
