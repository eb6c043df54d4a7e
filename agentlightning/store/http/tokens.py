"""Tokens: what a caller shows, and what it stands for.

A server has one master token, its secret. Whoever shows it is the admin; for everybody else it signs tokens with a
narrower scope and an end, which it can check without keeping a list:

    agl1.<payload>.<signature>

The payload is JSON with the scope and the expiry, the signature is HMAC-SHA256 over what stands before it; both are
base64url without padding. Anybody can read a token, only the holder of the master token can make one. No message ever
contains a token.

Every operation says itself, as it is declared, who may call it. An admin may do everything. A runner may do what
running takes: claim work, report on it, read. A reader may read, and change nothing. An attempt may write its own spans
and nothing else, so that a token can be given to code that nobody trusts. Which secrets an answer shows to a scope that
may read is decided in `credentials`.
"""

import base64
import hmac
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

from pydantic import BaseModel, ConfigDict, FiniteFloat

from agentlightning.errors import ConfigurationError, InvalidToken, NotAllowed
from agentlightning.store.operations import Operation
from agentlightning.utils.server_launcher import is_loopback

ScopeKind = Literal["admin", "runner", "reader", "attempt"]

_KINDS: Final[tuple[ScopeKind, ...]] = get_args(ScopeKind)
_FORMAT: Final = "agl1"
_SIGNING_PURPOSE: Final = b"agentlightning token signing key, format 1"
"""Sets the signing key apart from the master token and from any other key derived from it."""
ATTEMPT_TOKEN_SECONDS: Final = 24 * 3600.0
"""How long the token that a program gets for its attempt is valid at most; it ends with the attempt, after a minute."""
ENDED_ATTEMPT_SECONDS: Final = 60.0
"""How long a token of an attempt is valid after its end: exporters send the last spans late."""
_LONGEST_TOKEN = 4096
_LONGEST_KIND = 20
_PARTS = 3
_BEARER: Final = "bearer "
_HEALTH_PATHS: Final = ("/health", "/v1/agl/health", "/ready")


@dataclass(frozen=True)
class Scope:
    """On whose behalf a token speaks."""

    kind: ScopeKind
    rollout_id: str | None = None
    attempt_id: str | None = None
    """Set, as is `rollout_id`, for the kind `attempt` only."""

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise ConfigurationError(f"Scope kind is {self.kind!r}; use one of {list(_KINDS)}.")
        ids = (self.rollout_id, self.attempt_id)
        if self.kind == "attempt" and not all(ids):
            raise ConfigurationError(f"An attempt scope needs a rollout id and an attempt id; they are {ids}.")
        if self.kind != "attempt" and ids != (None, None):
            raise ConfigurationError(f"The scope '{self.kind}' is for no single attempt; leave out the ids {ids}.")

    def __str__(self) -> str:
        if self.kind == "attempt":
            return f"attempt '{self.attempt_id}' of rollout '{self.rollout_id}'"
        return self.kind


@dataclass(frozen=True)
class SignedToken:
    """What a signed token says."""

    scope: Scope
    expires_at: float | None
    """Seconds since the epoch; None never ends."""


def check_secret(secret: str, name: str = "The master token") -> None:
    """Refuse a secret that cannot serve as one; `name` begins the message."""
    if not secret.isascii() or not secret or secret != "".join(secret.split()):
        what = "is empty" if not secret else "holds white space" if secret.isascii() else "is not plain ASCII"
        raise ConfigurationError(f"{name} {what}; make one with `agl tokens new`.")
    if is_signed(secret):
        raise ConfigurationError(
            f"{name} is itself a signed token, which can neither sign nor be served; "
            "give the server's own token, or make one with `agl tokens new`."
        )


def is_signed(token: str) -> bool:
    """Whether a token looks like one that a master token has signed; such a token can sign no other."""
    return token.startswith(f"{_FORMAT}.")


def sign_for_attempt(secret: str, rollout_id: str, attempt_id: str) -> str:
    """The token for programs that an attempt runs."""
    scope = Scope("attempt", rollout_id, attempt_id)
    return sign_token(secret, scope, expires_at=time.time() + ATTEMPT_TOKEN_SECONDS)


