"""`agl why`: what a run gained or why it gained nothing, and what became of a rollout."""

import argparse
import asyncio
import sys
from typing import Any

from agentlightning.cli.command import (
    argument,
    cli_command,
    print_json,
)
from agentlightning.cli.stores import for_reading, opened_store
from agentlightning.errors import ConfigurationError
from agentlightning.logging import printable
from agentlightning.store import LightningStore
from agentlightning.verdict import verdict_of_rollout, verdict_of_run


@cli_command(
    "why",
    description="Tell what a run gained, or why it gained nothing, with the figure that shows it and what to try.",
    examples="""\
examples:
  agl why runs.db                          the newest run of a store
  agl why runs.db run-4f2a                 this run
  agl why http://127.0.0.1:4747 ro-81c3    what became of one rollout
  agl why runs.db --json                   the same as one line of JSON

docs/how-to/my-agent-does-not-learn.md has every finding, what it means and what to do.""",
    arguments=(
        argument("store", metavar="STORE", help="a server's address, a file, or postgresql://…"),
        argument("id", metavar="RUN|ROLLOUT", nargs="?", help="id of the run or rollout; the newest run by default"),
        argument("--token", help="token that the server requires (default: AGL_STORE_TOKEN)"),
        argument("--json", action="store_true", help="one line of JSON"),
    ),
)
def main(arguments: argparse.Namespace) -> int:
    access = for_reading(arguments.store, arguments.token)
    with opened_store(access.address, access.token, must_exist=True) as store:
        found, lines = asyncio.run(judged(store, arguments.id))
    if arguments.json:
        print_json(found)
    else:
        sys.stdout.write("".join(f"{printable(line)}\n" for line in lines))
    return 0


async def judged(store: LightningStore, wanted: str | None) -> tuple[dict[str, Any], list[str]]:
    """The verdict on a run or a rollout, as data and as lines; None is the newest run."""
    if wanted is not None and (rollout := await store.get_rollout_by_id(wanted)) is not None:
        lines = await verdict_of_rollout(store, rollout)
        return {"rollout_id": wanted, "lines": lines}, lines
    newest = await store.query_runs(sort_by="start_time", sort_order="desc", limit=1) if wanted is None else ()
    run = await store.get_run_by_id(wanted) if wanted is not None else next(iter(newest), None)
    if run is None:
        what = "has no runs yet" if wanted is None else f"has no run and no rollout '{wanted}'"
        raise ConfigurationError(f"The store {what}; `agl dashboard STORE` shows what is there.")
    verdict = await verdict_of_run(store, run)
    head = f"Run '{run.name}' ({run.run_id}) is '{run.status}'."
    return {"run_id": run.run_id, "status": run.status, **verdict.as_summary()}, [head, *str(verdict).splitlines()]
