"""Two agents work on a task together, and one of them learns. No key, no GPU, no network.

    python train.py [--steps 24]

The solver answers a question; the editor passes the answer on. Only what the solver chose is trained, although the
reward is given for what the editor says.
"""

import argparse
import asyncio

from openai import OpenAI

import agentlightning as agl

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")  # its calls are redirected while it trains
TASKS = [f"{a}+{b}?" for a in range(10, 30) for b in range(10, 30)]


def call_model(agent: str, prompt: str) -> str:
    """One model call, inside a span that says which agent made it."""
    with agl.operation(name=agent, **{"gen_ai.agent.name": agent}):
        reply = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": prompt}], max_tokens=8
        )
    return reply.choices[0].message.content or ""


def team(question: str) -> float:
    """1 if what the two answer together is an even number."""
    draft = call_model("solver", question)
    answer = call_model("editor", f"say {draft}")
    return float(answer.endswith(("0", "2", "4", "6", "8")))


async def calls_by_agent(store: agl.LightningStore) -> dict[str, int]:
    """How many model calls of each agent could be learned from, in the newest hundred rollouts."""
    calls = dict.fromkeys(("solver", "editor"), 0)
    for rollout in await store.query_rollouts(sort_by="start_time", sort_order="desc", limit=100):
        spans = await store.query_spans(rollout.rollout_id)
        for agent in calls:
            trajectory = agl.TraceToTrajectory(agent_match=agent).adapt(spans)
            calls[agent] += sum(len(sequence.calls) for sequence in trajectory.sequences)
    return calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--held-out", type=int, default=128, help="tasks to validate with")
    parser.add_argument("--store", default="sqlite:///multi_agent.db", help="where runs are kept")
    options = parser.parse_args()
    algorithm = agl.GRPO("tiny", steps=options.steps, agent_match="solver", validation_temperature=1.0)
    trainer = agl.Trainer(
        algorithm=algorithm,
        store=options.store,
        runner={"type": "agentlightning.LitAgentRunner", "max_concurrency": 16},
        name="solver and editor",
    )
    trainer.fit(team, TASKS[options.held_out :], TASKS[: options.held_out])
    print(f"even numbers before: {algorithm.baseline}")
    print(f"even numbers after:  {algorithm.result}")
    print(
        "calls in the last hundred rollouts, of which the solver's were trained:",
        asyncio.run(calls_by_agent(trainer.store)),
    )


if __name__ == "__main__":
    main()
