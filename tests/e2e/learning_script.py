"""The calculator agent learns, in processes as a user has them; tests interrupt it, kill it and start it again.

    python learning_script.py FOLDER STEPS SAVE_EVERY

Goes on from what is in the folder. Writes a line to FOLDER/log for each step, and FOLDER/result.json at the end.
"""

import json
import logging
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples" / "calc_x")]

import calc_agent  # noqa: E402 # found in the example's folder
import tasks  # noqa: E402

import agentlightning as agl  # noqa: E402
from agentlightning.algorithm.grpo import GRPO, LearnerSettings  # noqa: E402

TASKS_PER_STEP: Final = 16
TRAINING_TASKS: Final = 1000
HELD_OUT_TASKS: Final = 16
SEED: Final = 5


def main() -> None:
    folder, steps, save_every = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    logging.getLogger("agentlightning.algorithm.grpo").addHandler(logging.FileHandler(folder / "log"))
    logging.getLogger("agentlightning.algorithm.grpo").setLevel(logging.INFO)
    algorithm = GRPO(
        "tiny",
        tasks_per_step=TASKS_PER_STEP,
        steps=steps,
        learning=LearnerSettings(threads=1),
        checkpoints=folder / "checkpoints",
        output=folder / "model",
        save_every=save_every,
        resume=True,
        seed=SEED,
    )
    trainer = agl.Trainer(
        algorithm=algorithm,
        store=f"sqlite:///{folder / 'runs.db'}",
        strategy={"type": "cs", "server_port": 0},
        runner={"type": "agentlightning.LitAgentRunner", "max_concurrency": 24},
        progress="off",
    )
    trainer.fit(
        calc_agent.solve,
        train_dataset=tasks.tasks(TRAINING_TASKS, held_out=False),
        val_dataset=tasks.tasks(HELD_OUT_TASKS, held_out=True),
    )
    assert algorithm.baseline is not None
    assert algorithm.result is not None
    told = {"base": vars(algorithm.baseline), "after": vars(algorithm.result), "rewards": algorithm.progress.rewards}
    (folder / "result.json").write_text(json.dumps({**told, "steps": algorithm.progress.step}))


if __name__ == "__main__":
    main()
