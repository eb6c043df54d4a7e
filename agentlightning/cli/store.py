"""`agl store`: serve a store; look into one, copy it while it is in use, move it as JSON lines."""

import argparse
import asyncio
import gc
import signal
import sys
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from agentlightning.cli.arguments import CommandParser, named_path, port_number, positive_number, seconds
from agentlightning.cli.store_address import (
    existing_file,
    is_database,
    is_remote,
    path_of,
    postgres_store,
    statistics_of,
)
from agentlightning.env_var import LightningEnvVar, resolve_str_env_var
from agentlightning.errors import ConfigurationError
from agentlightning.logging import setup
from agentlightning.store import (
    InMemoryLightningStore,
    LightningStore,
    LightningStoreServer,
    SqliteLightningStore,
    export_store,
    import_store,
)
from agentlightning.store.http.tokens import refuse_open_address
from agentlightning.store.lifecycle import LOST_WORKER_SECONDS
from agentlightning.utils.metrics import ConsoleMetricsBackend, MetricsBackend
from agentlightning.utils.server_launcher import calm_collector, ending_signal

__all__ = ["main"]

DEFAULT_PORT = 4747
DEFAULT_SQLITE_PATH = "agentlightning.db"

EXAMPLES = """\
examples:
  agl store                                            serve a store in memory at http://127.0.0.1:4747
  agl store --backend sqlite --path runs.db            serve a file; it outlives the server
  agl store --backend postgres --dsn postgresql://agl@db/agl     one of several servers on a database
  AGL_STORE_TOKEN=$(agl tokens new) agl store --host 0.0.0.0     for other machines, which need the token
  agl store status runs.db                             what a store holds; also of http://127.0.0.1:4747
  agl store backup runs.db copy.db                     a consistent copy, while runs.db is in use
  agl store export runs.db runs.jsonl                  everything as JSON lines
  agl store import new.db runs.jsonl                   JSON lines into a new store
  agl store import postgresql://agl@db/agl runs.jsonl  the same into a database; PGPASSWORD lets you in
"""
VERB_EXAMPLES = {
    "status": """\
examples:
  agl store status runs.db
  agl store status http://127.0.0.1:4747     of a running server; AGL_STORE_TOKEN lets you in
""",
    "backup": """\
examples:
  agl store backup runs.db copy.db           while runs.db is in use, too
  agl store backup --force runs.db copy.db   replace the copy of yesterday
""",
    "export": """\
examples:
  agl store export runs.db runs.jsonl        one record on each line; `agl store import` reads it
""",
    "import": """\
examples:
  agl store import new.db runs.jsonl         into a new file, whole or not at all
""",
}


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="agl store",
        description="Serve a store. With a verb: look into a store, copy it, move it.",
        examples=EXAMPLES,
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to bind; this machine only by default")
    parser.add_argument(
        "--port", type=port_number, default=DEFAULT_PORT, help="0 takes a free one (default: %(default)s)"
    )
    parser.add_argument("--backend", choices=["memory", "sqlite", "postgres"], help="sqlite with --path, else memory")
    parser.add_argument("--path", type=named_path, help=f"the SQLite file (default: {DEFAULT_SQLITE_PATH})")
    parser.add_argument("--dsn", help="the PostgreSQL database, without a password (default: as PGHOST etc. say)")
    parser.add_argument("--token", help="what callers must show; better given as AGL_STORE_TOKEN, which `ps` hides")
    parser.add_argument("--insecure", action="store_true", help="bind a public address without a token all the same")
    parser.add_argument("--cors-origin", action="append", help="let web pages of this origin call; may be repeated")
    parser.add_argument(
        "--lost-worker-seconds",
        type=seconds,
        default=LOST_WORKER_SECONDS,
        metavar="SECONDS",
        help="how long a worker with heartbeats may be silent until its work is given to others (default: %(default)g)",
    )
    parser.add_argument("--n-workers", type=positive_number, default=1, help="server processes, not for a memory store")
    parser.add_argument(
        "--tracker", action="append", choices=["prometheus", "console"], help="prometheus is always at /metrics"
    )
    parser.add_argument("--log-level", default="INFO", help="DEBUG, INFO, WARNING or ERROR (default: %(default)s)")
    _add_verbs(parser)
    return parser


_WRITING_VERBS = ("backup", "export")


def _add_verbs(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="verb", metavar="{status,backup,export,import}")
    for verb, what, other in (
        ("status", "show what a store holds", None),
        ("backup", "copy a store, also while it is in use", "the copy"),
        ("export", "write a store as JSON lines", "the JSON lines"),
        ("import", "read JSON lines into a new store", "the JSON lines"),
    ):
        command = verbs.add_parser(
            verb,
            help=what,
            description=f"{what.capitalize()}.",
            examples=VERB_EXAMPLES[verb],
        )
        if other is None:
            command.add_argument("path", help="the store file, or the address of a server or a database")
        else:
            command.add_argument("path", help="the store file, or the address of a database")
            command.add_argument("file", type=named_path, help=other)
        if verb in _WRITING_VERBS:
            command.add_argument("--force", action="store_true", help=f"replace an earlier {verb} of this name")


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    if arguments.verb is None:
        return _serve(arguments)
    if is_remote(arguments.path) and arguments.verb != "status":
        raise ConfigurationError(
            f"`agl store {arguments.verb}` needs the file of a store, and '{arguments.path}' is a server; run it on "
            "the server's machine, with the path of its file."
        )
    if arguments.verb == "import":
        _import(arguments)
    elif is_remote(arguments.path):
        asyncio.run(_run(arguments, statistics_of(arguments.path)))
    else:
        path = arguments.path if is_database(arguments.path) else existing_file(arguments.path)
        if arguments.verb in _WRITING_VERBS and not arguments.force and arguments.file.is_file():
            raise ConfigurationError(
                f"'{arguments.file}' exists; give another path, or --force to replace an earlier {arguments.verb}."
            )
        asyncio.run(_run(arguments, _run_on(arguments, path)))
    return 0


