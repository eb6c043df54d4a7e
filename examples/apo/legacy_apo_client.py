"""The agent's side of the v0.1 protocol: poll for tasks, run the agent, post the result, until told to stop.

The agent adds two numbers and does what its prompt says, to the letter. No model, no network beyond the server.
"""

import argparse
from collections.abc import Sequence

from agentlightning.client import AgentLightningClient, rollout_from_result
from agentlightning.types import PromptTemplate, Task

POLL_SECONDS = 0.05


def answer(prompt: str, total: int) -> str:
    """Do what the prompt says, and nothing it does not say."""
    return str(total) if "number only" in prompt else f"That would be {total}."


def rollout(task: Task, prompt: PromptTemplate) -> float:
    """Run the agent on one task; full reward if the answer is the sum and nothing else."""
    a, b = task.input["a"], task.input["b"]
    return float(answer(prompt.format(a=a, b=b), a + b) == str(a + b))


def work(client: AgentLightningClient) -> None:
    """Process tasks until one says stop."""
    while (task := client.poll_next_task()) is not None:
        if task.input.get("stop"):
            client.post_rollout(rollout_from_result(task, None))
            return
        update = client.get_resources_by_id(task.resources_id)
        if update is None:
            print(f"no resources for {task.rollout_id}; the server will hand it out again")
            continue
        prompt = update.resources["prompt"]
        assert isinstance(prompt, PromptTemplate), f"'prompt' is a {type(prompt).__name__}"
        client.post_rollout(rollout_from_result(task, rollout(task, prompt)))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Run the agent on the tasks of a legacy server.")
    parser.add_argument("endpoint", help="address of the server, for example http://127.0.0.1:8000")
    with AgentLightningClient(parser.parse_args(argv).endpoint, poll_interval=POLL_SECONDS) as client:
        work(client)
        print(f"client: {client.task_count} tasks")


if __name__ == "__main__":
    main()
