"""`agl store`: serve a store; look into one, copy it while it is in use, move it as JSON lines."""

import argparse
import asyncio
import gc
import signal
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from agentlightning.cli.command import (
    argument,
    cli_command,
    named_path,
    port_number,
    positive_number,
    print_json,
    say,
    seconds,
    verbs,
)
from agentlightning.cli.stores import (
    existing_file,
    for_reading,
    is_database,
    is_remote,
    open_store,
    path_of,
    postgres_store,
    statistics_of,
)
from agentlightning.env_var import LightningEnvVar, resolve_str_env_var
from agentlightning.errors import ConfigurationError
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
from agentlightning.store.local import DEFAULT_MAX_ATTEMPT_BYTES, DEFAULT_MAX_ATTEMPT_SPANS
from agentlightning.utils.server_launcher import ending_signal, tune_process

DEFAULT_PORT = 4747
DEFAULT_SQLITE_PATH = "agentlightning.db"

_COPIED: Final = argument("path", help="the store file, or the address of a database")
_JSON: Final = argument("--json", action="store_true", help="one line of JSON")


@cli_command(
    "store",
    description="Serve a store. With a verb: look into a store, copy it, move it.",
    examples="""\
examples:
  agl store                                            serve a store in memory at http://127.0.0.1:4747
  agl store --backend sqlite --path runs.db            serve a file; it outlives the server
  agl store --backend postgres --dsn postgresql://agl@db/agl     one of several servers on a database
  AGL_STORE_TOKEN=$(agl tokens new) agl store --host 0.0.0.0     for other machines, which need the token
  agl store status runs.db                             what a store holds; also of http://127.0.0.1:4747
  agl store backup runs.db copy.db                     a consistent copy, while runs.db is in use; --force replaces one
  agl store export runs.db runs.jsonl                  everything as JSON lines
  agl store import new.db runs.jsonl                   JSON lines into a new store
  agl store import postgresql://agl@db/agl runs.jsonl  the same into a database; PGPASSWORD lets you in
""",
    arguments=(
        argument("--host", default="127.0.0.1", help="address to bind; this machine only by default"),
        argument("--port", type=port_number, default=DEFAULT_PORT, help="0 takes a free one"),
        argument("--backend", choices=["memory", "sqlite", "postgres"], help="sqlite with --path, else memory"),
        argument("--path", type=named_path, help=f"the SQLite file (default: {DEFAULT_SQLITE_PATH})"),
        argument("--dsn", help="the PostgreSQL database, without a password (default: as PGHOST etc. say)"),
        argument("--token", help="key that callers must show; better given as AGL_STORE_TOKEN, which `ps` hides"),
        argument("--insecure", action="store_true", help="bind a public address without a token all the same"),
        argument("--cors-origin", action="append", help="let web pages of this origin call; may be repeated"),
        argument(
            "--lost-worker-seconds",
            type=seconds,
            default=LOST_WORKER_SECONDS,
            metavar="SECONDS",
            help="how long a worker with heartbeats may be silent until its work is given to others (default: "
            "%(default)g)",
        ),
        argument(
            "--max-attempt-bytes",
            type=positive_number,
            default=DEFAULT_MAX_ATTEMPT_BYTES,
            metavar="BYTES",
            help="how much the spans of one attempt may take (default: %(default)d)",
        ),
        argument(
            "--max-attempt-spans",
            type=positive_number,
            default=DEFAULT_MAX_ATTEMPT_SPANS,
            metavar="SPANS",
            help="how many spans one attempt may have (default: %(default)d)",
        ),
        argument("--n-workers", type=positive_number, default=1, help=argparse.SUPPRESS),
        argument("--tracker", action="append", choices=["prometheus"], help=argparse.SUPPRESS),
        verbs(
            (
                "status",
                "show what a store holds",
                (
                    argument("path", help="the store file, or the address of a server or a database"),
                    argument(
                        "--token",
                        default=argparse.SUPPRESS,
                        help="token that the server requires (default: AGL_STORE_TOKEN)",
                    ),
                    _JSON,
                ),
            ),
            (
                "backup",
                "copy a store, also while it is in use",
                (
                    _COPIED,
                    argument("file", type=named_path, help="the copy"),
                    argument("--force", action="store_true", help="replace an earlier backup of this name"),
                    _JSON,
                ),
            ),
            (
                "export",
                "write a store as JSON lines",
                (
                    _COPIED,
                    argument("file", type=named_path, help="the JSON lines"),
                    argument("--force", action="store_true", help="replace an earlier export of this name"),
                    _JSON,
                ),
            ),
            (
                "import",
                "read JSON lines into a new store",
                (_COPIED, argument("file", type=named_path, help="the JSON lines"), _JSON),
            ),
        ),
    ),
    log_level="INFO",
)
def main(arguments: argparse.Namespace) -> int | None:
    verb, address = arguments.verb, arguments.path
    if verb is None:
        return _serve(arguments)
    if is_remote(address):
        if verb != "status":
            raise ConfigurationError(
                f"`agl store {verb}` needs the file of a store, and '{address}' is a server; run it on the server's "
                "machine, with the path of its file."
            )
        access = for_reading(address, arguments.token)
        asyncio.run(_report(arguments, statistics_of(access.address, access.token)))
    elif verb == "import":
        _import(arguments)
    else:
        if verb != "status" and not arguments.force and arguments.file.is_file():
            if not is_database(address):
                existing_file(address)
            raise ConfigurationError(
                f"'{arguments.file}' exists; give another path, or --force to replace an earlier {verb}."
            )
        asyncio.run(_report(arguments, _carry_out(arguments, open_store(address, must_exist=True))))
    return None


