"""A backend of the proxy: its address, its dialects, its limits; and the errors of calls to backends.

`Backend` is a value that validates its fields; `model_entry.py` makes it from an entry of the model list. It holds
keys, since calls are sent with them, and never shows them. Every error is a `ProxyError` with the HTTP status that the
caller gets. Error messages name backends and models, never keys.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Annotated, Any, ClassVar, Final, Literal, NamedTuple

import yarl
from pydantic import ConfigDict, Field, StrictBool
from pydantic.dataclasses import dataclass

from agentlightning.dialects import DIALECTS, DialectName
from agentlightning.errors import ProxyError

Provider = Literal["openai", "hosted_vllm", "vllm", "text-completion-openai", "anthropic", "azure", "agl"]

WILDCARD: Final = "*"
DEFAULT_TIMEOUT_SECONDS: Final = 600.0
REDACTED: Final = "[redacted]"
TRANSLATED: Final[tuple[DialectName, ...]] = ("chat", "messages", "responses")
"""Dialects that are translated into each other, in the order of preference."""
_AZURE_DEPLOYMENTS: Final = "/openai/deployments/"
_WITH_TOKENIZER: Final = frozenset({"hosted_vllm", "vllm", "agl"})
"""Providers whose servers have vLLM's `/tokenize`."""
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
    dialects: Annotated[tuple[DialectName, ...], Field(min_length=1)] = ("chat",)
    """The dialects it speaks, best first."""
    api_version: str | None = None
    """On Azure, the version of the interface."""
    health_path: Annotated[str, Field(pattern=r"^(/|https?://)")] | None = "/models"
    """Path below `base_url`, or URL, that answers a GET while the server is well; None: there is none."""
    secrets: tuple[str, ...] = field(default=(), repr=False)
    """Every text of the entry that must not be shown."""

    def __str__(self) -> str:
        return self.name

    def is_updated_by(self, other: "Backend") -> bool:
        """Whether the other is this server with another version of the model, or another name for it."""
        return dataclasses.replace(self, version=other.version, model=other.model) == other

    def url_of(self, dialect: DialectName) -> str:
        """The address for calls in this dialect."""
        if self.provider != "azure" or self.api_version is None:  # Azure's interface without versions is as OpenAI's
            return self.base_url + DIALECTS[dialect].path
        resource, _, deployment = self.base_url.partition(_AZURE_DEPLOYMENTS)
        if dialect == "responses":
            return self._azure_url(f"{resource}/openai/responses")
        return self._azure_url(f"{resource}{_AZURE_DEPLOYMENTS}{deployment or self.model}{DIALECTS[dialect].path}")

    def _azure_url(self, url: str) -> str:
        return url + str(yarl.URL.build(query={"api-version": self.api_version or ""}))

    @property
    def count_url(self) -> str | None:
        """The address that counts the tokens of a request; None if the server has none."""
        if "messages" in self.dialects:
            return self.url_of("messages") + "/count_tokens"
        return self.base_url.removesuffix("/v1") + "/tokenize" if self.provider in _WITH_TOKENIZER else None

    @property
    def health_url(self) -> str | None:
        """The address of the health check; None if there is none."""
        if self.health_path is None:
            return None
        if self.health_path.startswith(("http://", "https://")):
            return self.health_path
        if self.provider == "azure" and self.api_version is not None:
            return self._azure_url(f"{self.base_url.partition(_AZURE_DEPLOYMENTS)[0]}/openai{self.health_path}")
        return self.base_url + self.health_path

    def serving(self, dialect: DialectName) -> DialectName:
        """The dialect to speak to this backend for a caller that speaks the given one."""
        if dialect in self.dialects:
            return dialect
        spoken = [one for one in TRANSLATED if one in self.dialects] if dialect in TRANSLATED else []
        if spoken:
            return spoken[0]
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
            text = text.replace(secret, REDACTED)
        return text

    def redacted_bytes(self, body: bytes) -> bytes:
        """The same for bytes; the very same object if there is nothing to hide."""
        if not any(secret.encode() in body for secret in self.secrets):
            return body
        return self.redacted(body.decode("utf-8", "replace")).encode()
