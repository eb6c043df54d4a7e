"""Entries of a model list, in LiteLLM's form, read with pydantic and made into backends.

The prefix of `litellm_params.model` names the provider, one of `_PROVIDERS`; a provider with a protocol of its own runs
behind `litellm --port`, and is named by that address. What an entry leaves open comes from the environment variables
that LiteLLM reads for the provider. A mistake in the list is an error at once, not with the first call.
"""

import base64
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

import yarl
from pydantic import AfterValidator, BaseModel, Field, ValidationError

from agentlightning.dialects import DialectName
from agentlightning.errors import ConfigurationError
from agentlightning.llm_proxy.backends.backend import WILDCARD, Backend, Provider

OPENAI_URL: Final = "https://api.openai.com/v1"
ANTHROPIC_URL: Final = "https://api.anthropic.com/v1"
ANTHROPIC_VERSION: Final = "2023-06-01"
AZURE_API_VERSION: Final = "2024-10-21"
ENVIRONMENT_PREFIX: Final = "os.environ/"
SHORTEST_SECRET: Final = 6
"""Anything shorter occurs in ordinary text too and protects nothing."""
_FORM: Final = '{"model_name": "name", "litellm_params": {"model": "provider/model", "api_base": "http://..."}}'
_SETTINGS: Final = frozenset(
    {
        *("model", "api_base", "base_url", "api_key", "api_version", "custom_llm_provider", "organization"),
        *("weight", "rpm", "tpm", "max_parallel_requests", "timeout", "request_timeout", "stream_timeout"),
        *("extra_headers", "default_headers", "headers", "extra_body", "input_cost_per_token", "output_cost_per_token"),
        *("input_cost_per_second", "output_cost_per_second", "version", "resources_id", "model_info", "litellm_params"),
        *("max_retries", "num_retries", "cooldown_time", "tags", "order", "drop_params", "additional_drop_params"),
        *("allowed_openai_params", "max_budget", "budget_duration", "use_in_pass_through", "use_litellm_proxy"),
        *("litellm_credential_name", "configurable_clientside_auth_params", "merge_reasoning_content_in_choices"),
        *("azure_ad_token", "tenant_id", "client_id", "client_secret", "region_name", "ssl_verify", "mock_response"),
    }
)
"""What LiteLLM reads itself; the rest of `litellm_params` are fields of the request."""
_SHARED_FIELDS: Final = (
    *("weight", "max_parallel_requests", "rpm", "tpm", "timeout", "input_cost_per_token", "output_cost_per_token"),
    *("version", "resources_id"),
)
"""What may stand in `litellm_params`, in the entry itself or in `model_info`."""
_INFO_FIELDS: Final = ("gives_token_ids", "gives_logprobs", "dialects", "health_path", "overrides")
"""What may stand in `model_info` alone."""
_OPENAI_ALIKE: Final = frozenset({"openai_like", "custom_openai", "litellm_proxy", "lm_studio", "llamafile"})
"""Prefixes of servers that speak as OpenAI does, wherever they are."""


@dataclass(frozen=True)
class _ProviderDefaults:
    """What holds for a provider's servers where an entry does not say otherwise."""

    dialects: tuple[DialectName, ...]
    key_variable: str = ""
    address_variables: tuple[str, ...] = ()
    address: str | None = None
    gives_token_ids: bool | None = False
    gives_logprobs: bool = False


_OPENAI_DIALECTS: Final[tuple[DialectName, ...]] = ("chat", "completions", "responses", "embeddings")
# Trained servers give token ids and log-probabilities with chats alone, so responses are translated into those, also
# where the server has an endpoint for them.
_TRAINED: Final = _ProviderDefaults(("chat", "completions", "embeddings"), gives_token_ids=True, gives_logprobs=True)
_VLLM: Final = _ProviderDefaults(
    _TRAINED.dialects, "HOSTED_VLLM_API_KEY", ("HOSTED_VLLM_API_BASE",), gives_token_ids=True, gives_logprobs=True
)
_OPENAI_ADDRESS: Final = ("OPENAI_BASE_URL", "OPENAI_API_BASE")
_PROVIDERS: Final[Mapping[Provider, _ProviderDefaults]] = {
    "openai": _ProviderDefaults(_OPENAI_DIALECTS, "OPENAI_API_KEY", _OPENAI_ADDRESS, OPENAI_URL, gives_token_ids=None),
    "text-completion-openai": _ProviderDefaults(("completions",), "OPENAI_API_KEY", _OPENAI_ADDRESS, OPENAI_URL),
    "hosted_vllm": _VLLM,
    "vllm": _VLLM,
    "agl": _TRAINED,
    "anthropic": _ProviderDefaults(
        ("messages",), "ANTHROPIC_API_KEY", ("ANTHROPIC_BASE_URL", "ANTHROPIC_API_BASE"), ANTHROPIC_URL
    ),
    "azure": _ProviderDefaults(_OPENAI_DIALECTS, "AZURE_API_KEY", ("AZURE_API_BASE",)),
}


