"""Resources: what an algorithm publishes and an agent uses — model endpoints and prompts, by name and version.

An attempt has keys of its own. The LLM proxy has a secret; an agent gets a key that is derived from it. The key says
whose calls it pays for, so that clients that cannot take a path are told apart by it, and the signature says that the
secret's holder made it. Nothing is stored: whoever has the secret can make the key again, or read it.

A key is `agl-attempt-<names>.<signature>`, both base64url without padding: the names are the JSON list
`[rollout_id, attempt_id, agent]`, the signature is the HMAC-SHA-256 of everything before the full stop.

One agent among several sees its own resources, and for the rest those of everybody. A name such as `writer/llm` belongs
to the agent `writer`, which sees it as `llm`; a name without a scope is a default for all. An agent's own entry takes
the place of the default of its name. What an `LLM` of its own leaves open is taken from the default: an empty
`endpoint` or `model`, and single sampling parameters. So

    {
        "llm": LLM(endpoint=url, model="large"),
        "critic/llm": LLM(endpoint="", model="", sampling_parameters={"temperature": 0}),
    }

gives the critic the same model at another temperature.

An agent may be *pinned* to resources of a certain id, while others follow what is published: by the rollout's metadata,
`{"pinned_resources": {"critic": "rs-1f2e"}}`. It then sees these resources and no others, defaults included.
"""

import base64
import binascii
import hashlib
import hmac
import json
import logging
import re
import string
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeGuard
from urllib.parse import quote

from pydantic import BaseModel, Field, PrivateAttr, model_serializer

from agentlightning.env_var import LightningEnvVar, resolve_bool_env_var
from agentlightning.errors import ConfigurationError, TemplateNotAllowed
from agentlightning.types.core import Rollout
from agentlightning.utils.poml_markup import render_poml

if TYPE_CHECKING:
    from agentlightning.types.core import AttemptedRollout

__all__ = ["Resource", "LLM", "ProxyLLM", "PromptTemplate", "ResourceUnion", "NamedResources", "ResourcesUpdate"]

logger = logging.getLogger(__name__)


PROXY_SECRET_PREFIX: Final = "agl-proxy-"
"""An API key that begins so is the secret of a proxy, and is not given to agents."""
PROXY_REFERENCE_PREFIX: Final = "agl-proxyref-"
"""An API key that begins so stands for the secret of a proxy where the secret is not shown; it opens nothing."""
ATTEMPT_KEY_PREFIX: Final = "agl-attempt-"
_NAMES: Final = 3


@dataclass(frozen=True)
class AttemptKey:
    """Whom a key was made for."""

    rollout_id: str
    attempt_id: str
    agent: str | None = None
    """One of several agents of the attempt; None stands for all of it."""


def derive_attempt_key(secret: str, rollout_id: str, attempt_id: str, agent: str | None = None) -> str:
    """The same key for the same names, every time."""
    names = json.dumps([rollout_id, attempt_id, agent], ensure_ascii=False, separators=(",", ":"))
    signed = ATTEMPT_KEY_PREFIX + _as_base64(names.encode("utf-8", "surrogatepass"))
    return f"{signed}.{_signature(secret, signed)}"


def read_attempt_key(secret: str, key: str) -> AttemptKey | None:
    """Whom a key was made for; None if it is none, or was not made with this secret."""
    # Characters; what is longer is no key, and is not looked at.
    if not key.startswith(ATTEMPT_KEY_PREFIX) or len(key) > 4096 or not key.isascii():
        return None
    signed, _, signature = key.rpartition(".")
    if not hmac.compare_digest(signature, _signature(secret, signed)):
        return None
    try:
        encoded = signed.removeprefix(ATTEMPT_KEY_PREFIX)
        decoded = base64.b64decode(encoded + "=" * (-len(encoded) % 4), altchars=b"-_", validate=True)
        names = json.loads(decoded.decode("utf-8", "surrogatepass"))
    except (binascii.Error, ValueError):  # signed with this secret, but by someone who writes other keys
        return None
    if not isinstance(names, list) or len(names) != _NAMES:
        return None
    rollout_id, attempt_id, agent = names
    if not isinstance(rollout_id, str) or not isinstance(attempt_id, str) or not isinstance(agent, str | None):
        return None
    return AttemptKey(rollout_id, attempt_id, agent)


def _signature(secret: str, signed: str) -> str:
    return _as_base64(hmac.digest(secret.encode(), signed.encode(), hashlib.sha256))


def _as_base64(value: bytes) -> str:
    return base64.urlsafe_b64encode(value).decode().rstrip("=")


