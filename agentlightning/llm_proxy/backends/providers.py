"""Entries of a model list, read as LiteLLM writes them and made into backends.

The prefix of `litellm_params.model` names the provider. Those in `_PROVIDERS` are spoken to by the proxy itself; any
other goes through the litellm library, if that is installed. What an entry leaves open comes from the environment
variables LiteLLM reads for the provider. Everything is settled when the backend is made, so that a mistake in the
list shows at once and not with the first call.
"""

import base64
import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, get_args

import yarl

from agentlightning.dialects import DialectName
from agentlightning.errors import ConfigurationError
from agentlightning.llm_proxy.backends.backend import (
    DEFAULT_TIMEOUT_SECONDS,
    SHORTEST_SECRET,
    WILDCARD,
    Backend,
    Provider,
)
from agentlightning.llm_proxy.backends.entry import Entry
from agentlightning.utils.installation import install_command

__all__ = ["Backend", "backend_of"]

OPENAI_URL: Final = "https://api.openai.com/v1"
ANTHROPIC_URL: Final = "https://api.anthropic.com/v1"
ANTHROPIC_VERSION: Final = "2023-06-01"
AZURE_API_VERSION: Final = "2024-10-21"
_OPENAI_DIALECTS: Final[tuple[DialectName, ...]] = ("chat", "completions", "responses", "embeddings")
_WITH_TOKEN_IDS: Final[tuple[DialectName, ...]] = ("chat", "completions", "embeddings")
"""Of servers that are trained. Their token ids and log-probabilities come with chats alone, so responses are translated
into those, also where the server has an endpoint for them."""
_OPENAI_ALIKE: Final = frozenset({"openai_like", "custom_openai", "litellm_proxy", "lm_studio", "llamafile"})
"""Prefixes of servers that speak as OpenAI does, wherever they are."""
_LIBRARY_PREFIXES: Final = frozenset(
    {
        *("ai21", "ai21_chat", "aiml", "amazon_nova", "anthropic_text", "azure_ai", "azure_text", "baseten", "bedrock"),
        *("cerebras", "clarifai", "cloudflare", "codestral", "cohere", "cohere_chat", "cometapi", "dashscope"),
        *("databricks", "datarobot", "deepinfra", "deepseek", "docker_model_runner", "featherless_ai", "fireworks_ai"),
        *("friendliai", "galadriel", "gemini", "gigachat", "github", "github_copilot", "gradient_ai", "groq"),
        *("heroku", "huggingface", "hyperbolic", "infinity", "jina_ai", "lambda_ai", "lemonade", "maritalk"),
        *("meta_llama", "minimax", "mistral", "moonshot", "morph", "nebius", "nlp_cloud", "novita", "nscale"),
        *("nvidia_nim", "oci", "ollama", "ollama_chat", "oobabooga", "openrouter", "ovhcloud", "perplexity", "petals"),
        *("predibase", "replicate", "sagemaker", "sagemaker_chat", "sambanova", "sap", "scaleway", "snowflake"),
        *("text-completion-codestral", "together_ai", "triton", "v0", "vercel_ai_gateway", "vertex_ai", "volcengine"),
        *("voyage", "wandb", "watsonx", "watsonx_text", "xai", "xinference", "zai"),
    }
)
"""Prefixes that are providers of the library even where an address is given, and not the first part of a name."""


@dataclass(frozen=True)
class _Provider:
    """How the servers of one provider are spoken to, where an entry does not say otherwise."""

    dialects: tuple[DialectName, ...]
    key_variables: tuple[str, ...] = ()
    address_variables: tuple[str, ...] = ()
    address: str | None = None
    gives_token_ids: bool | None = False
    gives_logprobs: bool = False