def _single_line(text: str) -> str:
    if any(character in text for character in "\r\n\0"):
        raise ValueError("must be of one line")
    return text


_HeaderText = Annotated[str, Field(coerce_numbers_to_str=True), AfterValidator(_single_line)]
_Headers = dict[_HeaderText, _HeaderText]


class ModelParameters(BaseModel):
    """What the proxy reads of `litellm_params`; other fields are defaults of requests."""

    model: Annotated[str, Field(min_length=1)]
    api_base: str | None = None
    base_url: str | None = None
    api_key: str | None = None
    api_version: str | None = None
    azure_ad_token: str | None = None
    organization: str | None = None
    custom_llm_provider: str | None = None
    default_headers: _Headers | None = None
    headers: _Headers | None = None
    extra_headers: _Headers | None = None
    extra_body: dict[str, Any] | None = None


def backend_of(entry: object, number: int) -> Backend:
    """The backend an entry describes; `number` is its position in the model list."""
    place = f"Entry {number} of the model list"
    if not isinstance(entry, Mapping) or not isinstance(entry.get("litellm_params"), Mapping):
        raise ConfigurationError(f"{place} is no mapping with litellm_params; the form is {_FORM}.")
    name = entry.get("model_name")
    place += f" ('{name}')" if isinstance(name, str) else ""
    try:
        return _backend(entry, number, place)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        raise ConfigurationError(f"{place}: {field}: {first['msg']}; the form is {_FORM}.") from None


def _backend(entry: Mapping[str, Any], number: int, place: str) -> Backend:
    parameters = _resolved(dict(entry["litellm_params"]), place)
    params = ModelParameters.model_validate({name: value for name, value in parameters.items() if value != ""})
    info = entry.get("model_info") or {}
    if not isinstance(info, Mapping):
        raise ConfigurationError(f"{place}: model_info must be a mapping.")
    provider, model = _provider_of(params, place)
    known = _PROVIDERS[provider]
    base_url, userinfo = _address_of(params, provider, place)
    api_key = params.api_key or os.environ.get(known.key_variable) or None
    auth = _auth_headers(params, provider, api_key) or userinfo
    own = {**(params.default_headers or {}), **(params.headers or {}), **(params.extra_headers or {})}
    given = {header.lower() for header in own}
    headers = {header: value for header, value in auth.items() if header.lower() not in given} | own
    defaults = {field: value for field, value in parameters.items() if field not in _SETTINGS and value is not None}
    is_openai = provider == "openai" and yarl.URL(base_url).host == yarl.URL(OPENAI_URL).host
    settings: dict[str, Any] = {
        # OpenAI itself gives no token ids; servers that speak like it may.
        "gives_token_ids": False if is_openai else known.gives_token_ids,
        "gives_logprobs": known.gives_logprobs,
        "dialects": known.dialects,
    }
    settings |= {field: info[field] for field in _INFO_FIELDS if field in info}
    for holder in (info, entry, parameters):  # the last wins
        settings |= {field: holder[field] for field in _SHARED_FIELDS if holder.get(field) is not None}
    return Backend(
        name=f"{entry.get('model_name')}#{number} at {base_url}",
        model_name=entry.get("model_name") or "",
        provider=provider,
        model=model,
        base_url=base_url,
        headers=headers,
        defaults={**defaults, **(params.extra_body or {})},
        api_version=_azure_version(params, base_url) if provider == "azure" else None,
        secrets=_secrets_of(api_key, {**auth, **headers}),
        **settings,
    )


def _resolved(parameters: dict[str, object], place: str) -> dict[str, object]:
    """The parameters, those of the form `os.environ/NAME` taken from the environment."""
    resolved: dict[str, object] = {}
    for name, value in parameters.items():
        if isinstance(value, Mapping) and name.endswith("headers"):
            value = _resolved(dict(value), place)
        elif isinstance(value, str) and value.startswith(ENVIRONMENT_PREFIX):
            variable = value.removeprefix(ENVIRONMENT_PREFIX)
            if variable not in os.environ:
                raise ConfigurationError(
                    f"{place}: litellm_params.{name} is '{value}', but {variable} is not set in the environment."
                )
            value = os.environ[variable]
        resolved[name] = value
    return resolved


