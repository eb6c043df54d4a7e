"""A backend of the proxy: its address, its dialects, its limits; and the errors of calls to backends.

`Backend` is a value that validates its fields. It holds keys, since calls are sent with them, and never shows them.
Every error is a `ProxyError` with the HTTP status that the caller gets. Error messages name backends and models, never
keys.

Backends are made of the entries of a model list, in LiteLLM's form, which are read with pydantic. The prefix of
`litellm_params.model` names the provider, one of `_PROVIDERS`; a provider with a protocol of its own runs behind
`litellm --port`, and is named by that address. What an entry leaves open comes from the environment variables that
LiteLLM reads for the provider. A mistake in the list is an error at once, not with the first call.
"""

import base64
import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Annotated, Any, ClassVar, Final, Literal, NamedTuple

import yarl
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictBool, ValidationError
from pydantic.dataclasses import dataclass

from agentlightning.dialects import ANTHROPIC_DIALECTS, DIALECTS, OPENAI_DIALECTS, Dialect, TranslatedDialect
from agentlightning.errors import ConfigurationError, ProxyError

Provider = Literal["openai", "hosted_vllm", "vllm", "text-completion-openai", "anthropic", "azure", "agl"]

WILDCARD: Final = "*"
DEFAULT_TIMEOUT_SECONDS: Final = 600.0
_AZURE_DEPLOYMENTS: Final = "/openai/deployments/"
_PLAIN_NAME: Final = re.compile(r"(?!.*(\.\.|//))\w[\w.:@+/-]*", re.ASCII | re.IGNORECASE)


class Try(NamedTuple):
    """One request that was sent, or was meant to be sent, for a call."""

    backend: str
    outcome: str


class BackendError(ProxyError):
    """A call that no backend answered."""

    http_status: ClassVar[int] = 502

    def __init__(self, message: str, *, tries: Sequence[Try] = (), retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.tries = list(tries)
        self.retry_after_seconds = retry_after_seconds


class UnknownModel(BackendError):
    """No backend serves a model of this name."""

    http_status = 404


class VersionNotServed(BackendError):
    """The model is served, but not for the resources of the call."""

    http_status = 409


class DialectNotServed(BackendError):
    """The backend does not speak the caller's dialect, and no translation leads there."""

    http_status = 400


class BackendUnavailable(BackendError):
    """No backend of the model can be reached or accepts the call."""

    http_status = 503


class DeadlineExceeded(BackendError):
    """The call's deadline passed before a response began."""

    http_status = 504


class BackendBroken(BackendError):
    """A response that began and did not come to its end."""


def _known_dialect(name: str) -> str:
    if name not in DIALECTS:
        raise ValueError(f"there is no dialect '{name}'; known are {', '.join(DIALECTS)}")
    return name


_DialectName = Annotated[str, AfterValidator(_known_dialect)]
_Limit = Annotated[int, Field(ge=1)]
_Label = Annotated[str, Field(coerce_numbers_to_str=True)]
_Cost = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True, config=ConfigDict(hide_input_in_errors=True))
class Backend:
    """One server that serves one model name."""

    name: str = field(compare=False)
    """Unique in its model list: `model#position at address`."""
    model_name: Annotated[str, Field(pattern=r"^[^*]*\*?[^*]*$", min_length=1)]
    """The name in callers' requests; may hold one wildcard."""
    provider: Provider
    model: str
    """The server's own name of the model; the deployment on Azure."""
    base_url: str
    """Without a slash at the end."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False, hash=False)
    """Sent with every call, the key among them."""
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Its share of the calls, relative to the other backends of the model."""
    max_parallel_requests: _Limit | None = None
    rpm: _Limit | None = None
    """Calls that may start within any minute."""
    tpm: _Limit | None = None
    """Tokens that may be used within any minute."""
    timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] = DEFAULT_TIMEOUT_SECONDS
    """Seconds of silence allowed, before the first byte and between two."""
    version: _Label | None = None
    """Version of the served model; written on each call, unless the server reports its own."""
    resources_id: _Label | None = None
    """Version of the resources this backend belongs to; None serves any."""
    defaults: Mapping[str, Any] = field(default_factory=dict, repr=False, hash=False)
    """Request fields for calls that do not set them."""
    overrides: Mapping[_Label, Mapping[str, Any]] = field(default_factory=dict, repr=False, hash=False)
    """Request fields that replace the caller's, by the id of the rollout's resources; None removes a field."""
    input_cost_per_token: _Cost | None = None
    output_cost_per_token: _Cost | None = None
    gives_token_ids: StrictBool | None = False
    """Whether it returns token ids on request; None: the first call finds out."""
    gives_logprobs: StrictBool | None = False
    dialects: Annotated[tuple[_DialectName, ...], Field(min_length=1)] = ("chat",)
    """The dialects it speaks, best first."""
    api_version: str | None = None
    """On Azure, the version of the interface."""
    secrets: tuple[str, ...] = field(default=(), repr=False)
    """Every text of the entry that must not be shown."""

    def __str__(self) -> str:
        return self.name

    def is_updated_by(self, other: "Backend") -> bool:
        """Whether the other is this server with another version of the model, or another name for it."""
        return dataclasses.replace(self, version=other.version, model=other.model) == other

    def url_of(self, dialect: Dialect) -> str:
        """The address for calls in this dialect."""
        if self.provider != "azure" or self.api_version is None:  # Azure's interface without versions is as OpenAI's
            return self.base_url + dialect.path
        resource, _, deployment = self.base_url.partition(_AZURE_DEPLOYMENTS)
        if not dialect.is_below_deployment:
            return self._azure_url(f"{resource}/openai{dialect.path}")
        return self._azure_url(f"{resource}{_AZURE_DEPLOYMENTS}{deployment or self.model}{dialect.path}")

    def _azure_url(self, url: str) -> str:
        return url + str(yarl.URL.build(query={"api-version": self.api_version or ""}))

    def count_url(self, dialect: Dialect) -> str | None:
        """The address that counts the tokens of a request; None if the server has none."""
        if dialect.name in self.dialects and dialect.count_path is not None:
            return self.base_url + dialect.count_path
        # Providers whose servers have vLLM's `/tokenize`.
        return (
            self.base_url.removesuffix("/v1") + "/tokenize" if self.provider in {"hosted_vllm", "vllm", "agl"} else None
        )

    def serving(self, dialect: Dialect) -> Dialect:
        """The dialect to speak to this backend for a caller that speaks the given one."""
        if dialect.name in self.dialects:
            return dialect
        if isinstance(dialect, TranslatedDialect):
            for other in DIALECTS.values():
                if isinstance(other, TranslatedDialect) and other.name in self.dialects:
                    return other
        raise DialectNotServed(
            f"Backend '{self.name}' does not serve the {dialect} dialect; it speaks {', '.join(self.dialects)}."
        )

    def named(self, requested: str) -> "Backend":
        """The backend under the requested model name; the same unless it serves a pattern.

        Raises:
            UnknownModel: The name could lead elsewhere than to a model of the backend.
        """
        if WILDCARD not in self.model:
            return self
        before, _, after = self.model_name.partition(WILDCARD)
        middle = requested[len(before) : len(requested) - len(after)] if WILDCARD in self.model_name else requested
        if self.provider == "azure" and _PLAIN_NAME.fullmatch(middle) is None:
            raise UnknownModel(
                f"There is no model {requested[:200]!r}: for '{self.model_name}' stands a name of letters, digits and "
                "'_.:@+-/', without '//' and '..'; a model of another name needs an entry of its own."
            )
        return dataclasses.replace(self, model=self.model.replace(WILDCARD, middle, 1))

    def redacted(self, text: str) -> str:
        """The text without this backend's secrets."""
        for secret in self.secrets:
            text = text.replace(secret, "[redacted]")
        return text

    def redacted_bytes(self, body: bytes) -> bytes:
        """The same for bytes; the very same object if there is nothing to hide."""
        if not any(secret.encode() in body for secret in self.secrets):
            return body
        return self.redacted(body.decode("utf-8", "replace")).encode()


