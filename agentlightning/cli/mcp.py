"""`agl mcp`: a store as tools for coding agents, over the Model Context Protocol on standard input and output.

The tools read runs, rollouts, verdicts and resources. One that runs an agent is there only if the user allows it.
"""

import argparse
import asyncio
import difflib
import functools
import json
import sys
from collections.abc import Awaitable, Callable
from typing import Any, Final

from agentlightning.adapter import TraceToMessages
from agentlightning.cli.command import (
    argument,
    cli_command,
)
from agentlightning.cli.stores import for_reading, open_store
from agentlightning.cli.why import judged
from agentlightning.errors import AgentLightningError, ConfigurationError
from agentlightning.store import LightningStore
from agentlightning.types import NamedResources, PromptTemplate, RolloutStatus
from agentlightning.types.rewards import final_reward_of
from agentlightning.utils.installation import install_command
from agentlightning.utils.secret_names import masked

MOST_ROWS: Final = 100
"""A coding agent reads an answer whole, so that long lists cost it dearly."""
MOST_TEXT: Final = 2_000
EVALUATION_SECONDS: Final = 3_600.0

INSTRUCTIONS = (
    "Trainings of AI agents, kept in a store. Begin with `runs`, then `why` for what a run gained or why it gained "
    "nothing; `rollouts` and `rollout` show what the agent did, `diff` how prompts changed."
)


class StoreTools:
    """What a coding agent may ask of a store; each method is a tool, with its docstring as the description."""

    def __init__(self, store: LightningStore) -> None:
        self._store = store

    async def runs(self, limit: int = 20) -> list[dict[str, Any]]:
        """The newest runs (trainings and evaluations), with their status and verdict in one sentence."""
        found = await self._store.query_runs(sort_by="start_time", sort_order="desc", limit=_bounded(limit))
        return [
            {
                **run.model_dump(include={"run_id", "name", "status", "start_time", "end_time"}),
                "verdict": (run.summary.get("verdict") or {}).get("sentence"),
            }
            for run in found
        ]

    async def run(self, run_id: str, metrics: list[str] | None = None) -> dict[str, Any]:
        """A run's configuration, summary, and its metrics by step; name metrics such as `reward/mean` for fewer."""
        run = await self._store.get_run_by_id(run_id)
        if run is None:
            raise ConfigurationError(f"There is no run '{run_id}'; `runs` lists them.")
        points = await self._store.query_metrics(run_id, names=metrics)
        return {**run.model_dump(), "metrics": [{"step": point.step, **point.values} for point in points]}

    async def why(self, id: str | None = None) -> dict[str, Any]:
        """What a run gained or why it gained nothing, with advice; of a rollout, what became of it.

        Without an id, the newest run.
        """
        found, _ = await judged(self._store, id)
        return found

    async def rollouts(
        self,
        run_id: str | None = None,
        status: RolloutStatus | None = None,
        error_contains: str | None = None,
        reward_max: float | None = None,
        limit: int = 20,
    ) -> list[dict[str, Any]]:
        """The newest rollouts, of a run, a status, an error text, or with a reward of at most so much."""
        found = await self._store.query_rollouts(
            run_id_in=None if run_id is None else [run_id],
            status_in=None if status is None else [status],
            error_contains=error_contains,
            reward_max=reward_max,
            sort_by="start_time",
            sort_order="desc",
            limit=_bounded(limit),
        )
        return [
            {
                **one.model_dump(include={"rollout_id", "status", "mode", "start_time", "end_time"}),
                "task": _shortened(one.input),
            }
            for one in found
        ]

    async def rollout(self, rollout_id: str) -> dict[str, Any]:
        """A rollout: its task, attempts, reward, and the conversations of its last attempt."""
        rollout = await self._store.get_rollout_by_id(rollout_id)
        if rollout is None:
            raise ConfigurationError(f"There is no rollout '{rollout_id}'; `rollouts` lists them.")
        spans = list(await self._store.query_spans(rollout_id, "latest"))
        attempts = await self._store.query_attempts(rollout_id)
        return {
            **rollout.model_dump(mode="json", exclude={"attempt"}),
            "attempts": [attempt.model_dump(mode="json") for attempt in attempts],
            "reward": final_reward_of(spans) if spans else None,
            "conversations": TraceToMessages().adapt(spans) if spans else [],
        }

    async def diff(self, old: str, new: str) -> str:
        """How prompts differ between two resources, given by their ids (`resources_id` of rollouts)."""
        before, after = _texts(await self._resources(old)), _texts(await self._resources(new))
        lines = difflib.unified_diff(before, after, fromfile=old, tofile=new, lineterm="")
        return "\n".join(lines) or "They are the same."

    async def _resources(self, resources_id: str) -> NamedResources:
        update = await self._store.get_resources_by_id(resources_id)
        if update is None:
            raise ConfigurationError(f"There are no resources '{resources_id}'.")
        return update.resources


