"""Train the calculator agent of `examples/calc_x` with verl, on one GPU.

python examples/calc_x_verl/train.py [--model Qwen/Qwen2.5-0.5B-Instruct] [--steps 100]
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import agentlightning as agl

sys.path.insert(0, str(Path(__file__).parents[1] / "calc_x"))

import calc_agent
import tasks

TRAINING_TASKS = 4_096
HELD_OUT_TASKS = 128
MOST_TOKENS = 128
"""Of an answer: a chat model writes a tool call with more of them than the tiny model does."""

CONFIG: dict[str, Any] = {
    "algorithm": {"adv_estimator": "grpo", "use_kl_in_reward": False},
    "data": {"train_batch_size": 32, "max_prompt_length": 1024, "max_response_length": 512},
    "actor_rollout_ref": {
        "model": {"path": "Qwen/Qwen2.5-0.5B-Instruct", "enable_gradient_checkpointing": True},
        "rollout": {
            "name": "vllm",
            "n": 4,
            "tensor_model_parallel_size": 1,
            "gpu_memory_utilization": 0.5,
            "log_prob_micro_batch_size_per_gpu": 8,
        },
        "actor": {
            "ppo_mini_batch_size": 32,
            "ppo_micro_batch_size_per_gpu": 8,
            "optim": {"lr": 1e-6},
            "use_kl_loss": False,
            "clip_ratio_low": 0.2,
            "clip_ratio_high": 0.3,
        },
    },
    "trainer": {
        "n_gpus_per_node": 1,
        "nnodes": 1,
        "val_before_train": True,
        "test_freq": 10,
        "save_freq": 50,
        "total_training_steps": 100,
        "logger": ["console"],
        "project_name": "AgentLightning",
        "experiment_name": "calc_x",
    },
    "agentlightning": {"trace_aggregator": {"level": "trajectory"}},
}


def train(config: dict[str, Any]) -> None:
    """One training with the agent as it is."""
    calc_agent.MOST_TOKENS = MOST_TOKENS
    trainer = agl.Trainer(
        algorithm=agl.VERL(config),
        strategy={"type": "cs", "server_port": 0},
        runner={"type": "agentlightning.LitAgentRunner", "max_concurrency": 32},
    )
    trainer.fit(
        calc_agent.solve,
        train_dataset=tasks.tasks(TRAINING_TASKS, held_out=False),
        val_dataset=tasks.tasks(HELD_OUT_TASKS, held_out=True),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=CONFIG["actor_rollout_ref"]["model"]["path"])
    parser.add_argument("--steps", type=int, default=CONFIG["trainer"]["total_training_steps"])
    options = parser.parse_args()
    CONFIG["actor_rollout_ref"]["model"]["path"] = options.model
    CONFIG["trainer"]["total_training_steps"] = options.steps
    train(CONFIG)


if __name__ == "__main__":
    main()