# ---------------------------------------------------------------------- serving


def _serve(arguments: argparse.Namespace) -> int:
    token = resolve_str_env_var(LightningEnvVar.AGL_STORE_TOKEN, arguments.token)
    refuse_open_address(arguments.host, token, is_insecure=arguments.insecure)
    setup(arguments.log_level.upper())
    store = _chosen_store(arguments)
    if arguments.n_workers > 1 and isinstance(store, InMemoryLightningStore):
        raise ConfigurationError(
            f"--n-workers {arguments.n_workers} needs --backend sqlite or postgres; processes cannot share memory."
        )
    server = LightningStoreServer(
        store,
        arguments.host,
        arguments.port,
        cors_allow_origins=arguments.cors_origin,
        launch_mode="mp" if arguments.n_workers > 1 else "asyncio",
        n_workers=arguments.n_workers,
        tracker=_chosen_tracker(arguments),
        token=token,
    )
    try:
        ended_by = asyncio.run(_serve_until_signal(server, store))
    except RuntimeError as error:
        print(f"agl store: {error}", file=sys.stderr)  # noqa: T201 # the command's own output
        return 1
    if ended_by == signal.SIGINT:
        raise KeyboardInterrupt
    return 0


def _chosen_store(arguments: argparse.Namespace) -> LightningStore:
    backend = arguments.backend or ("sqlite" if arguments.path is not None else "memory")
    if arguments.dsn is not None and backend != "postgres":
        raise ConfigurationError(f"--dsn needs --backend postgres; a {backend} store has no database.")
    if arguments.path is not None and backend == "postgres":
        raise ConfigurationError(f"--path {arguments.path} needs --backend sqlite; name the database with --dsn.")
    if backend == "postgres":
        return postgres_store(arguments.dsn or "postgresql://", lost_worker_seconds=arguments.lost_worker_seconds)
    if backend == "sqlite":
        return SqliteLightningStore(
            arguments.path or DEFAULT_SQLITE_PATH, lost_worker_seconds=arguments.lost_worker_seconds
        )
    if arguments.path is not None:
        raise ConfigurationError(f"--path {arguments.path} needs --backend sqlite; a memory store has no file.")
    return InMemoryLightningStore(lost_worker_seconds=arguments.lost_worker_seconds)


def _chosen_tracker(arguments: argparse.Namespace) -> MetricsBackend | None:
    return ConsoleMetricsBackend() if "console" in (arguments.tracker or ()) else None


async def _serve_until_signal(server: LightningStoreServer, store: LightningStore) -> signal.Signals:
    """Serve until Ctrl-C or SIGTERM, then finish what was begun; returns which of them it was."""
    with ending_signal() as received:
        await server.start()
        calm_collector()
        gc.freeze()  # what is loaded by now stays, and need not be looked through again
        Console(stderr=True).print(
            f"Serving {escape(_description(store))} at {server.endpoint} (docs at /docs). Ctrl-C stops it.",
            soft_wrap=True,
        )
        ended_by = await received
    await server.stop()
    await store.close()
    return ended_by


def _description(store: LightningStore) -> str:
    path: Any = getattr(store, "path", None) or getattr(store, "address", None)
    return "a store in memory" if path is None else f"the store {path}"


# ---------------------------------------------------------------------- verbs


def _import(arguments: argparse.Namespace) -> None:
    """Import into a file; one that was made for it does not outlive a failure."""
    if not arguments.file.exists():
        raise ConfigurationError(f"There is no file '{arguments.file}'.")
    if is_database(arguments.path):
        asyncio.run(_run(arguments, _run_on(arguments, arguments.path)))
        return
    path = Path(path_of(arguments.path))
    is_new = not path.exists()
    try:
        asyncio.run(_run(arguments, _run_on(arguments, path)))
    except BaseException:
        if is_new:
            path.unlink(missing_ok=True)
        raise


async def _run(arguments: argparse.Namespace, counting: Awaitable[dict[str, Any]]) -> None:
    console = Console()
    with console.status(escape(f"{arguments.verb} {arguments.path}")):
        counts = await counting
    table = Table(title=escape(f"{arguments.verb} {arguments.path}"), show_header=False)
    for name, value in counts.items():
        table.add_row(name, f"{value:,.1f} s" if name == "uptime" else _shown(value))
    console.print(table)


def _shown(value: Any) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.1f}" if isinstance(value, float) else escape(str(value))


async def _run_on(arguments: argparse.Namespace, place: Path | str) -> dict[str, Any]:
    """Carry out a verb on a file, or on a database if the place is a text."""
    store = SqliteLightningStore(place) if isinstance(place, Path) else postgres_store(place)
    try:
        if arguments.verb == "status":
            return dict(await store.statistics())
        if arguments.verb == "backup":
            if not isinstance(store, SqliteLightningStore):
                raise ConfigurationError("A database is backed up with pg_dump, or with `agl store export`.")
            await store.backup(arguments.file)
            return {"bytes": arguments.file.stat().st_size}
        if arguments.verb == "export":
            return dict(await export_store(store, arguments.file))
        return dict(await import_store(store, arguments.file))
    finally:
        await store.close()