def sign_token(secret: str, scope: Scope, *, expires_at: float | None) -> str:
    """A token of that scope, valid until then on the server whose master token this is."""
    check_secret(secret)
    try:
        payload = _Payload(kind=scope.kind, rollout_id=scope.rollout_id, attempt_id=scope.attempt_id, exp=expires_at)
        content = payload.model_dump_json(exclude_none=True).encode()
    except ValueError as error:
        raise ConfigurationError(
            f"A token of scope {scope} until {expires_at} cannot be written; "
            "give ids that are text, and an end in seconds since the epoch or None."
        ) from error
    signed = f"{_FORMAT}.{_as_base64(content)}"
    token = f"{signed}.{_signature(secret, signed)}"
    if len(token) > _LONGEST_TOKEN:
        raise ConfigurationError(
            f"The ids of {scope} make a token above {_LONGEST_TOKEN} characters; use shorter ones."
        )
    return token


def verify_token(secret: str, presented: str, now: float) -> Scope:
    """The scope of a token shown to the server whose master token this is."""
    check_secret(secret)
    if hmac.compare_digest(_as_bytes(secret), _as_bytes(presented)):
        return Scope("admin")
    signed, payload, signature = _split(presented)
    if not hmac.compare_digest(_as_bytes(_signature(secret, signed)), _as_bytes(signature)):
        raise InvalidToken("The token's signature is wrong; set AGL_STORE_TOKEN to a token of this server.")
    token = _read_payload(payload)
    if token.expires_at is not None and now >= token.expires_at:
        raise InvalidToken(f"The token expired {now - token.expires_at:.0f} seconds ago; ask for a new one.")
    return token.scope


def bearer_token(authorization: str) -> str:
    """The token in an Authorization header; `InvalidToken` if there is none."""
    if authorization[: len(_BEARER)].lower() != _BEARER:
        raise InvalidToken(
            "This server wants a token; set AGL_STORE_TOKEN here to the one that it was started with, or send that as "
            "'Authorization: Bearer TOKEN' (a training started without one lets in its own runners only: start it with "
            "AGL_STORE_TOKEN=$(agl tokens new))."
        )
    return authorization[len(_BEARER) :].strip()


def admit(secret: str, authorization: str) -> Scope:
    """The scope of the bearer of an Authorization header."""
    return verify_token(secret, bearer_token(authorization), time.time())


def describe_token(token: str) -> SignedToken:
    """What a signed token says about itself, whoever signed it."""
    return _read_payload(_split(token)[1])


def _split(token: str) -> tuple[str, str, str]:
    """What is signed, the payload in it, and the signature."""
    if not token:
        raise InvalidToken("The token is empty; show the server's master token or one that it signed.")
    if len(token) > _LONGEST_TOKEN:
        raise InvalidToken(f"The token has {len(token)} characters; none of ours is longer than {_LONGEST_TOKEN}.")
    parts = token.split(".")
    if len(parts) != _PARTS or parts[0] != _FORMAT:
        raise InvalidToken(
            f"The token is neither this server's master token nor a signed one, which begins with '{_FORMAT}.'; "
            "check it for typing errors, or ask for a new one."
        )
    return f"{parts[0]}.{parts[1]}", parts[1], parts[2]


class _Payload(BaseModel):
    """The JSON inside a token."""

    model_config = ConfigDict(strict=True, extra="allow")

    kind: str
    rollout_id: str | None = None
    attempt_id: str | None = None
    exp: FiniteFloat | None = None


def _read_payload(encoded: str) -> SignedToken:
    try:
        padded = encoded + "=" * (-len(encoded) % 4)
        payload = _Payload.model_validate_json(base64.b64decode(padded, altchars=b"-_", validate=True))
        kind = next((kind for kind in _KINDS if kind == payload.kind), None)
        if kind is not None and not payload.model_extra:  # a field we do not know might narrow the scope
            return SignedToken(Scope(kind, payload.rollout_id, payload.attempt_id), payload.exp)
    except ValueError:
        message = "The token's payload is damaged; copy the token again, or ask for a new one."
        raise InvalidToken(message) from None  # the cause quotes the payload
    raise InvalidToken(
        f"The token's scope '{payload.kind[:_LONGEST_KIND]}' says more than this release understands; "
        f"upgrade Agent Lightning, or ask for a token of a scope in {list(_KINDS)}."
    )


