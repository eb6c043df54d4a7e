"""Keys for one attempt alone, made of a secret that the attempt never sees.

The LLM proxy has a secret; an agent gets a key that is derived from it. The key says whose calls it pays for, so that
clients that cannot take a path are told apart by it, and the signature says that the secret's holder made it. Nothing
is stored: whoever has the secret can make the key again, or read it.

A key is `agl-attempt-<names>.<signature>`, both base64url without padding: the names are the JSON list
`[rollout_id, attempt_id, agent]`, the signature is the HMAC-SHA-256 of everything before the full stop.
"""

import base64
import binascii
import hashlib
import hmac
import json
from dataclasses import dataclass
from typing import Final

PROXY_SECRET_PREFIX: Final = "agl-proxy-"
"""An API key that begins so is the secret of a proxy, and is not given to agents."""
PROXY_REFERENCE_PREFIX: Final = "agl-proxyref-"
"""An API key that begins so stands for the secret of a proxy where the secret is not shown; it opens nothing."""
ATTEMPT_KEY_PREFIX: Final = "agl-attempt-"
LONGEST_KEY: Final = 4096
"""Characters; what is longer is no key, and is not looked at."""
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
    if not key.startswith(ATTEMPT_KEY_PREFIX) or len(key) > LONGEST_KEY or not key.isascii():
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
