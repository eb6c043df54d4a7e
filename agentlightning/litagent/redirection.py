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

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from fnmatch import fnmatchcase
from typing import Final

from agentlightning.dialects import PATHS, dialect_of
from agentlightning.instrumentation.frameworks.litellm import LiteLLMPatch
from agentlightning.instrumentation.model_sdks import AnthropicPatch, OpenAIPatch
from agentlightning.instrumentation.patch import current_agent
from agentlightning.instrumentation.redirect import (
    PLACEHOLDER_KEY,
    ModelRequest,
    Router,
    Target,
    current_router,
    redirected,
)
from agentlightning.instrumentation.registry import Instrumentation, instrumentation
from agentlightning.instrumentation.threads import ThreadContextPatch
from agentlightning.litagent.command_environment import warn_once
from agentlightning.types import LLM, AttemptedRollout, NamedResources, ProxyLLM, ResourcesUpdate, Rollout
from agentlightning.types.resources import SEPARATOR, resources_for, scoped_to
from agentlightning.utils.once import once

MAIN_LLM: Final = "main_llm"
"""The model, of several, that takes calls of which the resources do not say otherwise."""
_VERSION: Final = "/v1"


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
    redirection = _Redirection(scoped_to(agent_name, named), rollout)
    return redirection if redirection.takes_calls else None


def redirecting(router: Router | None) -> AbstractContextManager[None]:
    """As `redirected`, also where no tracer has changed the SDKs; without a router nothing is changed."""
    if router is None:
        return nullcontext() if current_router() is None else redirected(None)
    return redirected(router) if instrumentation().is_on else _patched(_sending_patches(), router)


@contextmanager
def _patched(patches: Instrumentation, router: Router) -> Iterator[None]:
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


class _Endpoint:
    """A model of the resources, as this attempt reaches it."""

    def __init__(self, llm: LLM, rollout: Rollout) -> None:
        self.llm = llm
        if isinstance(llm, ProxyLLM) and isinstance(rollout, AttemptedRollout):
            ids = rollout.rollout_id, rollout.attempt.attempt_id
            self._root = llm.get_base_url(*ids).removesuffix(_VERSION)  # where the API begins
            self._openai_url = self._root + _VERSION
            self._api_key = llm.get_api_key(*ids)
        else:
            self._openai_url = llm.endpoint.removesuffix("/")
            self._root = self._openai_url.removesuffix(_VERSION)
            self._api_key = llm.api_key

    def has(self, request: ModelRequest) -> bool:
        """Whether a call goes here as it is: anywhere in the attempt's part of a proxy, to this model otherwise."""
        is_below = request.url.startswith(self._root + "/")
        return is_below and (isinstance(self.llm, ProxyLLM) or request.model == self.llm.model)

    def excludes(self, request: ModelRequest) -> bool:
        """By the name of its model, alone or behind that of its provider."""
        names = [] if request.model is None else [request.model]
        if names and request.provider is not None:
            names.append(f"{request.provider}/{request.model}")
        return any(fnmatchcase(name, pattern) for pattern in self.llm.redirect_exclude for name in names)

    def target(self, request: ModelRequest) -> Target:
        dialect = dialect_of(request.path, PATHS)
        sampling = self.llm.sampling_parameters
        return Target(
            self._openai_url if request.sdk == "openai" else self._root,
            model=self.llm.model,
            api_key=self._api_key or PLACEHOLDER_KEY,
            parameters={} if dialect is None or not sampling else dialect.sampling_parameters(sampling),
        )


class _Redirection:
    """The router of one attempt, or of one agent in it."""

    def __init__(self, resources: NamedResources, rollout: Rollout) -> None:
        scopes = {name.partition(SEPARATOR)[0]: None for name in resources if SEPARATOR in name}
        self._members = {scope: _Redirection(resources_for(scope, resources), rollout) for scope in scopes}
        # A proxy takes no calls where there is no attempt to record them under.
        is_attempt = isinstance(rollout, AttemptedRollout)
        endpoints = {
            name: _Endpoint(llm, rollout)
            for name, llm in resources.items()
            if SEPARATOR not in name and isinstance(llm, LLM) and (is_attempt or not isinstance(llm, ProxyLLM))
        }
        self._taking = {name: endpoint for name, endpoint in endpoints.items() if _takes_calls(endpoint.llm)}
        self._known: list[_Endpoint] = [*endpoints.values()]
        for member in self._members.values():
            self._known += member._known
        self.takes_calls: bool = bool(self._taking) or any(member.takes_calls for member in self._members.values())

    def excludes(self, request: ModelRequest) -> bool:
        """Whether a call without a target is left alone, and not one that goes where it belongs already."""
        return not any(endpoint.has(request) for endpoint in self._known)

    def __call__(self, request: ModelRequest) -> Target | None:
        member = self._members.get(current_agent() or "") if self._members else None
        if member is not None:
            return member(request)
        if not self.excludes(request):
            return None
        endpoint = self._endpoint_for(request)
        return None if endpoint is None or endpoint.excludes(request) else endpoint.target(request)

    def _endpoint_for(self, request: ModelRequest) -> _Endpoint | None:
        taking = self._taking
        same = {name: endpoint for name, endpoint in taking.items() if endpoint.llm.model == request.model}
        if same:
            return same.get(MAIN_LLM) or next(iter(same.values()))
        is_excluded = any(endpoint.excludes(request) for endpoint in taking.values())
        dialect = dialect_of(request.path, PATHS)
        if dialect is not None and not dialect.limit_fields:
            if taking and not is_excluded and request.provider is None:
                warn_once(
                    f"An embedding of the model '{request.model}' is not redirected, because none of the resources has "
                    "this model; if it is to go where its client sends it, give the LLM "
                    f"redirect_exclude=['{request.model}']."
                )
            return None
        if len(taking) == 1:
            return next(iter(taking.values()))
        if taking and MAIN_LLM not in taking and not is_excluded:
            warn_once(
                f"A call of the model '{request.model}' is not redirected, because several of the resources could take "
                f"it: {', '.join(taking)}. Call one of them '{MAIN_LLM}', ask for the model of one, or give the others "
                "redirect=False."
            )
        return taking.get(MAIN_LLM)
