"""`agl tokens`: make the master token of a server, sign narrower tokens with it, read what a token says.

A token is the only thing on standard output, so that `$(agl tokens runner)` catches it; notes go to standard error.
"""

import argparse
import re
import secrets
import sys
import time
from collections.abc import Sequence
from datetime import datetime, timezone

from agentlightning.cli.arguments import CommandParser
from agentlightning.env_var import LightningEnvVar, resolve_str_env_var
from agentlightning.errors import ConfigurationError
from agentlightning.store.http.tokens import Scope, describe_token, sign_token

__all__ = ["main"]

EXAMPLES = """\
examples:
  export AGL_STORE_TOKEN=$(agl tokens new)    the master token, for the server and for you
  agl tokens runner --expires 7d              for a machine that runs agents
  agl tokens reader                           for somebody who looks, at the dashboard for example
  agl tokens attempt ro-1f2 at-3c4            for code that may write one attempt's spans
  agl tokens show "$TOKEN"                    whose token it is, and until when
  agl tokens show - < token.txt               the same, without the token in the shell's history

durations are a number and a unit: 90s, 30m, 24h, 7d.
"""

VERBS = {
    "new": "make a random master token, which permits everything",
    "runner": "sign a token that permits to run rollouts and to read all but secrets of proxies",
    "reader": "sign a token that permits to read all but keys, and to change nothing",
    "attempt": "sign a token that permits to write the spans of one attempt",
    "show": "tell what a signed token says, without checking who signed it",
}
RUNNER_EXPIRY = "24h"
ATTEMPT_EXPIRY = "1h"
MASTER_TOKEN_BYTES = 32
SECONDS_PER_UNIT = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def _seconds(duration: str) -> int:
    match = re.fullmatch(r"([1-9][0-9]{0,5})([smhd])", duration)
    if match is None:
        raise argparse.ArgumentTypeError(f"{duration!r} is not a duration; write it like 90s, 30m, 24h or 7d")
    return int(match[1]) * SECONDS_PER_UNIT[match[2]]


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="agl tokens",
        description="Make and read the tokens that a store server asks for.",
        examples=EXAMPLES,
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar=f"{{{','.join(VERBS)}}}")
    parsers = {
        verb: verbs.add_parser(verb, help=what, description=f"{what.capitalize()}.", examples=EXAMPLES)
        for verb, what in VERBS.items()
    }
    runner, reader, attempt, show = (parsers[verb] for verb in ("runner", "reader", "attempt", "show"))
    attempt.add_argument("rollout_id", metavar="ROLLOUT_ID")
    attempt.add_argument("attempt_id", metavar="ATTEMPT_ID")
    for signer, expiry in ((runner, RUNNER_EXPIRY), (reader, RUNNER_EXPIRY), (attempt, ATTEMPT_EXPIRY)):
        signer.add_argument(
            "--expires",
            type=_seconds,
            default=expiry,
            metavar="DURATION",
            help=f"how long it is valid; {expiry} by default",
        )
        signer.add_argument("--token", metavar="SECRET", help="the server's master token; AGL_STORE_TOKEN by default")
    show.add_argument("signed", metavar="TOKEN", help="the token, or - to read it from standard input")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    if arguments.verb == "new":
        _new()
    elif arguments.verb == "show":
        _show(sys.stdin.read().strip() if arguments.signed == "-" else arguments.signed)
    else:
        _sign(arguments)
    return 0


def _new() -> None:
    token = secrets.token_urlsafe(MASTER_TOKEN_BYTES)
    while token.startswith("-"):  # a shell command would take it for an option
        token = secrets.token_urlsafe(MASTER_TOKEN_BYTES)
    sys.stdout.write(f"{token}\n")
    _note("This token permits everything; give it to the server as AGL_STORE_TOKEN and keep it secret.")


def _sign(arguments: argparse.Namespace) -> None:
    secret = resolve_str_env_var(LightningEnvVar.AGL_STORE_TOKEN, arguments.token)
    if not secret:
        raise ConfigurationError(
            "There is no master token to sign with; set AGL_STORE_TOKEN or pass --token SECRET "
            "(`agl tokens new` makes one)."
        )
    if arguments.verb == "attempt":
        scope = Scope("attempt", arguments.rollout_id, arguments.attempt_id)
    else:
        scope = Scope(arguments.verb)
    expires_at = int(time.time()) + arguments.expires
    sys.stdout.write(f"{sign_token(secret, scope, expires_at=expires_at)}\n")
    _note(f"Scope: {scope}. Valid until {_when(expires_at)}.")


def _show(token: str) -> None:
    said = describe_token(token)
    expiry = "never" if said.expires_at is None else _when(said.expires_at)
    if said.expires_at is not None and said.expires_at <= time.time():
        expiry += " (expired)"
    lines = {"scope": said.scope.kind, "rollout": said.scope.rollout_id, "attempt": said.scope.attempt_id}
    for name, value in {**lines, "expires": expiry}.items():
        if value is not None:
            sys.stdout.write(f"{name:<8} {value if value.isprintable() else ascii(value)}\n")
    _note("The signature was not checked; only the server that signed it can tell whether it is genuine.")


def _when(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, ValueError, OSError):  # beyond the calendar
        return f"{seconds:.0f} seconds since the epoch"


def _note(text: str) -> None:
    sys.stderr.write(f"{text}\n")
