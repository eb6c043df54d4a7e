"""`agl tokens`: make the master token of a server, sign narrower tokens with it, read what a token says.

A token is the only thing on standard output, so that `$(agl tokens runner)` catches it; notes go to standard error.
"""

import argparse
import re
import secrets
import sys
import time
from datetime import datetime, timezone

from agentlightning.cli.command import Argument, argument, cli_command, print_json, verbs
from agentlightning.env_var import LightningEnvVar, resolve_str_env_var
from agentlightning.errors import ConfigurationError
from agentlightning.store.http.tokens import Scope, describe_token, sign_token

MASTER_TOKEN_BYTES = 32


def _seconds(duration: str) -> int:
    match = re.fullmatch(r"([1-9][0-9]{0,5})([smhd])", duration)
    if match is None:
        raise argparse.ArgumentTypeError(f"{duration!r} is not a duration; write it like 90s, 30m, 24h or 7d")
    return int(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]


def _signing(expiry: str) -> tuple[Argument, Argument]:
    return (
        argument(
            "--expires",
            type=_seconds,
            default=expiry,
            metavar="DURATION",
            help=f"how long it is valid; {expiry} by default",
        ),
        argument("--token", metavar="SECRET", help="the server's master token; AGL_STORE_TOKEN by default"),
    )


@cli_command(
    "tokens",
    description="Make and read the tokens that a store server asks for.",
    examples="""\
examples:
  export AGL_STORE_TOKEN=$(agl tokens new)    the master token, for the server and for you
  agl tokens runner --expires 7d              for a machine that runs agents
  agl tokens reader                           for somebody who looks, at the dashboard for example
  agl tokens attempt ro-1f2 at-3c4            for code that may write one attempt's spans
  agl tokens show "$TOKEN"                    whose token it is, and until when
  agl tokens show - < token.txt               the same, without the token in the shell's history

durations are a number and a unit: 90s, 30m, 24h, 7d.
""",
    arguments=(
        verbs(
            ("new", "make a random master token, which permits everything", ()),
            (
                "runner",
                "sign a token that permits to run rollouts and to read all but secrets of proxies",
                _signing("24h"),
            ),
            ("reader", "sign a token that permits to read all but keys, and to change nothing", _signing("24h")),
            (
                "attempt",
                "sign a token that permits to write the spans of one attempt",
                (
                    argument("rollout_id", metavar="ROLLOUT_ID"),
                    argument("attempt_id", metavar="ATTEMPT_ID"),
                    *_signing("1h"),
                ),
            ),
            (
                "show",
                "tell what a signed token says, without checking who signed it",
                (
                    argument("signed", metavar="TOKEN", help="the token, or - to read it from standard input"),
                    argument("--json", action="store_true", help="one line of JSON"),
                ),
            ),
            required=True,
        ),
    ),
)
def main(arguments: argparse.Namespace) -> None:
    if arguments.verb == "show":
        _show(sys.stdin.read().strip() if arguments.signed == "-" else arguments.signed, as_json=arguments.json)
        return
    if arguments.verb == "new":
        token = "-"
        while token.startswith("-"):  # a shell command would take it for an option
            token = secrets.token_urlsafe(MASTER_TOKEN_BYTES)
        note = "This token permits everything; give it to the server as AGL_STORE_TOKEN and keep it secret."
    else:
        secret = resolve_str_env_var(LightningEnvVar.AGL_STORE_TOKEN, arguments.token)
        if not secret:
            raise ConfigurationError(
                "There is no master token to sign with; set AGL_STORE_TOKEN or pass --token SECRET "
                "(`agl tokens new` makes one)."
            )
        ids = (arguments.rollout_id, arguments.attempt_id) if arguments.verb == "attempt" else ()
        scope = Scope(arguments.verb, *ids)
        expires_at = int(time.time()) + arguments.expires
        token = sign_token(secret, scope, expires_at=expires_at)
        note = f"Scope: {scope}. Valid until {_date(expires_at)}."
    sys.stdout.write(f"{token}\n")
    sys.stderr.write(f"{note}\n")


def _show(token: str, *, as_json: bool) -> None:
    described = describe_token(token)
    scope, expires_at = described.scope, described.expires_at
    named = {"scope": scope.kind, "rollout": scope.rollout_id, "attempt": scope.attempt_id}
    fields = {name: value for name, value in named.items() if value is not None}
    if as_json:
        print_json({**fields, "expires_at": expires_at})
    else:
        expired = " (expired)" if expires_at is not None and expires_at <= time.time() else ""
        fields["expires"] = "never" if expires_at is None else f"{_date(expires_at)}{expired}"
        for name, value in fields.items():
            sys.stdout.write(f"{name:<8} {value if value.isprintable() else ascii(value)}\n")
    sys.stderr.write("The signature was not checked; only the server that signed it can tell whether it is genuine.\n")


def _date(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, ValueError, OSError):  # beyond the calendar
        return f"{seconds:.0f} seconds since the epoch"
