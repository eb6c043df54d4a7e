"""`agl tokens`: only the token on standard output, and one clear line when something is missing."""

import io
import json
from types import SimpleNamespace

import pytest

from agentlightning.cli import tokens
from agentlightning.cli.tokens import main
from agentlightning.errors import ConfigurationError
from agentlightning.store.http.tokens import Scope, describe_token, sign_token, verify_token

SECRET = "a-master-token"
NOW = 1_700_000_000.5
Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The master token in the environment, and a clock that stands still."""
    monkeypatch.setenv("AGL_STORE_TOKEN", SECRET)
    monkeypatch.setattr(tokens, "time", SimpleNamespace(time=lambda: NOW))


def printed_token(capsys: Capture, *arguments: str) -> str:
    """The token a command prints, which must be the whole of its standard output."""
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert shown.count("\n") == 1
    return shown.strip()


# ---------------------------------------------------------------------- new


def test_new_makes_a_master_token(capsys: Capture) -> None:
    token = printed_token(capsys, "new")

    assert len(token) == 43
    assert verify_token(token, token, NOW) == Scope("admin")
    assert token != printed_token(capsys, "new")


def test_new_token_never_looks_like_an_option(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    random = iter(["-dash", "--dash", "plain"])
    monkeypatch.setattr(tokens.secrets, "token_urlsafe", lambda size: next(random))

    assert printed_token(capsys, "new") == "plain"


# ---------------------------------------------------------------------- signing


@pytest.mark.parametrize(
    ("arguments", "scope", "seconds"),
    [
        (["runner"], Scope("runner"), 24 * 3600),
        (["runner", "--expires", "90s"], Scope("runner"), 90),
        (["runner", "--expires", "30m"], Scope("runner"), 1800),
        (["runner", "--expires=7d"], Scope("runner"), 7 * 86400),
        (["reader"], Scope("reader"), 24 * 3600),
        (["attempt", "ro-1", "at-1"], Scope("attempt", "ro-1", "at-1"), 3600),
        (["attempt", "ro-1", "at-1", "--expires", "2h"], Scope("attempt", "ro-1", "at-1"), 7200),
    ],
    ids=["runner", "seconds", "minutes", "days", "reader", "attempt", "hours"],
)
def test_signed_token_has_scope_and_end(capsys: Capture, arguments: list[str], scope: Scope, seconds: int) -> None:
    token = printed_token(capsys, *arguments)

    assert verify_token(SECRET, token, NOW) == scope
    assert describe_token(token).expires_at == int(NOW) + seconds


def test_given_secret_wins_over_the_environment(capsys: Capture) -> None:
    token = printed_token(capsys, "runner", "--token", "another")

    assert verify_token("another", token, NOW) == Scope("runner")


def test_signed_token_cannot_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGL_STORE_TOKEN", sign_token(SECRET, Scope("runner"), expires_at=None))

    with pytest.raises(ConfigurationError, match="itself a signed token"):
        main(["attempt", "ro-1", "at-1"])


@pytest.mark.parametrize("duration", ["", "5", "h", "0s", "-1h", "1.5h", "1w", "1h30m", "9999999d", "\u0661h"])
def test_odd_duration_is_refused_with_examples(capsys: Capture, duration: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["runner", f"--expires={duration}"])

    assert "write it like 90s, 30m, 24h or 7d" in capsys.readouterr().err


# ---------------------------------------------------------------------- show


def test_show_tells_scope_ids_and_end(capsys: Capture) -> None:
    token = sign_token("another", Scope("attempt", "ro-1", "at-1"), expires_at=NOW + 3600)

    assert main(["show", token]) == 0

    shown = capsys.readouterr()
    lines = ["scope    attempt", "rollout  ro-1", "attempt  at-1", "expires  2023-11-14 23:13:20 UTC"]
    assert shown.out.splitlines() == lines
    assert "signature was not checked" in shown.err


@pytest.mark.parametrize(
    ("expires_at", "shown"),
    [(None, "never"), (NOW - 1, "2023-11-14 22:13:19 UTC (expired)"), (1e300, f"{1e300:.0f} seconds since the epoch")],
    ids=["never", "expired", "beyond the calendar"],
)
def test_show_tells_any_end(capsys: Capture, expires_at: float | None, shown: str) -> None:
    main(["show", sign_token(SECRET, Scope("runner"), expires_at=expires_at)])

    assert capsys.readouterr().out.splitlines() == ["scope    runner", f"expires  {shown}"]


def test_show_leaves_the_terminal_alone(capsys: Capture) -> None:
    main(["show", sign_token(SECRET, Scope("attempt", "\x1b[31mred", "at-1"), expires_at=None)])

    assert "\x1b" not in capsys.readouterr().out


def test_show_answers_as_json(capsys: Capture) -> None:
    main(["show", "--json", sign_token(SECRET, Scope("attempt", "ro-1", "at-1"), expires_at=NOW)])

    assert json.loads(capsys.readouterr().out) == {
        "scope": "attempt",
        "rollout": "ro-1",
        "attempt": "at-1",
        "expires_at": NOW,
    }


def test_show_reads_standard_input(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    token = sign_token(SECRET, Scope("runner"), expires_at=None)
    monkeypatch.setattr("sys.stdin", io.StringIO(f"  {token}\n"))

    main(["show", "-"])

    assert "runner" in capsys.readouterr().out