def _signature(secret: str, signed: str) -> str:
    key = hmac.digest(_as_bytes(secret), _SIGNING_PURPOSE, "sha256")
    return _as_base64(hmac.digest(key, _as_bytes(signed), "sha256"))


def _as_bytes(text: str) -> bytes:
    """Any text as bytes, since only bytes of any kind can be compared in constant time."""
    return text.encode("utf-8", "surrogatepass")


def _as_base64(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).decode().rstrip("=")


def refuse_open_address(
    host: str,
    token: str | None,
    *,
    is_insecure: bool,
    option: str = "--host",
    at_risk: str = "read and change the store",
    given_as: str = "AGL_STORE_TOKEN or --token",
) -> None:
    """Refuse to serve other machines without a token.

    Args:
        is_insecure: The user has said that the network is theirs alone.
        option: What the user wrote the address as.
        at_risk: What everybody could do, in the form of "do this".
        given_as: Where the server looks for its token.
    """
    if token or is_insecure or is_loopback(host):
        return
    all_the_same = "--insecure" if option.startswith("--") else "insecure=True"
    raise ConfigurationError(
        f"{option} {host} lets other machines in, and without a token everybody who reaches it can {at_risk}; make one "
        f"with `agl tokens new` and give it as {given_as}, or say {all_the_same} if the network is yours alone."
    )


# ---------------------------------------------------------------------- permissions


def check_permission(scope: Scope, op: Operation, arguments: Mapping[str, object] | None = None) -> None:
    """Refuse a call that the scope does not permit; `arguments` go by name, None before they are decoded."""
    if scope.kind == "admin":
        return
    is_permitted = op.who == "attempt" if scope.kind == "attempt" else op.who != "admin"
    if not is_permitted or (scope.kind == "reader" and op.mutates):
        raise _refusal(scope, f"'{op.name}'", "the master token" if op.who == "admin" else "a runner's token")
    if scope.kind == "attempt" and arguments is not None:
        _check_owners(scope, f"'{op.name}'", _owners(arguments))


def check_subscription(scope: Scope) -> None:
    """Refuse to tell changes to a scope that may not read."""
    if scope.kind == "attempt":
        raise _refusal(scope, "'subscribe'", "a runner's token")


def check_server_page(scope: Scope, path: str) -> None:
    """Refuse an attempt what the server tells about itself, but for whether it runs."""
    if scope.kind == "attempt" and path not in _HEALTH_PATHS:
        raise _refusal(scope, f"'{path}'", "a runner's token")


def check_traces(scope: Scope, owners: Iterable[tuple[str, str]] = ()) -> None:
    """Refuse OTLP spans, of these (rollout id, attempt id), unless the scope may write them all."""
    if scope.kind == "reader":
        raise _refusal(scope, "OTLP spans", "an attempt's token or a runner's")
    if scope.kind == "attempt":
        _check_owners(scope, "OTLP spans", owners)


def _owners(arguments: Mapping[str, Any]) -> Iterable[tuple[str | None, str | None]]:
    """Whom a call is about: the attempts of its spans, or those it names."""
    if "span" in arguments or "spans" in arguments:
        spans = arguments["spans"] if "spans" in arguments else [arguments["span"]]
        return [(getattr(span, "rollout_id", None), getattr(span, "attempt_id", None)) for span in spans]
    if "rollout_attempt_ids" in arguments:
        return [(rollout_id, attempt_id) for rollout_id, attempt_id in arguments["rollout_attempt_ids"]]
    return [(arguments.get("rollout_id"), arguments.get("attempt_id"))]


def _check_owners(scope: Scope, what: str, owners: Iterable[tuple[str | None, str | None]]) -> None:
    for rollout_id, attempt_id in owners:
        if (rollout_id, attempt_id) != (scope.rollout_id, scope.attempt_id):
            whose = f"{what} for attempt '{attempt_id}' of rollout '{rollout_id}'"
            raise _refusal(scope, whose, "that attempt's token or a runner's")


def _refusal(scope: Scope, what: str, better: str) -> NotAllowed:
    return NotAllowed(f"A token of scope {scope} does not permit {what}; use {better}.")