MAX_WIDTH: Final = 10_000
"""The largest width or precision of a placeholder."""
_STEP: Final = re.compile(r"[.\[\]]+")
_NUMBER: Final = re.compile(r"\d+")
_OF_THE_INTERPRETER: Final = frozenset(
    f"{kind}_{part}" for kind in ("ag", "cr", "gi", "tb") for part in ("await", "code", "frame", "yieldfrom")
) | {"f_back", "f_builtins", "f_code", "f_globals", "f_locals", "mro"}
"""Attributes of generators, frames and classes that lead out of a value, as Jinja's sandbox knows them."""


class Resource(BaseModel):
    """Anything tunable that a rollout is given."""

    resource_type: Any


class LLM(Resource):
    """A model behind an OpenAI-compatible endpoint."""

    resource_type: Literal["llm"] = "llm"
    endpoint: str
    model: str
    api_key: str | None = None
    sampling_parameters: dict[str, Any] = Field(default_factory=dict)
    redirect: bool | None = None
    """Whether model calls that an agent makes with clients of its own are sent here while it runs, with the sampling
    parameters written over theirs; None does so for a `ProxyLLM` alone."""
    redirect_exclude: list[str] = Field(default_factory=list)
    """Models whose calls are not sent here, by the name that is asked for: patterns such as `gpt-*` or
    `text-embedding-*`."""

    @model_serializer(mode="wrap")
    def _without_defaults(self, serialize):  # type: ignore[no-untyped-def] # an annotation would replace the JSON schema
        """Without what is left open, which the releases that came before do not know."""
        written = serialize(self)
        for name in ("redirect", "redirect_exclude", "run_id"):
            if written.get(name) in (None, []):
                written.pop(name, None)
        return written

    def get_base_url(self, *args: object, **kwargs: object) -> str:
        """The URL an SDK client takes; arguments are ignored here, so that callers need not know the kind of LLM."""
        return self.endpoint


class ProxyLLM(LLM):
    """A model behind the LLM proxy, which records calls under the rollout and attempt named in the URL."""

    resource_type: Literal["proxy_llm"] = "proxy_llm"  # type: ignore[assignment] # narrows the discriminator, as pydantic wants
    run_id: str | None = None
    """The run that serves it, with which it ends; None for a model that nobody's run serves."""
    _initialized: bool = PrivateAttr(default=False)

    def model_post_init(self, context: Any, /) -> None:
        self._initialized = True

    def get_base_url(self, rollout_id: str | None, attempt_id: str | None) -> str:  # type: ignore[override] # SPEC 2.2: both are required here
        """The endpoint for one attempt: its path carries both ids, before a trailing `/v1`."""
        endpoint = str(self.__dict__["endpoint"])
        if rollout_id is None and attempt_id is None:
            return endpoint
        if not (isinstance(rollout_id, str) and isinstance(attempt_id, str)):
            raise ValueError(
                f"rollout_id and attempt_id must be strings or all be empty, not {rollout_id!r} and {attempt_id!r}."
            )
        root = endpoint.removesuffix("/")
        suffix = "/v1" if root.endswith("/v1") else ""
        place = f"/rollout/{quote(rollout_id, safe='')}/attempt/{quote(attempt_id, safe='')}"
        return root.removesuffix(suffix) + place + suffix

    def get_api_key(self, rollout_id: str, attempt_id: str) -> str | None:
        """The key for one attempt: made of `api_key` where that is the proxy's secret, which no agent is to see."""
        key = self.api_key
        if key is not None and key.startswith(PROXY_REFERENCE_PREFIX):
            raise ConfigurationError(
                f"The key of attempt '{attempt_id}' for the LLM proxy at {self.__dict__['endpoint']} did not come with "
                "its claim; run what is claimed from the queue with the resources that the agent is given, or give the "
                "runner the store's master token."
            )
        if key is None or not key.startswith(PROXY_SECRET_PREFIX):
            return key
        return derive_attempt_key(key, rollout_id, attempt_id)

    def with_attempted_rollout(self, rollout: "AttemptedRollout") -> LLM:
        """A plain LLM whose endpoint and key are bound to this attempt."""
        rollout_id, attempt_id = rollout.rollout_id, rollout.attempt.attempt_id
        return LLM(
            endpoint=self.get_base_url(rollout_id, attempt_id),
            model=self.model,
            sampling_parameters=self.sampling_parameters,
            api_key=self.get_api_key(rollout_id, attempt_id),
        )