async def evaluate(target: str, agent: str, data: str, n: int | None = None) -> str:
    """Run `agl eval TARGET --agent MODULE:AGENT --data FILE.jsonl`; returns the score as JSON.

    This runs the agent's code on this machine.
    """
    words = ["eval", target, "--agent", agent, "--data", data, "--json", *(() if n is None else ("--n", str(n)))]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "agentlightning.cli", *words),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        output, errors = await asyncio.wait_for(process.communicate(), EVALUATION_SECONDS)
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode:
        raise AgentLightningError(errors.decode(errors="replace")[-MOST_TEXT:])
    return output.decode()


def _bounded(limit: int) -> int:
    return max(1, min(limit, MOST_ROWS))


def _shortened(value: object) -> str:
    text = str(value)
    return text if len(text) <= MOST_TEXT else f"{text[:MOST_TEXT]}…"


def _texts(resources: NamedResources) -> list[str]:
    """Line by line, with secrets masked as for readers."""
    lines = []
    for name, resource in sorted(resources.items()):
        text = (
            resource.template
            if isinstance(resource, PromptTemplate)
            else json.dumps(masked(resource.model_dump(mode="json")), indent=2, ensure_ascii=False)
        )
        lines += [f"[{name}]", *text.splitlines()]
    return lines


@cli_command(
    "mcp",
    description="Show a store to coding agents: runs, verdicts, rollouts and diffs as tools (Model Context Protocol).",
    examples="""\
examples:
  agl mcp runs.db                              tools that read a store
  agl mcp http://127.0.0.1:4747                the same of a server, while a training writes to it
  agl mcp runs.db --allow-evaluation           and one that runs `agl eval`, with agents of this folder

In the configuration of a coding agent: {"command": "agl", "args": ["mcp", "runs.db"]}""",
    arguments=(
        argument("store", metavar="STORE", help="a server's address, a file, or postgresql://…"),
        argument("--token", help="token that the server requires (default: AGL_STORE_TOKEN)"),
        argument("--allow-evaluation", action="store_true", help="add a tool that runs agents with `agl eval`"),
    ),
)
def main(arguments: argparse.Namespace) -> int:
    try:
        from mcp.server import MCPServer
        from mcp.server.mcpserver.exceptions import ToolError
    except ImportError as error:
        raise ConfigurationError(f"`agl mcp` needs the package mcp: run `{install_command('mcp')}`.") from error
    access = for_reading(arguments.store, arguments.token)
    tools = StoreTools(open_store(access.address, access.token, must_exist=True))
    server = MCPServer("agentlightning", instructions=INSTRUCTIONS, log_level="WARNING")
    offered: list[Callable[..., Awaitable[object]]] = [
        *(tools.runs, tools.run, tools.why, tools.rollouts, tools.rollout, tools.diff),
        *((evaluate,) if arguments.allow_evaluation else ()),
    ]
    for tool in offered:
        server.add_tool(_with_errors(tool, ToolError))
    server.run("stdio")
    return 0


def _with_errors(tool: Callable[..., Awaitable[object]], kind: type[Exception]) -> Callable[..., Awaitable[object]]:
    """The same tool, with errors of ours as the kind whose text a coding agent gets to see."""

    @functools.wraps(tool)
    async def wrapped(*arguments: object, **options: object) -> object:
        try:
            return await tool(*arguments, **options)
        except AgentLightningError as error:
            raise kind(str(error)) from None

    return wrapped