# ---------------------------------------------------------------------- entries of a model list


OPENAI_URL: Final = "https://api.openai.com/v1"
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
_INFO_FIELDS: Final = ("gives_token_ids", "gives_logprobs", "dialects", "overrides")
"""What may stand in `model_info` alone."""
_OPENAI_ALIKE: Final = frozenset({"openai_like", "custom_openai", "litellm_proxy", "lm_studio", "llamafile"})
"""Prefixes of servers that speak as OpenAI does, wherever they are."""


@dataclasses.dataclass(frozen=True)
class _ProviderDefaults:
    """What holds for a provider's servers where an entry does not say otherwise."""

    dialects: tuple[str, ...]
    key_variable: str = ""
    address_variables: tuple[str, ...] = ()
    address: str | None = None
    gives_token_ids: bool | None = False
    gives_logprobs: bool = False


_OPENAI_NAMES: Final = tuple(dialect.name for dialect in OPENAI_DIALECTS.values())
_ANTHROPIC_NAMES: Final = tuple(dialect.name for dialect in ANTHROPIC_DIALECTS.values())
# Trained servers give token ids and log-probabilities with chats alone, so responses are translated into those, also
# where the server has an endpoint for them.
_TRAINED: Final = _ProviderDefaults(("chat", "completions", "embeddings"), gives_token_ids=True, gives_logprobs=True)
_VLLM: Final = _ProviderDefaults(
    _TRAINED.dialects, "HOSTED_VLLM_API_KEY", ("HOSTED_VLLM_API_BASE",), gives_token_ids=True, gives_logprobs=True
)
_OPENAI_ADDRESS: Final = ("OPENAI_BASE_URL", "OPENAI_API_BASE")
_PROVIDERS: Final[Mapping[Provider, _ProviderDefaults]] = {
    "openai": _ProviderDefaults(_OPENAI_NAMES, "OPENAI_API_KEY", _OPENAI_ADDRESS, OPENAI_URL, gives_token_ids=None),
    "text-completion-openai": _ProviderDefaults(("completions",), "OPENAI_API_KEY", _OPENAI_ADDRESS, OPENAI_URL),
    "hosted_vllm": _VLLM,
    "vllm": _VLLM,
    "agl": _TRAINED,
    "anthropic": _ProviderDefaults(
        _ANTHROPIC_NAMES,
        "ANTHROPIC_API_KEY",
        ("ANTHROPIC_BASE_URL", "ANTHROPIC_API_BASE"),
        "https://api.anthropic.com/v1",
    ),
    "azure": _ProviderDefaults(_OPENAI_NAMES, "AZURE_API_KEY", ("AZURE_API_BASE",)),
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
