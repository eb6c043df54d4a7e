"""Where the model calls of an agent go while it runs: to the models that its resources name.

An agent need not use its resources. Calls that it makes with clients of its own, of the OpenAI and Anthropic SDKs or
with LiteLLM, whoever made them and when, are sent to the `ProxyLLM` of the rollout: under the URL and the key of its
attempt, with its model and its sampling parameters. A plain `LLM` takes such calls only with `redirect=True`, and
`redirect=False` keeps a `ProxyLLM` from it.

Of several, a call goes to the one whose model it asks for; otherwise to `main_llm`; otherwise it is left alone, with a
warning. An embedding is sent to a model of exactly that name, because no other can stand in for it; otherwise it is
left alone, with a warning.

Where the resources are scoped, a call that is made inside the span of an agent called `critic` is one of `critic`, and
goes to the models of that scope. So each member of a team may have its own, whatever framework runs the team.

A call is left alone if it goes to a place that the resources name already, if the model it asks for is among
`redirect_exclude`, if its client was given to `exclude_from_redirect`, and inside `not_redirected()`.
"""

import functools
import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final

from agentlightning.dialects import COUNT_TOKENS_PATH
from agentlightning.instrumentation.litellm import LiteLLMPatch
from agentlightning.instrumentation.model_sdks import AnthropicPatch, OpenAIPatch
from agentlightning.instrumentation.redirect import (
    PLACEHOLDER_KEY,
    ModelRequest,
    Router,
    Target,
    current_router,
    redirected,
)
from agentlightning.instrumentation.registry import Instrumentation, instrumentation
from agentlightning.instrumentation.spans import current_agent
from agentlightning.instrumentation.threads import ThreadContextPatch
from agentlightning.litagent.scoping import SEPARATOR, resources_for, scoped_to
from agentlightning.types import LLM, AttemptedRollout, NamedResources, ProxyLLM, ResourcesUpdate, Rollout
from agentlightning.utils.once import once

__all__ = ["MAIN_LLM", "redirecting", "router_for"]

logger = logging.getLogger(__name__)

MAIN_LLM: Final = "main_llm"
"""The model, of several, that takes calls of which the resources do not say otherwise."""
_VERSION: Final = "/v1"
_WARNINGS_KEPT: Final = 64
_RENAMED_PARAMETERS: Final[Mapping[str, Mapping[str, str]]] = {
    "/responses": {"max_tokens": "max_output_tokens", "max_completion_tokens": "max_output_tokens"},
    "/messages": {"max_completion_tokens": "max_tokens", "stop": "stop_sequences"},
}
"""By the end of the path: what the sampling parameters of a chat are called there."""
_LIMITS: Final = ("max_tokens", "max_completion_tokens")
"""Two names of one thing; a chat may have only one of them."""


def router_for(
    rollout: Rollout, resources: NamedResources | ResourcesUpdate, *, agent_name: str | None = None
) -> Router | None:
    """Says where model calls of this rollout go; None if its resources leave them all where they are.

    Args:
        agent_name: Whose resources are meant, where they are scoped; None for those of everybody.
    """
    named = resources.resources if isinstance(resources, ResourcesUpdate) else resources
    if not any(map(_takes_calls, named.values())):
        return None
    redirection = _redirection_of(scoped_to(agent_name, named), rollout)
    return redirection if redirection.takes_calls else None


def redirecting(router: Router | None) -> AbstractContextManager[None]:
    """As `redirected`, also where no tracer has changed the SDKs; without a router nothing is changed."""
    if router is None:
        return nullcontext() if current_router() is None else redirected(None)
    return redirected(router) if instrumentation().is_on else _patched(router)


@contextmanager
def _patched(router: Router) -> Iterator[None]:
    patches = _sending_patches()
    patches.acquire()
    try:
        with redirected(router):
            yield
    finally:
        patches.release()


@once
def _sending_patches() -> Instrumentation:
    """What sends calls elsewhere without recording them; one for the process, as the SDKs are."""
    sdks = (OpenAIPatch(records=False), AnthropicPatch(records=False), LiteLLMPatch(records=False))
    return Instrumentation((ThreadContextPatch(()), *sdks))


def _takes_calls(resource: object) -> bool:
    if not isinstance(resource, LLM):
        return False
    return isinstance(resource, ProxyLLM) if resource.redirect is None else resource.redirect


# ---------------------------------------------------------------------- the models of one attempt


@dataclass(frozen=True)
class _Place:
    """A model of the resources, as this attempt reaches it."""

    llm: LLM
    root: str
    """Where the API begins, without its version."""
    openai_url: str
    api_key: str | None

    def has(self, request: ModelRequest) -> bool:
        """Whether a call goes here as it is: anywhere in the attempt's part of a proxy, to this model otherwise."""
        is_below = request.url.startswith(self.root + "/")
        return is_below and (isinstance(self.llm, ProxyLLM) or request.model == self.llm.model)

    def excludes(self, request: ModelRequest) -> bool:
        """By the name of its model, alone or behind that of its provider."""
        if request.model is None:
            return False
        names = (request.model, f"{request.provider}/{request.model}")[: 1 if request.provider is None else 2]
        return any(fnmatchcase(name, pattern) for pattern in self.llm.redirect_exclude for name in names)

    def target(self, request: ModelRequest) -> Target:
        return Target(
            self.openai_url if request.sdk == "openai" else self.root,
            model=self.llm.model,
            api_key=self.api_key or PLACEHOLDER_KEY,
            parameters=_parameters(self.llm.sampling_parameters, request.path),
        )


