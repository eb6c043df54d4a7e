"""One backend of the proxy: where it is, what it speaks, what it is allowed and what it can give.

A value without behaviour of its own; `providers.py` reads it from an entry of the model list. Keys are in it, since
calls are sent with them, and are never shown by it.
"""

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import yarl

from agentlightning.dialects import DialectName
from agentlightning.llm_proxy.backends.errors import DialectNotServed, UnknownModel

__all__ = ["Backend", "Provider", "WILDCARD"]

Provider = Literal["openai", "hosted_vllm", "vllm", "text-completion-openai", "anthropic", "azure", "agl", "litellm"]

WILDCARD: Final = "*"
DEFAULT_TIMEOUT_SECONDS: Final = 600.0
REDACTED: Final = "[redacted]"
SHORTEST_SECRET: Final = 6
"""Anything shorter is found in ordinary words too and protects nothing."""
_TRANSLATED: Final[tuple[DialectName, ...]] = ("chat", "messages", "responses")
"""Dialects that are translated into each other, in the order in which a backend is asked for them."""
_PATHS: Final[Mapping[DialectName, str]] = {
    "chat": "/chat/completions",
    "completions": "/completions",
    "responses": "/responses",
    "embeddings": "/embeddings",
    "messages": "/messages",
}
_WITH_TOKENIZER: Final = frozenset({"hosted_vllm", "vllm", "agl"})
"""Providers whose servers have vLLM's `/tokenize`."""
_NAME_IN_ADDRESS: Final = frozenset({"azure", "litellm"})
"""Providers where the name of a model is a part of an address; some of the library take a URL for one, or an ARN."""
_PLAIN_NAME: Final = re.compile(r"(?!.*(\.\.|//|arn:))\w[\w.:@+/-]*", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True)
class Backend:
    """One server that answers for one model name."""

    name: str = field(compare=False)
    """Unique in its model list: `model#position at address`."""
    model_name: str
    """The name agents ask for."""
    provider: Provider
    model: str
    """The name the server knows the model by; the deployment on Azure."""
    base_url: str
    """Without a slash at the end; empty where the litellm library knows the way."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False, hash=False)
    """Sent with every call, the key among them."""
    extra_headers: Mapping[str, str] = field(default_factory=dict, repr=False, hash=False)
    """Those of `headers` that the entry asked for itself."""
    weight: float = 1.0
    """Its share of the calls, relative to the other backends of the model."""
    max_parallel_requests: int | None = None
    """Calls it may have in flight; None sets no cap."""
    rpm: int | None = None
    """Calls it may be sent in any minute."""
    tpm: int | None = None
    """Tokens it may use up in any minute."""
    timeout: float = DEFAULT_TIMEOUT_SECONDS
    """Seconds it may be silent, before the first byte and between two."""
    version: str | None = None
    """Version of the model that is served; written on each call that is sent, unless the server tells its own."""
    resources_id: str | None = None
    """Version of the resources this backend belongs to; None serves any."""
    defaults: Mapping[str, Any] = field(default_factory=dict, repr=False, hash=False)
    """Request fields for calls that do not set them."""
    overrides: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, repr=False, hash=False)
    """Request fields, by the id of the resources of a rollout, that are written over its calls' own; None takes one
    out."""
    options: Mapping[str, Any] = field(default_factory=dict, repr=False, hash=False)
    """Arguments for the litellm library alone, its credentials among them."""
    input_cost_per_token: float | None = None
    output_cost_per_token: float | None = None
    gives_token_ids: bool | None = False
    """Whether it returns token ids when asked; None says that a call has to find out."""
    gives_logprobs: bool | None = False
    """Whether it returns log-probabilities when asked."""
    dialects: tuple[DialectName, ...] = ("chat",)
    """What it speaks, best first."""
    api_version: str | None = None
    """On Azure, the version of the interface."""
    health_path: str | None = "/models"
    """Path below `base_url` that answers a GET while the server is well; None where there is none to ask."""
    secrets: tuple[str, ...] = field(default=(), repr=False)
    """Every text of the entry that must not be shown."""

    def __str__(self) -> str:
        return self.name

    def is_updated_by(self, other: "Backend") -> bool:
        """Whether the other is this server with another version of the model, or another name for it."""
        return dataclasses.replace(self, version=other.version, model=other.model) == other

    def url_of(self, dialect: DialectName) -> str:
        """Where calls in this dialect are sent."""
        if self.provider == "azure":
            return self._azure_url_of(dialect)
        return self.base_url + _PATHS[dialect]

    @property
    def count_url(self) -> str | None:
        """Where the server counts the tokens of a request without answering it; None if it does not."""
        if "messages" in self.dialects:
            return self.url_of("messages") + "/count_tokens"
        return self.base_url.removesuffix("/v1") + "/tokenize" if self.provider in _WITH_TOKENIZER else None

    @property
    def health_url(self) -> str | None:
        """Where to ask whether the server is well; None if that cannot be asked."""
        if self.health_path is None or not self.base_url:
            return None
        if self.health_path.startswith(("http://", "https://")):
            return self.health_path
        if self.provider == "azure" and self.api_version is not None:
            return f"{self.base_url.partition('/openai/deployments/')[0]}/openai{self.health_path}" + self._azure_query
        return self.base_url + self.health_path

    def serving(self, dialect: DialectName) -> DialectName:
        """The dialect to speak to this backend for a client that speaks the given one."""
        if dialect in self.dialects:
            return dialect
        if dialect in _TRANSLATED:
            for spoken in _TRANSLATED:
                if spoken in self.dialects:
                    return spoken
        raise DialectNotServed(
            f"Backend '{self.name}' does not serve the {dialect} dialect; it speaks {', '.join(self.dialects)}."
        )

    @property
    def is_wildcard(self) -> bool:
        """Whether the upstream name depends on the name asked for."""
        return WILDCARD in self.model

    def called(self, asked: str) -> "Backend":
        """The backend for the name an agent asked for; the same unless it serves a pattern.

        Raises:
            UnknownModel: The name could lead elsewhere than to a model of the backend.
        """
        if not self.is_wildcard:
            return self
        before, _, after = self.model_name.partition(WILDCARD)
        middle = asked[len(before) : len(asked) - len(after)] if WILDCARD in self.model_name else asked
        if self.provider in _NAME_IN_ADDRESS and _PLAIN_NAME.fullmatch(middle) is None:
            raise UnknownModel(
                f"There is no model {asked[:200]!r}: for '{self.model_name}' stands a name of letters, digits and "
                "'_.:@+-/', without '//', '..' and 'arn:'; a model of another name needs an entry of its own."
            )
        return dataclasses.replace(self, model=self.model.replace(WILDCARD, middle, 1))

    def redacted(self, text: str) -> str:
        """The text without anything of this backend that must not be shown."""
        for secret in self.secrets:
            text = text.replace(secret, REDACTED)
        return text

    def redacted_bytes(self, body: bytes) -> bytes:
        """The same for what was received; the very bytes, if there is nothing to hide in them."""
        if not any(secret.encode() in body for secret in self.secrets):
            return body
        return self.redacted(body.decode("utf-8", "replace")).encode()

    @property
    def _azure_query(self) -> str:
        return str(yarl.URL.build(query={"api-version": self.api_version})) if self.api_version is not None else ""

    def _azure_url_of(self, dialect: DialectName) -> str:
        if self.api_version is None:  # the interface without versions, which takes the deployment from the body
            return self.base_url + _PATHS[dialect]
        if dialect == "responses":
            return f"{self.base_url.partition('/openai/deployments/')[0]}/openai/responses{self._azure_query}"
        deployed = self.base_url
        if "/openai/deployments/" not in deployed:
            deployed = f"{deployed}/openai/deployments/{self.model}"
        return deployed + _PATHS[dialect] + self._azure_query
