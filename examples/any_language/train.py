"""Train the model behind an agent that is a shell script, or a program for Node. No key, no GPU, no network.

    python train.py sh         needs curl
    python train.py node       needs Node 18 or newer

The agent is started once for every rollout; the rest of the training does not know in which language it is written.
"""

import argparse
from pathlib import Path

import agentlightning as agl

FOLDER = Path(__file__).parent
COMMANDS = {"sh": ["sh", str(FOLDER / "agent.sh")], "node": ["node", str(FOLDER / "agent.mjs")]}
TASKS = [f"{a}+{b}?" for a in range(10, 30) for b in range(10, 30)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("language", choices=COMMANDS)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--held-out", type=int, default=128, help="tasks to validate with")
    parser.add_argument("--store", default="sqlite:///any_language.db", help="where runs are kept")
    options = parser.parse_args()
    algorithm = agl.GRPO("tiny", steps=options.steps, tasks_per_step=6, validation_temperature=1.0)
    trainer = agl.Trainer(
        algorithm=algorithm,
        store=options.store,
        runner={"type": "agentlightning.LitAgentRunner", "max_concurrency": 8},
        name=f"even numbers, {options.language}",
    )
    trainer.fit(agl.CommandAgent(COMMANDS[options.language]), TASKS[options.held_out :], TASKS[: options.held_out])
    print(f"even numbers before: {algorithm.baseline}")
    print(f"even numbers after:  {algorithm.result}")


if __name__ == "__main__":
    main()
