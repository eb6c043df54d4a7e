"""`agl store`: look into a store file, copy it while it is in use, move it as JSON lines."""

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from agentlightning.errors import AgentLightningError, ConfigurationError
from agentlightning.store import SqliteLightningStore, export_store, import_store

__all__ = ["main"]

EXAMPLES = """\
examples:
  agl store status runs.db               what the store holds
  agl store backup runs.db copy.db       a consistent copy, while runs.db is in use
  agl store export runs.db runs.jsonl    everything as JSON lines
  agl store import new.db runs.jsonl     JSON lines into a new store
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="agl store",
        description="Look into a store file, copy it, move it.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="{status,backup,export,import}")
    status = verbs.add_parser("status", help="show what a store holds")
    status.add_argument("path", type=Path, help="the store file")
    for verb, what, other in (
        ("backup", "copy a store, also while it is in use", "the copy"),
        ("export", "write a store as JSON lines", "the JSON lines"),
        ("import", "read JSON lines into a new store", "the JSON lines"),
    ):
        command = verbs.add_parser(verb, help=what)
        command.add_argument("path", type=Path, help="the store file")
        command.add_argument("file", type=Path, help=other)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    if arguments.verb != "import" and not arguments.path.exists():
        raise ConfigurationError(f"There is no store '{arguments.path}'.")
    if arguments.verb == "import":
        _import(arguments)
    else:
        asyncio.run(_run(arguments))
    return 0


def _import(arguments: argparse.Namespace) -> None:
    """Import into a file; one that was made for it does not outlive a failure."""
    if not arguments.file.exists():
        raise ConfigurationError(f"There is no file '{arguments.file}'.")
    is_new = not arguments.path.exists()
    try:
        asyncio.run(_run(arguments))
    except AgentLightningError:
        if is_new:
            arguments.path.unlink(missing_ok=True)
        raise


async def _run(arguments: argparse.Namespace) -> None:
    console = Console()
    async with SqliteLightningStore(arguments.path) as store:
        with console.status(f"{arguments.verb} {arguments.path}"):
            if arguments.verb == "status":
                counts = dict(await store.statistics())
            elif arguments.verb == "backup":
                await store.backup(arguments.file)
                counts = {"bytes": arguments.file.stat().st_size}
            elif arguments.verb == "export":
                counts = dict(await export_store(store, arguments.file))
            else:
                counts = dict(await import_store(store, arguments.file))
    table = Table(title=f"{arguments.verb} {arguments.path}", show_header=False)
    for name, value in counts.items():
        table.add_row(name, f"{value:,}" if isinstance(value, int) else str(value))
    console.print(table)