# ---------------------------------------------------------------------- serving


def _serve(arguments: argparse.Namespace) -> int:
    """Serve until Ctrl-C or SIGTERM; returns which of them it was."""
    token = resolve_str_env_var(LightningEnvVar.AGL_STORE_TOKEN, arguments.token)
    refuse_open_address(arguments.host, token, is_insecure=arguments.insecure)
    store = chosen_store(arguments)
    server = LightningStoreServer(
        store,
        arguments.host,
        arguments.port,
        cors_allow_origins=arguments.cors_origin,
        launch_mode="asyncio",
        n_workers=arguments.n_workers,
        token=token,
    )
    return asyncio.run(_serve_until_signal(server, store))


def chosen_store(arguments: argparse.Namespace) -> LightningStore:
    """The store that `--backend`, `--path` and `--dsn` name."""
    backend = arguments.backend or ("sqlite" if arguments.path is not None else "memory")
    named = ("lost_worker_seconds", "max_attempt_bytes", "max_attempt_spans")
    options: dict[str, Any] = {name: getattr(arguments, name) for name in named}
    if arguments.dsn is not None and backend != "postgres":
        raise ConfigurationError(f"--dsn needs --backend postgres; a {backend} store has no database.")
    if arguments.path is not None and backend != "sqlite":
        way_out = "name the database with --dsn" if backend == "postgres" else "a memory store has no file"
        raise ConfigurationError(f"--path {arguments.path} needs --backend sqlite; {way_out}.")
    if backend == "postgres":
        return postgres_store(arguments.dsn or "postgresql://", **options)
    if backend == "sqlite":
        return SqliteLightningStore(arguments.path or DEFAULT_SQLITE_PATH, **options)
    return InMemoryLightningStore(**options)


async def _serve_until_signal(server: LightningStoreServer, store: LightningStore) -> signal.Signals:
    path: object = getattr(store, "path", None) or getattr(store, "address", None)
    described = "a store in memory" if path is None else f"the store {path}"
    with ending_signal() as received:
        await server.start()
        tune_process()
        gc.freeze()  # what is loaded by now stays, and need not be looked through again
        say("store", f"Serving {described} at {server.endpoint} (docs at /docs). Ctrl-C stops it.")
        ended_by = await received
    await server.stop()
    await store.close()
    return ended_by


# ---------------------------------------------------------------------- verbs


def _import(arguments: argparse.Namespace) -> None:
    """Import into a file or a database; a file that was made for it does not outlive a failure."""
    if not arguments.file.exists():
        raise ConfigurationError(f"There is no file '{arguments.file}'.")
    new_file = None
    if not is_database(arguments.path) and not Path(path_of(arguments.path)).exists():
        new_file = Path(path_of(arguments.path))
    try:
        asyncio.run(_report(arguments, _carry_out(arguments, open_store(arguments.path))))
    except BaseException:
        if new_file is not None:
            new_file.unlink(missing_ok=True)
        raise


async def _carry_out(arguments: argparse.Namespace, store: LightningStore) -> dict[str, object]:
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


async def _report(arguments: argparse.Namespace, counting: Awaitable[dict[str, object]]) -> None:
    if arguments.json:
        print_json(await counting)
        return
    console, title = Console(), escape(f"{arguments.verb} {arguments.path}")
    with console.status(title):
        counts = await counting
    table = Table(title=title, show_header=False)
    for name, value in counts.items():
        shown = f"{value:,}" if isinstance(value, int) else escape(str(value))
        if isinstance(value, float):
            shown = f"{value:,.1f}" + (" s" if name == "uptime" else "")
        table.add_row(name, shown)
    console.print(table)