def _read_endpoint(llm: ProxyLLM) -> str:
    if llm._initialized:
        logger.warning(
            "Accessing 'endpoint' directly on ProxyLLM is discouraged; "
            "use get_base_url(rollout_id, attempt_id) so that calls are recorded under their attempt."
        )
    return str(llm.__dict__["endpoint"])


def _write_endpoint(llm: ProxyLLM, value: str) -> None:
    llm.__dict__["endpoint"] = value


# A property over the field's own storage: pydantic reads and writes `__dict__`, users come through here.
setattr(ProxyLLM, "endpoint", property(_read_endpoint, _write_endpoint))  # noqa: B010 # a plain assignment is typed as a field


class _FStringFormatter(string.Formatter):
    """`str.format`, without the ways out of the values that it offers.

    An optimiser's model may have written the template. `str.format` follows attributes to the globals of a module, and
    fills up to any width; this does neither.
    """

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        for step in _STEP.split(field_name)[1:]:
            if step.startswith("_") or step in _OF_THE_INTERPRETER:
                raise TemplateNotAllowed(
                    f"The template asks for '{step}' in '{{{field_name}}}'; names that begin with an underscore, and "
                    "those of frames, are not for templates: pass what the prompt needs as a value of its own."
                )
        return super().get_field(field_name, args, kwargs)

    def get_value(self, key: int | str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if isinstance(key, str) and key not in kwargs:
            raise KeyError(f"The template has no value for '{{{key}}}'; format got {', '.join(kwargs) or 'none'}.")
        return super().get_value(key, args, kwargs)

    def format_field(self, value: Any, format_spec: str) -> Any:
        for number in _NUMBER.findall(format_spec):
            if len(number) > len(str(MAX_WIDTH)) or int(number) > MAX_WIDTH:
                raise TemplateNotAllowed(
                    f"The template formats a value with ':{format_spec:.40}'; {MAX_WIDTH} is the largest width or "
                    "precision."
                )
        return super().format_field(value, format_spec)


class PromptTemplate(Resource):
    """A prompt with placeholders."""

    resource_type: Literal["prompt_template"] = "prompt_template"
    template: str
    engine: Literal["jinja", "f-string", "poml"]
    _is_from_store: bool = PrivateAttr(default=False)
    """Whether others may have written it: a POML template, which can run code, is then filled only where allowed."""

    def __eq__(self, other: object) -> bool:
        """Where a template comes from is no part of what it says."""
        return type(self) is type(other) and self.__dict__ == other.__dict__

    def format(self, **kwargs: Any) -> str:
        """Fill the placeholders; one without a value is an error in every engine.

        TemplateNotAllowed for a POML template that came out of a store, unless AGL_ALLOW_POML or the runner allows it.
        """
        if self.engine == "f-string":
            return _FStringFormatter().vformat(self.template, (), kwargs)
        if self.engine == "jinja":
            try:
                from agentlightning.types.jinja_sandbox import render_jinja
            except ImportError as error:
                raise ImportError("Jinja prompt templates need jinja2: pip install jinja2") from error
            return render_jinja(self.template, kwargs)
        if self._is_from_store and not resolve_bool_env_var(LightningEnvVar.AGL_ALLOW_POML, fallback=False):
            raise TemplateNotAllowed(
                "This POML template came out of a store, and templates are code; where everybody who writes to the "
                "store may run code, allow it with AGL_ALLOW_POML=1, Trainer(allow_poml=True) or agl runner "
                "--allow-poml."
            )
        return render_poml(self.template, kwargs)

    def with_origin(self, *, is_from_store: bool) -> "PromptTemplate":
        """A copy that counts as out of a store, or as the program's own."""
        copy = self.model_copy()
        copy._is_from_store = is_from_store
        return copy


ResourceUnion = Annotated[LLM | ProxyLLM | PromptTemplate, Field(discriminator="resource_type")]
NamedResources = dict[str, ResourceUnion]


class ResourcesUpdate(BaseModel):
    """A published set of resources."""

    resources_id: str
    resources: NamedResources
    create_time: float = Field(default_factory=time.time)
    update_time: float = Field(default_factory=time.time)
    version: int = 1
    """How often this id was written, starting at 1."""

    def model_post_init(self, context: Any, /) -> None:
        """Stores answer with this: the templates in it come out of one."""
        self.resources = _with_origin(self.resources, lambda template: True)


@dataclass
class TrustedTemplates:
    """Which POML templates out of a store count as the program's own."""

    allow_all: bool = False
    _texts: set[str] = field(default_factory=set)

    def add(self, resources: NamedResources | None) -> None:
        """Trust the templates that the program itself gave, and did not take from a store before."""
        given = (resources or {}).values()
        self._texts |= {one.template for one in given if _is_poml(one) and not one._is_from_store}

    def apply(self, resources: NamedResources) -> NamedResources:
        """The resources as an agent gets them."""
        return _with_origin(resources, lambda template: not self.allow_all and template not in self._texts)


def _is_poml(resource: Resource) -> TypeGuard[PromptTemplate]:
    return isinstance(resource, PromptTemplate) and resource.engine == "poml"


def _with_origin(resources: NamedResources, is_from_store: Callable[[str], bool]) -> NamedResources:
    if not any(_is_poml(one) for one in resources.values()):
        return resources
    return {
        name: one.with_origin(is_from_store=is_from_store(one.template)) if _is_poml(one) else one
        for name, one in resources.items()
    }


PINNED_RESOURCES: Final = "pinned_resources"
"""Key of a rollout's metadata: ids of resources by names of agents."""
SEPARATOR: Final = "/"
"""Between the name of an agent and that of its resource."""


def resources_for(agent_name: str | None, resources: NamedResources) -> NamedResources:
    """What an agent sees, its own entries first; None, an agent without a name, sees the defaults alone."""
    defaults = {name: resource for name, resource in resources.items() if SEPARATOR not in name}
    if agent_name is None or len(defaults) == len(resources):
        return defaults
    scope = agent_name + SEPARATOR
    own = {name.removeprefix(scope): resource for name, resource in resources.items() if name.startswith(scope)}
    completed = {name: _completed(agent_name, name, resource, defaults.get(name)) for name, resource in own.items()}
    return {**completed, **{name: resource for name, resource in defaults.items() if name not in own}}


def scoped_to(agent_name: str | None, resources: NamedResources) -> NamedResources:
    """The resources as an agent gets them: its own under their plain names, those of other scopes as they are.

    An agent may itself be a team, whose members get theirs by `resources_for(member, resources)`.
    """
    if agent_name is None or not any(SEPARATOR in name for name in resources):
        return resources
    scope = agent_name + SEPARATOR
    others = {n: resource for n, resource in resources.items() if SEPARATOR in n and not n.startswith(scope)}
    return {**resources_for(agent_name, resources), **others}


def pinned_id(agent_name: str, rollout: Rollout) -> str | None:
    """The resources that a rollout pins an agent to; None if it does not."""
    pins: object = (rollout.metadata or {}).get(PINNED_RESOURCES, {})
    pinned_to = pins.get(agent_name) if isinstance(pins, Mapping) else pins
    if not isinstance(pins, Mapping) or not isinstance(pinned_to, str | None):
        raise ConfigurationError(
            f"The metadata '{PINNED_RESOURCES}' of rollout '{rollout.rollout_id}' must give ids of resources by names "
            f"of agents, for example {{'critic': 'rs-1f2e'}}; it is {pins!r}."
        )
    return pinned_to


def check_agent_name(name: object) -> None:
    """Refuse a name that cannot be a scope."""
    if not isinstance(name, str) or not name or SEPARATOR in name:
        raise ConfigurationError(
            f"An agent cannot be called {name!r}: its name must be a text that is not empty, and '{SEPARATOR}' "
            "separates it from those of its resources."
        )


def _completed(agent_name: str, name: str, own: ResourceUnion, default: ResourceUnion | None) -> ResourceUnion:
    """An agent's own entry, with what it leaves open taken from the default."""
    if not isinstance(own, LLM):
        return own
    endpoint = str(vars(own)["endpoint"])  # read as an attribute, that of a ProxyLLM warns
    if not isinstance(default, LLM):
        if not endpoint or not own.model:
            raise ConfigurationError(
                f"The LLM '{agent_name}{SEPARATOR}{name}' leaves its endpoint or its model to the default, and there "
                f"is no LLM called '{name}'; publish one, or name both."
            )
        return own
    sampling = {**default.sampling_parameters, **own.sampling_parameters}
    model = own.model or default.model
    if endpoint:  # the default's key is for the default's endpoint alone
        return own.model_copy(update={"model": model, "sampling_parameters": sampling})
    changes: dict[str, object] = {"model": model, "sampling_parameters": sampling}
    changes["api_key"] = default.api_key if own.api_key is None else own.api_key
    changes["redirect"] = default.redirect if own.redirect is None else own.redirect
    changes["redirect_exclude"] = own.redirect_exclude or default.redirect_exclude
    return default.model_copy(update=changes)
