"""A training with verl's own loop on a CPU, through a Trainer: two steps, and one session in five crashes."""

import asyncio
import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import openai
import pytest

import agentlightning as agl
from agentlightning.algorithm.verl import VERL
from tests.engine.small_llama import save_small_llama, word_tokenizer

SESSIONS = 3
FIELDS = {
    *("prompts", "responses", "response_mask", "loss_mask", "input_ids", "position_ids", "rollout_log_probs"),
    *("rm_scores", "num_turns", "uid", "multi_modal_inputs", "data_source", "reward_model", "extra_fields"),
}
OF_VERL = {"old_log_probs", "entropy", "log_probs", "advantages", "returns"}
TAG = {"status", "prompt_len", "response_len", "seq_len", "global_steps", "min_global_steps", "max_global_steps"}


def config_in(folder: Path, **agentlightning: Any) -> dict[str, Any]:
    """As the users of earlier releases write it, but for the last entries, which replace the GPUs."""
    return {
        "algorithm": {"adv_estimator": "grpo", "use_kl_in_reward": False},
        "data": {"train_batch_size": 2, "max_prompt_length": 32, "max_response_length": 8, "shuffle": False},
        "actor_rollout_ref": {
            "model": {"path": str(save_small_llama(folder / "model", word_tokenizer()))},
            "rollout": {"name": "vllm", "n": SESSIONS, "log_prob_micro_batch_size_per_gpu": 1},
            "actor": {"ppo_mini_batch_size": 2, "ppo_micro_batch_size_per_gpu": 1, "use_kl_loss": False},
        },
        "trainer": {
            "n_gpus_per_node": 1,
            "nnodes": 1,
            "val_before_train": True,
            "test_freq": 1,
            "logger": ["console"],
            "total_training_steps": 2,
            "resume_mode": "disable",
            "device": "cpu",
            "checkpoint_callback_class": "tests.algorithm.verl.training.faked_workers.FakedWorkers",
        },
        "transfer_queue": {"backend": {"SimpleStorage": {"num_data_storage_units": 1}}},
        "ray_kwargs": {"ray_init": {"address": "local", "num_cpus": 4, "include_dashboard": False}},
        "agentlightning": agentlightning,
        "faked_notes": str(folder / "notes.jsonl"),
    }


def notes_of(folder: Path, kind: str) -> list[Any]:
    lines = map(json.loads, (folder / "notes.jsonl").read_text().splitlines())
    return [line[kind] for line in lines if kind in line]


def ask(llm: agl.LLM, *words: str) -> str:
    """One conversation; the answer to the last of the words."""
    client = openai.OpenAI(base_url=f"{llm.endpoint}/v1", api_key=llm.api_key or "none", max_retries=0)
    messages: list[Any] = []
    for word in words:
        messages.append({"role": "user", "content": word})
        answer = client.chat.completions.create(model=llm.model, messages=messages).choices[0].message
        messages.append({"role": "assistant", "content": answer.content})
    return str(messages[-1]["content"])


@pytest.mark.timeout(240)
@pytest.mark.filterwarnings("default")  # verl, Ray and what they import warn of themselves
class TestTraining:
    def test_two_steps_of_verls_trainer_learn_from_rollouts_of_our_runners(self, tmp_path: Path) -> None:
        numbers = itertools.count()
        store = agl.InMemoryLightningStore()

        @agl.rollout
        def agent(task: dict[str, Any], llm: agl.LLM) -> float:
            if task["name"] == "hopeless" or next(numbers) % 5 == 4:
                raise RuntimeError("crashed")
            return 1.0 if "red" in ask(llm, "green", "white") else -1.0

        names = ["first", "hopeless", "second", "third", "fourth", "fifth"]
        train = [{"name": name, "data_source": "words"} for name in names]
        trainer = agl.Trainer(
            algorithm=VERL(config_in(tmp_path)),
            strategy="shm",
            n_runners=2,
            store=store,
            llm_proxy=agl.LLMProxy(api_key="a-key-of-its-own-for-the-proxy"),
        )
        trainer.fit(agent, train, [{"name": "first"}, {"name": "hopeless"}])

        updates = notes_of(tmp_path, "update")
        calls = notes_of(tmp_path, "call")
        assert len(updates) == 2
        assert not any(notes_of(tmp_path, "asleep"))
        for step, rows in enumerate(updates, 1):
            groups = {row["fields"]["uid"] for row in rows}
            assert len(groups) == 2  # the hopeless group was replaced
            for row in rows:
                fields, tag = row["fields"], row["tag"]
                uid, session, index = row["key"].split("_")
                assert set(fields) == FIELDS | OF_VERL
                assert set(tag) == TAG
                assert (uid, int(session) < SESSIONS, int(index) < 2) == (fields["uid"], True, True)
                assert fields["input_ids"] == fields["prompts"] + fields["responses"]
                assert fields["rollout_log_probs"] == [-1.5] * len(fields["responses"])
                assert set(fields["rm_scores"][:-1]) <= {0.0}
                assert fields["rm_scores"][-1] in (1.0, -1.0)
                assert (fields["num_turns"], fields["data_source"]) == (2, "words")
                assert (tag["global_steps"], tag["min_global_steps"], tag["max_global_steps"]) == (
                    step,
                    step - 1,
                    step - 1,
                )
            sessions = Counter(row["key"].rsplit("_", 1)[0] for row in rows)
            assert set(sessions.values()) == {2}  # a row for each call
        assert {call["temperature"] for call in calls} == {0, 1.0}
        assert calls == [call for call in calls if call["logprobs"] is True and call["id"].startswith("at-")]
        assert_no_rollout_is_open(store)


def assert_no_rollout_is_open(store: Any) -> None:
    rollouts = asyncio.run(store.query_rollouts())
    assert {rollout.status for rollout in rollouts} <= {"succeeded", "failed"}
    assert Counter(rollout.status for rollout in rollouts)["failed"] >= SESSIONS
