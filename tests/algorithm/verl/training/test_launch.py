"""What is looked at before a training is started, with the installed verl."""

import importlib.util
import time
from pathlib import Path
from typing import Any

import pytest

from agentlightning.algorithm.verl import VERL, compose
from agentlightning.errors import ConfigurationError
from tests.algorithm.verl.training.test_training import config_in

pytestmark = pytest.mark.filterwarnings("default")  # verl and what it imports warn of themselves

OF_RELEASE_0_2: dict[str, Any] = {
    "algorithm": {"adv_estimator": "grpo", "use_kl_in_reward": False},
    "data": {"train_batch_size": 32, "max_prompt_length": 4096, "max_response_length": 2048},
    "actor_rollout_ref": {
        "rollout": {
            "tensor_model_parallel_size": 1,
            "n": 4,
            "log_prob_micro_batch_size_per_gpu": 4,
            "name": "vllm",
            "multi_turn": {"format": "hermes"},
            "gpu_memory_utilization": 0.6,
            "engine_kwargs": {"vllm": {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}},
        },
        "actor": {
            "ppo_mini_batch_size": 32,
            "ppo_micro_batch_size_per_gpu": 4,
            "optim": {"lr": 1e-6},
            "use_kl_loss": False,
            "kl_loss_coef": 0.0,
            "entropy_coeff": 0,
            "clip_ratio_low": 0.2,
            "clip_ratio_high": 0.3,
            "fsdp_config": {"param_offload": True, "optimizer_offload": True},
        },
        "ref": {"log_prob_micro_batch_size_per_gpu": 8, "fsdp_config": {"param_offload": True}},
        "model": {"path": "a-model", "use_remove_padding": True, "enable_gradient_checkpointing": True},
    },
    "trainer": {
        "n_gpus_per_node": 1,
        "val_before_train": True,
        "critic_warmup": 0,
        "logger": ["console"],
        "nnodes": 1,
        "project_name": "AgentLightning",
        "experiment_name": "calc_x",
        "save_freq": 64,
        "test_freq": 32,
        "total_epochs": 2,
    },
}


def test_a_configuration_of_the_earlier_releases_is_accepted_by_verl() -> None:
    from agentlightning.algorithm.verl.launch import _check

    config = compose(OF_RELEASE_0_2)

    _check(config)
    rollout = config["actor_rollout_ref"]["rollout"]
    assert (rollout["prompt_length"], rollout["response_length"], rollout["calculate_log_probs"]) == (4096, 2048, True)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"actor_rollout_ref": {"rollout": {"calculate_log_probs": False}}}, "calculate_log_probs is False"),
        ({"trainer": {"use_v1": False}}, "trainer.use_v1 is False"),
        ({"actor_rollout_ref": {"rollout": {"multi_turn": {"enable": True}}}}, "multi_turn.enable is True"),
        ({"actor_rollout_ref": {"actor": {"ppo_micro_batch_size_per_gpu": None}}}, "verl refuses"),
    ],
    ids=["log-probabilities", "old trainer", "verl's own turns", "verl"],
)
def test_what_cannot_be_trained_is_refused_before_anything_is_started(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    from omegaconf import OmegaConf

    config = OmegaConf.to_container(OmegaConf.merge(config_in(tmp_path), change))
    assert isinstance(config, dict)

    with pytest.raises(ConfigurationError, match=words):
        VERL({str(name): value for name, value in config.items()}).run(["task"])


@pytest.mark.parametrize(
    ("given", "is_installed", "attention", "is_packed"),
    [
        ({}, False, "sdpa", False),
        ({}, True, None, True),
        ({"actor_rollout_ref": {"model": {"override_config": {"attn_implementation": "eager"}}}}, False, "eager", True),
        ({"ray_kwargs": {"ray_init": {"address": "auto"}}}, False, None, True),
        ({"actor_rollout_ref": {"actor": {"strategy": "megatron"}}}, False, None, True),
    ],
    ids=["no flash-attn", "flash-attn", "chosen", "another machine", "megatron"],
)
def test_without_flash_attn_the_model_learns_with_the_attention_of_torch(
    monkeypatch: pytest.MonkeyPatch,
    given: dict[str, Any],
    is_installed: bool,
    attention: str | None,
    is_packed: bool,
) -> None:
    from omegaconf import OmegaConf

    from agentlightning.algorithm.verl import launch

    config = compose({"actor_rollout_ref": {"model": {"path": "a-model"}}})
    found = importlib.util.find_spec("json") if is_installed else None
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda _: found)
    merged = OmegaConf.merge(config, given)

    model = launch._with_attention(merged)["actor_rollout_ref"]["model"]

    assert (model["override_config"].get("attn_implementation"), model["use_remove_padding"]) == (attention, is_packed)
    assert config["actor_rollout_ref"]["model"]["override_config"] == {}


def test_a_gpu_that_is_not_there_is_named() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")

    with pytest.raises(ConfigurationError, match="a GPU that torch can use"):
        VERL(OF_RELEASE_0_2).run(["task"])


class Waiting:
    """In the place of verl's task runner."""

    def run(self) -> None:
        time.sleep(600)


def test_a_training_that_is_abandoned_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray
    from verl.trainer import main_ppo

    from agentlightning.algorithm.verl.launch import TaskRunnerHere

    algorithm = VERL(OF_RELEASE_0_2)
    ray.init(address="local", num_cpus=1, include_dashboard=False)
    try:
        monkeypatch.setattr(main_ppo, "TaskRunnerV1", ray.remote(Waiting))
        algorithm._task_runner = TaskRunnerHere()
        running = algorithm._task_runner.remote().run.remote()
        algorithm.abandon()

        with pytest.raises(ray.exceptions.RayActorError):
            ray.get(running, timeout=60)
    finally:
        ray.shutdown()