_VLLM: Final = _Provider(
    _WITH_TOKEN_IDS,
    ("HOSTED_VLLM_API_KEY",),
    ("HOSTED_VLLM_API_BASE",),
    gives_token_ids=True,
    gives_logprobs=True,
)
_PROVIDERS: Final[Mapping[Provider, _Provider]] = {
    "openai": _Provider(
        _OPENAI_DIALECTS, ("OPENAI_API_KEY",), ("OPENAI_BASE_URL", "OPENAI_API_BASE"), OPENAI_URL, gives_token_ids=None
    ),
    "text-completion-openai": _Provider(
        ("completions",), ("OPENAI_API_KEY",), ("OPENAI_BASE_URL", "OPENAI_API_BASE"), OPENAI_URL
    ),
    "hosted_vllm": _VLLM,
    "vllm": _VLLM,
    "agl": _Provider(_WITH_TOKEN_IDS, gives_token_ids=True, gives_logprobs=True),
    "anthropic": _Provider(
        ("messages",), ("ANTHROPIC_API_KEY",), ("ANTHROPIC_BASE_URL", "ANTHROPIC_API_BASE"), ANTHROPIC_URL
    ),
    "azure": _Provider(_OPENAI_DIALECTS, ("AZURE_API_KEY",), ("AZURE_API_BASE",)),
    "litellm": _Provider(("chat", "embeddings")),
}


def backend_of(entry: Mapping[str, Any], number: int) -> Backend:
    """The backend an entry describes; `number` is its position in the model list."""
    read = Entry(entry, number)
    provider, model = _provider_of(read)
    if provider == "litellm":
        _demand_library(read)
    habits = _PROVIDERS[provider]
    base_url, userinfo = _address_of(read, provider, habits)
    api_key = read.text("api_key") or _from_environment(habits.key_variables)
    auth = _auth_of(read, provider, api_key) or userinfo
    api_version = _api_version_of(read, base_url) if provider == "azure" else None
    extra_headers = read.headers()
    given = {name.lower() for name in extra_headers}
    headers = {name: value for name, value in auth.items() if name.lower() not in given} | extra_headers
    defaults, options = read.rest(for_library=provider == "litellm")
    if provider == "litellm":
        options |= {name: value for name, value in (("api_key", api_key), ("api_base", base_url)) if value}
    return Backend(
        name=f"{read.model_name}#{number} at {base_url or model}",
        model_name=read.model_name,
        provider=provider,
        model=model,
        base_url=base_url,
        headers=headers,
        extra_headers=extra_headers,
        weight=read.number("weight", at_least=0.0, above=True) or 1.0,
        max_parallel_requests=read.whole("max_parallel_requests"),
        rpm=read.whole("rpm"),
        tpm=read.whole("tpm"),
        timeout=read.number("timeout", at_least=0.0, above=True) or DEFAULT_TIMEOUT_SECONDS,
        version=read.label("version"),
        resources_id=read.label("resources_id"),
        defaults=defaults,
        overrides=read.overrides(),
        options=options,
        input_cost_per_token=read.number("input_cost_per_token", at_least=0.0),
        output_cost_per_token=read.number("output_cost_per_token", at_least=0.0),
        gives_token_ids=read.yes_or_no("gives_token_ids", _gives_token_ids(provider, base_url)),
        gives_logprobs=read.yes_or_no("gives_logprobs", habits.gives_logprobs),
        dialects=_dialects_of(read, habits),
        api_version=api_version,
        health_path=None if provider == "litellm" else read.health_path(),
        secrets=_secrets_of(api_key, {**auth, **headers}, options),
    )


def _provider_of(read: Entry) -> tuple[Provider, str]:
    """The provider and the name the model has there."""
    given = read.text("custom_llm_provider")
    prefix, slash, rest = read.model.partition("/")
    if given is not None:
        rest = rest if slash and prefix == given else read.model
        return _known(given) or "litellm", rest if _known(given) else f"{given}/{rest}"
    if slash and (provider := _known(prefix)) is not None:
        if not rest:
            raise read.wrong("litellm_params.model", read.model, "provider/model, as in 'openai/gpt-4.1'")
        return provider, rest
    if read.model.startswith("claude-") and not slash:
        return "anthropic", read.model
    if read.text("api_base") is not None and prefix not in _LIBRARY_PREFIXES:
        # A prefix that is none is part of the name, as servers of models give it.
        return "openai", rest if prefix in _OPENAI_ALIKE and rest else read.model
    if read.model == WILDCARD:
        raise read.wrong("litellm_params.model", WILDCARD, "a provider in front, as in 'openai/*', or an api_base")
    return ("litellm", read.model) if slash else ("openai", read.model)


