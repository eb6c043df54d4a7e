"""Train the calculator agent on three questions in one conversation: what `agl demo` does, as a script of your own.

    python train.py [--steps 40] [--folder calc]

Start it again with `--resume` to go on from the last checkpoint in the folder.
"""

import argparse
from pathlib import Path

import calc_agent
import tasks

import agentlightning as agl
from agentlightning.algorithm.grpo import GRPO, LearnerSettings

QUESTIONS = 3
TRAINING_TASKS = 6_000
HELD_OUT_TASKS = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("calc"))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--held-out", type=int, default=HELD_OUT_TASKS, help="tasks to validate with")
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    algorithm = GRPO(
        "tiny",
        tasks_per_step=10,
        steps=options.steps,
        target_reward=0.97,
        learning=LearnerSettings(epochs=2),  # cheaper than more rollouts
        validate_every=10,
        validation_temperature=1.0,  # as in training
        output=options.folder / "model",
        checkpoints=options.folder / "checkpoints",
        resume=options.resume,
    )
    trainer = agl.Trainer(
        algorithm=algorithm,
        store=f"sqlite:///{options.folder / 'runs.db'}",
        strategy={"type": "cs", "server_port": 0},
        runner={"type": "agentlightning.LitAgentRunner", "max_concurrency": 24},
    )
    trainer.fit(
        calc_agent.solve_all,
        train_dataset=tasks.conversations(TRAINING_TASKS, questions=QUESTIONS, held_out=False),
        val_dataset=tasks.conversations(options.held_out, questions=QUESTIONS, held_out=True),
    )
    print(f"held-out reward before: {algorithm.baseline}")
    print(f"held-out reward after:  {algorithm.result}")


if __name__ == "__main__":
    main()
