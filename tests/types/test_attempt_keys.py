"""Keys of one attempt: read by whoever has the secret, made and changed by nobody else."""

import base64
import hashlib
import hmac
import json
import re

import pytest

from agentlightning.types.resources import AttemptKey, derive_attempt_key, read_attempt_key

SECRET = "agl-proxy-0123456789abcdef"


def signed(names: bytes, secret: str = SECRET) -> str:
    """A key with these names, as the documented format has it."""
    body = "agl-attempt-" + base64.urlsafe_b64encode(names).decode().rstrip("=")
    digest = hmac.new(secret.encode(), body.encode(), hashlib.sha256).digest()
    return f"{body}.{base64.urlsafe_b64encode(digest).decode().rstrip('=')}"


@pytest.mark.parametrize(
    ("rollout_id", "attempt_id", "agent"),
    [
        ("ro-1", "at-1", None),
        ("ro-1", "at-1", "writer"),
        ("", "", ""),
        ("a.b/c", 'q"uote', "päärinen \N{ROLLING ON THE FLOOR LAUGHING}"),
        ("\ud800", "at", None),
    ],
    ids=["attempt", "agent", "empty", "special", "surrogate"],
)
def test_key_says_whom_it_was_made_for(rollout_id: str, attempt_id: str, agent: str | None) -> None:
    key = derive_attempt_key(SECRET, rollout_id, attempt_id, agent)

    assert re.fullmatch(r"agl-attempt-[A-Za-z0-9_-]+\.[A-Za-z0-9_-]{43}", key)
    assert read_attempt_key(SECRET, key) == AttemptKey(rollout_id, attempt_id, agent)


def test_key_has_the_documented_format() -> None:
    names = json.dumps(["ro-1", "at-1", "writer"], separators=(",", ":")).encode()
    assert derive_attempt_key(SECRET, "ro-1", "at-1", "writer") == signed(names)


def test_every_name_and_the_secret_make_another_key() -> None:
    keys = {
        derive_attempt_key(SECRET, "ro-1", "at-1"),
        derive_attempt_key(SECRET, "ro-2", "at-1"),
        derive_attempt_key(SECRET, "ro-1", "at-2"),
        derive_attempt_key(SECRET, "ro-1", "at-1", "writer"),
        derive_attempt_key(SECRET + "x", "ro-1", "at-1"),
    }

    assert len(keys) == 5
    assert derive_attempt_key(SECRET, "ro-1", "at-1") in keys
    assert [read_attempt_key(SECRET, key) is None for key in keys].count(True) == 1  # that of the other secret
    assert not any(SECRET in key for key in keys)


def test_no_character_of_a_key_can_be_changed() -> None:
    key = derive_attempt_key(SECRET, "ro-1", "at-1", "writer")

    for place, character in enumerate(key):
        changed = key[:place] + ("A" if character != "A" else "B") + key[place + 1 :]
        assert read_attempt_key(SECRET, changed) is None
        assert read_attempt_key(SECRET, key[:place]) is None
    assert read_attempt_key(SECRET, key + "A") is None


def test_names_of_one_key_do_not_go_with_the_signature_of_another() -> None:
    names, _ = derive_attempt_key(SECRET, "ro-1", "at-1").split(".")
    _, signature = derive_attempt_key(SECRET, "ro-2", "at-1").split(".")

    assert read_attempt_key(SECRET, f"{names}.{signature}") is None


@pytest.mark.parametrize(
    "key",
    [
        "",
        "agl-attempt-",
        "agl-attempt-.",
        "agl-attempt-x",
        "sk-real",
        SECRET,
        "agl-attempt-ä.b",
        "agl-attempt-\x00.\x00",
    ],
)
def test_what_is_no_key_is_not_read(key: str) -> None:
    assert read_attempt_key(SECRET, key) is None


@pytest.mark.parametrize(
    "names",
    [b"", b"{}", b'["ro"]', b'["ro",1,null]', b'[null,"at",null]', b'["ro","at",3]', b'["ro","at",null,1]', b"\xff"],
)
def test_signed_names_of_another_shape_are_not_read(names: bytes) -> None:
    assert read_attempt_key(SECRET, signed(names)) is None


def test_a_key_beyond_all_measure_is_not_read() -> None:
    assert read_attempt_key(SECRET, derive_attempt_key(SECRET, "r" * 10_000, "at-1")) is None