def _provider_of(params: ModelParameters, place: str) -> tuple[Provider, str]:
    """The provider and its name of the model."""
    given = params.custom_llm_provider
    prefix, slash, rest = params.model.partition("/")
    if given is not None:
        rest = rest if slash and prefix == given else params.model
        return _served_provider(given, place), rest
    if slash and prefix in _PROVIDERS:
        if not rest:
            raise ConfigurationError(f"{place}: litellm_params.model must be provider/model, as in 'openai/gpt-4.1'.")
        return _served_provider(prefix, place), rest
    if params.model.startswith("claude-") and not slash:
        return "anthropic", params.model
    if params.api_base or params.base_url:
        # An unknown prefix is a part of the name, as model servers give it.
        return "openai", rest if prefix in _OPENAI_ALIKE and rest else params.model
    if params.model == WILDCARD:
        raise ConfigurationError(
            f"{place}: litellm_params.model is '*'; accepted is a provider in front, as in 'openai/*', or an api_base."
        )
    return (_served_provider(prefix, place) if slash else "openai"), params.model


def _served_provider(name: str, place: str) -> Provider:
    """The provider of this name; ConfigurationError with the ways to another."""
    for provider in _PROVIDERS:
        if provider == name:
            return provider
    raise ConfigurationError(
        f"{place} names the provider '{name}', whose protocol the proxy does not speak; name its address that speaks "
        "OpenAI's, with a model 'openai/NAME' and its api_base, or run `litellm --port 4000` before it and name that."
    )


def _address_of(params: ModelParameters, provider: Provider, place: str) -> tuple[str, dict[str, str]]:
    """The base URL, and the header for a user and password that stood in it."""
    known = _PROVIDERS[provider]
    from_environment = (os.environ[variable] for variable in known.address_variables if os.environ.get(variable))
    text = params.api_base or params.base_url or next(from_environment, known.address)
    if text is None:
        named = "".join(f", or {variable} in the environment" for variable in known.address_variables)
        raise ConfigurationError(
            f"{place} has no address: '{provider}/...' needs litellm_params.api_base, as in "
            f"'http://localhost:8000/v1'{named}."
        )
    try:
        url = yarl.URL(text)
    except ValueError:
        url = yarl.URL()
    if url.scheme not in ("http", "https") or not url.host:  # the value itself may hold a password
        raise ConfigurationError(f"{place}: litellm_params.api_base must be http://host:port/v1 or https://host/v1.")
    userinfo = {}
    if url.user is not None:
        pair = base64.b64encode(f"{url.user}:{url.password or ''}".encode()).decode("ascii")
        userinfo = {"Authorization": f"Basic {pair}"}
        url = url.with_user(None)
    base_url = str(url.with_query(None).with_fragment(None)).rstrip("/")
    if provider == "anthropic":
        base_url = base_url.removesuffix("/messages").removesuffix("/v1") + "/v1"
    return base_url, userinfo


def _auth_headers(params: ModelParameters, provider: Provider, api_key: str | None) -> dict[str, str]:
    headers = {}
    if provider == "anthropic":
        headers["anthropic-version"] = ANTHROPIC_VERSION
    if provider == "azure" and api_key is None and params.azure_ad_token:
        headers["Authorization"] = f"Bearer {params.azure_ad_token}"
    if api_key is not None:
        header = {"anthropic": "x-api-key", "azure": "api-key"}.get(provider, "Authorization")
        headers[header] = api_key if header != "Authorization" else f"Bearer {api_key}"
    if params.organization:
        headers["OpenAI-Organization"] = params.organization
    return headers


def _azure_version(params: ModelParameters, base_url: str) -> str | None:
    if base_url.endswith("/openai/v1"):
        return None
    return params.api_version or os.environ.get("AZURE_API_VERSION") or AZURE_API_VERSION


def _secrets_of(api_key: str | None, headers: Mapping[str, str]) -> tuple[str, ...]:
    """Longest first, so that a part of one does not keep the rest of it in sight."""
    texts = {api_key or "", *headers.values()}
    texts |= {text.partition(" ")[2] for text in texts if text.startswith(("Bearer ", "Basic "))}
    secrets = [text for text in texts - {ANTHROPIC_VERSION} if len(text) >= SHORTEST_SECRET]
    return tuple(sorted(secrets, key=lambda text: (-len(text), text)))