def _known(prefix: str) -> Provider | None:
    for provider in get_args(Provider):
        if prefix == provider and prefix != "litellm":
            return provider  # type: ignore[no-any-return]  # get_args does not know what it gives
    return None


def _demand_library(read: Entry) -> None:
    if importlib.util.find_spec("litellm") is None:
        raise ConfigurationError(
            f"{read.place} names the model '{read.model}', whose provider is spoken to through the litellm library, "
            f"which is not installed: run `{install_command('litellm')}`, or give an api_base that speaks "
            "OpenAI's dialects and a model of the form 'openai/name'."
        )


def _from_environment(variables: tuple[str, ...]) -> str | None:
    return next((os.environ[variable] for variable in variables if os.environ.get(variable)), None)


def _address_of(read: Entry, provider: Provider, habits: _Provider) -> tuple[str, dict[str, str]]:
    """The base URL, and the header for a user and password that stood in it."""
    text = read.text("api_base") or _from_environment(habits.address_variables) or habits.address
    if text is None:
        if provider == "litellm":
            return "", {}
        named = "".join(f", or {variable} in the environment" for variable in habits.address_variables)
        raise ConfigurationError(
            f"{read.place} has no address: '{provider}/...' needs litellm_params.api_base, as in "
            f"'http://localhost:8000/v1'{named}."
        )
    try:
        url = yarl.URL(text)
    except ValueError:
        url = yarl.URL()
    if url.scheme not in ("http", "https") or not url.host:
        raise read.wrong("litellm_params.api_base", "...", "http://host:port/v1 or https://host/v1")
    userinfo = {}
    if url.user is not None:
        pair = base64.b64encode(f"{url.user}:{url.password or ''}".encode()).decode("ascii")
        userinfo = {"Authorization": f"Basic {pair}"}
        url = url.with_user(None)
    base_url = str(url.with_query(None).with_fragment(None)).rstrip("/")
    if provider == "anthropic":
        base_url = base_url.removesuffix("/messages").removesuffix("/v1") + "/v1"
    return base_url, userinfo


def _auth_of(read: Entry, provider: Provider, api_key: str | None) -> dict[str, str]:
    headers = {}
    if provider == "anthropic":
        headers["anthropic-version"] = ANTHROPIC_VERSION
    if provider == "azure" and api_key is None and (token := read.text("azure_ad_token")) is not None:
        headers["Authorization"] = f"Bearer {token}"
    if api_key is not None:
        header = {"anthropic": "x-api-key", "azure": "api-key"}.get(provider, "Authorization")
        headers[header] = api_key if header != "Authorization" else f"Bearer {api_key}"
    if (organization := read.text("organization")) is not None:
        headers["OpenAI-Organization"] = organization
    return headers


def _api_version_of(read: Entry, base_url: str) -> str | None:
    if base_url.endswith("/openai/v1"):
        return None
    return read.text("api_version") or os.environ.get("AZURE_API_VERSION") or AZURE_API_VERSION


def _gives_token_ids(provider: Provider, base_url: str) -> bool | None:
    """What can be known before the first call: OpenAI itself does not, servers that speak like it may."""
    if provider == "openai" and yarl.URL(base_url).host == yarl.URL(OPENAI_URL).host:
        return False
    return _PROVIDERS[provider].gives_token_ids


def _dialects_of(read: Entry, habits: _Provider) -> tuple[DialectName, ...]:
    given = read.info.get("dialects")
    if given is None:
        return habits.dialects
    known = get_args(DialectName)
    if not isinstance(given, (list, tuple)) or not given or not all(dialect in known for dialect in given):
        raise read.wrong("model_info.dialects", given, f"a list of {', '.join(known)}")
    return tuple(given)


def _secrets_of(api_key: str | None, headers: Mapping[str, str], options: Mapping[str, Any]) -> tuple[str, ...]:
    """Longest first, so that a part of one does not keep the rest of it in sight."""
    harmless = {ANTHROPIC_VERSION}
    texts = {api_key or "", *headers.values(), *(value for value in options.values() if isinstance(value, str))}
    texts |= {text.partition(" ")[2] for text in texts if text.startswith(("Bearer ", "Basic "))}
    return tuple(
        sorted((text for text in texts - harmless if len(text) >= SHORTEST_SECRET), key=lambda text: (-len(text), text))
    )