def _place_of(llm: object, rollout: Rollout) -> _Place | None:
    """None for what is no model, and for a proxy where there is no attempt to record calls under."""
    if not isinstance(llm, LLM):
        return None
    if not isinstance(llm, ProxyLLM):
        url = llm.endpoint.removesuffix("/")
        return _Place(llm, url.removesuffix(_VERSION), url, llm.api_key)
    if not isinstance(rollout, AttemptedRollout):
        return None
    ids = rollout.rollout_id, rollout.attempt.attempt_id
    root = llm.get_base_url(*ids).removesuffix(_VERSION)
    return _Place(llm, root, root + _VERSION, llm.get_api_key(*ids))


class _Redirection:
    """The router of one attempt, or of one agent in it."""

    def __init__(
        self, taking: Mapping[str, _Place], known: tuple[_Place, ...], members: "Mapping[str, _Redirection]"
    ) -> None:
        self._taking = taking
        self._members = members
        self._known: tuple[_Place, ...] = (*known, *(place for member in members.values() for place in member._known))
        self.takes_calls: bool = bool(taking) or any(member.takes_calls for member in members.values())

    def excludes(self, request: ModelRequest) -> bool:
        """Whether a call without a target is left alone, and not one that goes where it belongs already."""
        return not any(place.has(request) for place in self._known)

    def __call__(self, request: ModelRequest) -> Target | None:
        member = self._members.get(current_agent() or "") if self._members else None
        if member is not None:
            return member(request)
        if not self.excludes(request):
            return None
        place = self._place_for(request)
        return None if place is None or place.excludes(request) else place.target(request)

    def _place_for(self, request: ModelRequest) -> _Place | None:
        same = {name: place for name, place in self._taking.items() if place.llm.model == request.model}
        if same:
            return same.get(MAIN_LLM) or next(iter(same.values()))
        if not self._taking:
            return None
        is_excluded = any(place.excludes(request) for place in self._taking.values())
        if _is_embedding(request.path):
            if not is_excluded and request.provider is None:
                _warn_of_embedding(request.model)
            return None
        if len(self._taking) == 1:
            return next(iter(self._taking.values()))
        main = self._taking.get(MAIN_LLM)
        if main is None and not is_excluded:
            _warn_of_several(tuple(self._taking), request.model)
        return main


def _redirection_of(resources: NamedResources, rollout: Rollout) -> _Redirection:
    scopes = {name.partition(SEPARATOR)[0]: None for name in resources if SEPARATOR in name}
    members = {scope: _redirection_of(resources_for(scope, resources), rollout) for scope in scopes}
    places = {
        name: place
        for name, llm in resources.items()
        if SEPARATOR not in name and (place := _place_of(llm, rollout)) is not None
    }
    taking = {name: place for name, place in places.items() if _takes_calls(place.llm)}
    return _Redirection(taking, tuple(places.values()), members)


@functools.lru_cache(maxsize=_WARNINGS_KEPT)  # once, not once for each call
def _warn_of_several(names: tuple[str, ...], model: str | None) -> None:
    logger.warning(
        "A call of the model '%s' is not redirected, because several of the resources could take it: %s. Call one of "
        "them '%s', ask for the model of one, or give the others redirect=False.",
        model,
        ", ".join(names),
        MAIN_LLM,
    )


@functools.lru_cache(maxsize=_WARNINGS_KEPT)
def _warn_of_embedding(model: str | None) -> None:
    logger.warning(
        "An embedding of the model '%s' is not redirected, because none of the resources has this model; if it is to "
        "go where its client sends it, give the LLM redirect_exclude=['%s'].",
        model,
        model,
    )


def _is_embedding(path: str) -> bool:
    return _bare(path).endswith("/embeddings")


def _parameters(sampling: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Sampling parameters as the API at the end of this path calls them."""
    path = _bare(path)
    if not sampling or _is_embedding(path) or path.endswith(COUNT_TOKENS_PATH):
        return {}
    renamed = next((names for ending, names in _RENAMED_PARAMETERS.items() if path.endswith(ending)), None)
    if renamed is None:
        limits = dict.fromkeys(_LIMITS) if any(name in sampling for name in _LIMITS) else {}
        return {**limits, **sampling}
    parameters = {renamed.get(name, name): value for name, value in sampling.items()}
    if isinstance(parameters.get("stop_sequences"), str):  # a chat takes a single one
        parameters["stop_sequences"] = [parameters["stop_sequences"]]
    return parameters


def _bare(path: str) -> str:
    return path.partition("?")[0].rstrip("/")
