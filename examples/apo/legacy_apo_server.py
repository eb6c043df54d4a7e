"""The algorithm's side of the v0.1 protocol: find the better of two prompts with clients that poll for tasks.

It publishes a prompt, queues tasks, waits for the results and compares the rewards. The clients are started as
processes of their own; they could as well run on other machines. At the end each client is told to stop.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from agentlightning.server import AgentLightningServer
from agentlightning.types import PromptTemplate

CLIENT = Path(__file__).parent / "legacy_apo_client.py"
CANDIDATES = ("What is {a} plus {b}?", "What is {a} plus {b}? Answer with the number only.")
TASKS = [{"a": a, "b": b} for a in range(1, 4) for b in range(1, 4)]
PATIENCE_SECONDS = 60.0


async def measure(server: AgentLightningServer, template: str) -> float:
    """Publish a prompt, have every task run with it, and average the rewards."""
    resources_id = await server.update_resources({"prompt": PromptTemplate(template=template, engine="f-string")})
    rollout_ids = [await server.queue_task(task, mode="train", resources_id=resources_id) for task in TASKS]
    rewards = []
    for rollout_id in rollout_ids:
        rollout = await server.poll_completed_rollout(rollout_id, timeout=PATIENCE_SECONDS)
        if rollout is None:
            raise TimeoutError(f"Rollout {rollout_id} took longer than {PATIENCE_SECONDS:.0f} s; is a client running?")
        rewards.append(rollout.final_reward or 0.0)
    return sum(rewards) / len(rewards)


async def learn(server: AgentLightningServer) -> str:
    """The prompt with the highest mean reward."""
    scores = {}
    for template in CANDIDATES:
        scores[template] = await measure(server, template)
        print(f"{scores[template]:.2f}  {template}")
    return max(scores, key=scores.__getitem__)


async def dismiss(server: AgentLightningServer, clients: int) -> None:
    """Tell each client to stop, and wait until it has understood."""
    for rollout_id in [await server.queue_task({"stop": True}) for _ in range(clients)]:
        await server.poll_completed_rollout(rollout_id, timeout=PATIENCE_SECONDS)


async def run(port: int, clients: int) -> None:
    server = AgentLightningServer(port=port)
    await server.start()
    print(f"serving on {server.endpoint}", flush=True)
    command = (sys.executable, str(CLIENT), server.endpoint)
    processes = [await asyncio.create_subprocess_exec(*command) for _ in range(clients)]
    try:
        best = await learn(server)
        await dismiss(server, max(clients, 1))
    finally:
        for process in processes:
            if process.returncode is None and not await _ends(process):
                process.kill()
                await process.wait()
        await server.stop()
    print(f"winner: {best}")


async def _ends(process: asyncio.subprocess.Process) -> bool:
    """Whether a client ends by itself soon."""
    try:
        await asyncio.wait_for(process.wait(), timeout=5.0)
    except asyncio.TimeoutError:
        return False
    return True


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Find the better of two prompts over the v0.1 protocol.")
    parser.add_argument("--port", type=int, default=0, help="port to serve on (default: a free one)")
    parser.add_argument("--clients", type=int, default=2, help="clients to start; 0 waits for one that you start")
    arguments = parser.parse_args(argv)
    asyncio.run(run(arguments.port, arguments.clients))


if __name__ == "__main__":
    main()
