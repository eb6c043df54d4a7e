"""`agl mcp`: a store as tools, called by the client of the `mcp` package over a real process."""

import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.optional import optional

mcp = optional("mcp", reason="the tools need the extra mcp")

from agentlightning.store import SqliteLightningStore  # noqa: E402 # after the check for mcp
from agentlightning.types import LLM, PromptTemplate  # noqa: E402
from tests.verdict.recorded import Recorded  # noqa: E402

READING = {"runs", "run", "why", "rollouts", "rollout", "diff"}


@asynccontextmanager
async def client_of(*arguments: str) -> AsyncIterator[Any]:
    command = ["-m", "agentlightning.cli", "mcp", *arguments]
    server = mcp.StdioServerParameters(command=sys.executable, args=command)
    async with mcp.Client(mcp.stdio_client(server)) as client:
        yield client


async def called(client: Any, tool: str, **arguments: Any) -> Any:
    """What a tool returns, as the client reads it."""
    result = await client.call_tool(tool, arguments)
    text = "".join(part.text for part in result.content)
    if result.is_error:
        return f"error: {text}"
    structured = result.structured_content
    return structured["result"] if structured is not None and set(structured) == {"result"} else structured


@pytest.fixture
async def path(tmp_path: Path) -> Path:
    file = tmp_path / "runs.db"
    store = SqliteLightningStore(file)
    for number, text in enumerate(("Answer.", "Answer briefly.")):
        prompt = PromptTemplate(template=text, engine="f-string")
        headers = {"extra_headers": {"Authorization": f"Bearer secret-{number}"}, "temperature": number}
        llm = LLM(endpoint="http://x", model="m", api_key="secret", sampling_parameters=headers)
        await store.update_resources(f"r{number}", {"llm": llm, "p": prompt})
    run = await Recorded(store).begin()  # type: ignore[arg-type]
    for step in range(3):
        await run.group([0.0] * 4, step=step)
    await run.metrics({"reward/mean": 0.0, "loss": 1.0})
    await run.end()
    await store.close()
    return file


async def test_a_coding_agent_finds_out_why_nothing_was_learned(path: Path) -> None:
    async with client_of(str(path)) as client:
        tools = {tool.name for tool in (await client.list_tools()).tools}
        (run,) = await called(client, "runs")
        whole = await called(client, "run", run_id=run["run_id"], metrics=["reward/mean"])
        why = await called(client, "why")
        rows = await called(client, "rollouts", run_id=run["run_id"], status="succeeded", limit=2)
        rollout = await called(client, "rollout", rollout_id=rows[0]["rollout_id"])
        diff = await called(client, "diff", old="r0", new="r1")
        errors = [await called(client, "rollout", rollout_id="no"), await called(client, "run", run_id="no")]

    assert tools == READING
    assert whole["metrics"] == [{"step": 0, "reward/mean": 0.0}]
    assert why["findings"][0]["name"] == "all_wrong"
    assert (len(rows), rollout["reward"], len(rollout["attempts"])) == (2, 0.0, 1)
    assert ("-Answer." in diff, "+Answer briefly." in diff, "secret" in diff) == (True, True, False)
    assert '"temperature": 1' in diff
    assert ["There is no" in error for error in errors] == [True, True]


async def test_only_a_user_who_allows_it_has_agents_run(path: Path, tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text(json.dumps({"question": "1+1?", "answer": "2"}) + "\n", encoding="utf-8")
    async with client_of(str(path), "--allow-evaluation") as client:
        tools = {tool.name for tool in (await client.list_tools()).tools}
        refused = await called(
            client,
            "evaluate",
            target="http://127.0.0.1:9/v1",
            agent="no_such:agent",
            data=str(tmp_path / "tasks.jsonl"),
        )

    assert tools == READING | {"evaluate"}
    assert "no_such" in refused
