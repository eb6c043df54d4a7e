"""Tokens: what is signed is verified, and everything else is refused without being repeated."""

import base64
import hmac
import json
import math
import pickle
import traceback
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.errors import ConfigurationError, InvalidToken
from agentlightning.store.http import tokens
from agentlightning.store.http.tokens import Scope, SignedToken, check_secret, describe_token, sign_token, verify_token

SECRET = "a-master-token"
NOW = 1_700_000_000.0
LATER = NOW + 60
ATTEMPT = Scope("attempt", "ro-1", "at-1")
SCOPES = [Scope("admin"), Scope("runner"), Scope("reader"), ATTEMPT]


def encode(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).decode().rstrip("=")


def signed_payload(payload: Any) -> str:
    """A token with a genuine signature and any payload, as a newer release might make it."""
    content = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
    signed = f"agl1.{encode(content)}"
    return f"{signed}.{tokens._signature(SECRET, signed)}"


# ---------------------------------------------------------------------- genuine tokens


@pytest.mark.parametrize("scope", SCOPES, ids=str)
def test_signed_token_gives_its_scope(scope: Scope) -> None:
    for expires_at in (LATER, int(LATER), None):
        token = sign_token(SECRET, scope, expires_at=expires_at)
        assert verify_token(SECRET, token, NOW) == scope
        assert describe_token(token) == SignedToken(scope, expires_at)


def test_token_has_the_documented_shape() -> None:
    token = sign_token(SECRET, ATTEMPT, expires_at=LATER)

    head, payload, signature = token.split(".")
    assert head == "agl1"
    fields = {"kind": "attempt", "rollout_id": "ro-1", "attempt_id": "at-1", "exp": LATER}
    assert json.loads(base64.urlsafe_b64decode(payload + "==")) == fields
    assert len(base64.urlsafe_b64decode(signature + "=")) == 32


def test_signing_key_is_not_the_master_token_itself() -> None:
    signed, _, signature = sign_token(SECRET, ATTEMPT, expires_at=None).rpartition(".")
    assert signature != encode(hmac.digest(SECRET.encode(), signed.encode(), "sha256"))


# ---------------------------------------------------------------------- refused tokens


@pytest.mark.parametrize(
    ("presented", "complaint"),
    [
        ("", "is empty"),
        ("wrong", "neither this server's master token nor a signed one"),
        ("a-master-tokem", "neither"),
        ("a-master-token ", "neither"),
        ("gehéim", "neither"),
        ("\ud800", "neither"),
        ("agl2.e30.e30", "neither"),
        ("agl1.e30", "neither"),
        ("agl1.e30.e30.e30", "neither"),
        ("agl1..", "signature is wrong"),
        ("agl1.e30.ü", "signature is wrong"),
        ("agl1.\ud800.\udfff", "signature is wrong"),
        ("x" * 5000, "5000 characters"),
        (f"agl1.{'x' * 5000}.x", "characters"),
    ],
    ids=range(14),
)
def test_foreign_text_is_refused(presented: str, complaint: str) -> None:
    with pytest.raises(InvalidToken, match=complaint):
        verify_token(SECRET, presented, NOW)


@given(st.data())
def test_changed_token_is_refused(data: st.DataObject) -> None:
    token = sign_token(SECRET, ATTEMPT, expires_at=LATER)
    place = data.draw(st.integers(0, len(token) - 1))
    other = data.draw(st.characters(codec="ascii").filter(lambda character: character != token[place]))

    with pytest.raises(InvalidToken):
        verify_token(SECRET, token[:place] + other + token[place + 1 :], NOW)


def test_token_of_another_server_is_refused() -> None:
    with pytest.raises(InvalidToken, match="signature is wrong"):
        verify_token(SECRET, sign_token("another", ATTEMPT, expires_at=None), NOW)


def test_token_ends_at_its_expiry() -> None:
    token = sign_token(SECRET, ATTEMPT, expires_at=LATER)

    assert verify_token(SECRET, token, LATER - 0.001) == ATTEMPT
    for now in (LATER, LATER + 90):
        with pytest.raises(InvalidToken, match=r"expired \d+ seconds ago; ask for a new one"):
            verify_token(SECRET, token, now)


@pytest.mark.parametrize(
    "payload",
    [{"kind": "proxy"}, {"kind": "proxy", "models": ["m"]}, {"kind": "runner", "only": "reading"}],
    ids=["kind", "kind and field", "field"],
)
def test_token_of_a_newer_release_is_refused_clearly(payload: dict[str, Any]) -> None:
    with pytest.raises(InvalidToken, match=f"'{payload['kind']}' says more than this release understands; upgrade"):
        verify_token(SECRET, signed_payload(payload), NOW)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"nonsense",
        b"[" * 2000,
        [],
        {},
        {"kind": 5},
        {"kind": "attempt"},
        {"kind": "attempt", "rollout_id": "", "attempt_id": "a"},
        {"kind": "attempt", "rollout_id": 1, "attempt_id": 2},
        {"kind": "runner", "rollout_id": "ro-1"},
        {"kind": "runner", "exp": "never"},
        {"kind": "runner", "exp": math.nan},
        {"kind": "runner", "exp": math.inf},
        {"kind": "runner", "exp": True},
    ],
    ids=range(14),
)
def test_damaged_payload_is_refused(payload: Any) -> None:
    for read in (lambda token: verify_token(SECRET, token, NOW), describe_token):
        with pytest.raises(InvalidToken, match="payload is damaged"):
            read(signed_payload(payload))


@pytest.mark.parametrize(
    "token",
    [
        sign_token("another", ATTEMPT, expires_at=None),
        sign_token(SECRET, ATTEMPT, expires_at=1.0),
        signed_payload({"kind": "proxy"}),
        signed_payload({"kind": "runner", "exp": "never"}),
        "wrong-master-token",
    ],
    ids=["foreign", "expired", "newer", "damaged", "wrong"],
)
def test_refusal_never_shows_the_token(token: str) -> None:
    with pytest.raises(InvalidToken) as caught:
        verify_token(SECRET, token, NOW)

    told = "".join(traceback.format_exception(caught.value)) + repr(caught.value)
    assert caught.value.http_status == 401
    assert not any(part in told for part in token.split(".")[1:] or [token])
    assert SECRET not in told
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


# ---------------------------------------------------------------------- secrets and scopes


@pytest.mark.parametrize("secret", ["", " ", "a b", "token\n", sign_token(SECRET, Scope("runner"), expires_at=None)])
def test_unfit_secret_is_refused(secret: str) -> None:
    for use in (
        lambda: check_secret(secret),
        lambda: sign_token(secret, Scope("runner"), expires_at=None),
        lambda: verify_token(secret, secret, NOW),
    ):
        with pytest.raises(ConfigurationError, match="agl tokens new"):
            use()


def test_what_fits_no_token_is_refused() -> None:
    for expires_at in (math.nan, math.inf, -math.inf):
        with pytest.raises(ConfigurationError, match="seconds since the epoch"):
            sign_token(SECRET, Scope("runner"), expires_at=expires_at)
    for name in ("\ud800", "x" * 5000):
        with pytest.raises(ConfigurationError):
            sign_token(SECRET, Scope("attempt", name, "at-1"), expires_at=None)


def test_impossible_scope_is_refused() -> None:
    of_attempts: list[Any] = [("attempt",), ("attempt", "ro-1"), ("attempt", "ro-1", "")]
    of_others: list[Any] = [("runner", "ro-1"), ("admin", None, "at-1"), ("root",)]
    for arguments in (*of_attempts, *of_others):
        with pytest.raises(ConfigurationError):
            Scope(*arguments)
