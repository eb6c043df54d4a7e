"""A program in any language as an agent: two prompts are tried on it, and the better one is kept. No model, no network.

The agent is `agent.py`, which is run once for every task. The model is a small server in this process that does sums,
and is brief only when it is told to be.
"""

import asyncio
import json
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from agentlightning.emitter import find_final_reward
from agentlightning.litagent.command import CommandAgent
from agentlightning.runner import LitAgentRunner
from agentlightning.store import InMemoryLightningStore, LightningStore
from agentlightning.tracer import OtelTracer
from agentlightning.types import LLM, PromptTemplate

PROGRAM = Path(__file__).with_name("agent.py")
PROMPTS = ("What is {question}?", "What is {question}? Answer with the number alone.")
TASKS = [{"question": f"{a}+{b}", "expected": str(a + b)} for a, b in ((2, 2), (3, 4), (10, 5), (7, 8))]


class Adder(BaseHTTPRequestHandler):
    """A model that can do one thing."""

    def do_POST(self) -> None:  # the name that http.server calls
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = body["messages"][-1]["content"]
        total = str(sum(map(int, re.findall(r"\d+", prompt))))
        text = total if "number alone" in prompt else f"The answer is {total}."
        answer = json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: object) -> None:
        """Quietly."""


@contextmanager
def model() -> Iterator[LLM]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Adder) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield LLM(endpoint=f"http://127.0.0.1:{server.server_port}/v1", model="adder")
        finally:
            server.shutdown()
            thread.join()


async def mean_reward(store: LightningStore, llm: LLM, template: str) -> float:
    """Run the program on every task, four at a time."""
    prompt = PromptTemplate(template=template, engine="f-string")
    update = await store.add_resources({"llm": llm, "prompt": prompt})
    rollouts = [await store.enqueue_rollout(task, resources_id=update.resources_id) for task in TASKS]
    agent = CommandAgent([sys.executable, PROGRAM], timeout_seconds=30)
    runner = LitAgentRunner[object](OtelTracer(instrument=False), max_rollouts=len(TASKS), max_concurrency=4)
    with runner.run_context(agent=agent, store=store):
        await runner.iter()
    rewards = [find_final_reward(await store.query_spans(rollout.rollout_id)) for rollout in rollouts]
    return sum(reward or 0.0 for reward in rewards) / len(rewards)


async def main() -> None:
    store = InMemoryLightningStore()
    with model() as llm:
        rewards = {prompt: await mean_reward(store, llm, prompt) for prompt in PROMPTS}
    for prompt, reward in rewards.items():
        print(f"{reward:.2f}  {prompt}")
    print("winner:", max(rewards, key=lambda prompt: rewards[prompt]))


if __name__ == "__main__":
    asyncio.run(main())
